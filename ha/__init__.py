"""halog: a replicated message log for Python, byte-compatible with Apache RocketMQ.

    async with ha.open_master(ha.Config()) as master:
        result = await master.put(ha.Message(topic="greetings", queue_id=0, body=b"hello"))

These names are imported on first use, so that `import ha` stays cheap. ARCHITECTURE.md describes the packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from ha.config import Config
    from ha.node import Node, open_master, open_slave
    from ha.protocol.codes import PutStatus
    from ha.protocol.record import Message

__all__ = ["Config", "Message", "Node", "PutStatus", "__version__", "open_master", "open_slave"]

_HOMES = {
    "Config": "ha.config",
    "Message": "ha.protocol.record",
    "Node": "ha.node",
    "PutStatus": "ha.protocol.codes",
    "open_master": "ha.node",
    "open_slave": "ha.node",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

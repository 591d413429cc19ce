"""halog: a replicated message log for Python, byte-compatible with Apache RocketMQ.

    async with ha.open_master(ha.Config()) as master:
        result = await master.put(ha.Message(topic="greetings", queue_id=0, body=b"hello"))

What is named here is loaded when it is first used, so that `import ha` costs nothing. The rooms and which of them may
import which: ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ha.config import Config
    from ha.node import Node, open_master, open_slave
    from ha.protocol.codes import PutStatus
    from ha.protocol.record import Message

__version__ = "0.1.0"

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

"""halog: a replicated message log for Python, byte-compatible with Apache RocketMQ.

    async with ha.open_master(ha.Config()) as master:
        result = await master.put(ha.LogMessage(topic="greetings", queue_id=0, body=b"hello"))
        async for record in master.messages("greetings", 0):
            print(record.body)

Under Trio the node runs in the program's event loop, under asyncio in a thread.

`LogMessage` is a message for the log of this process; `ha.client.Message` is one for a producer. The names of this
package are imported on first use, so that `import ha` stays cheap. ARCHITECTURE.md describes the packages.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from .version import __version__

if sys.argv[:1] == ["-m"] and os.getpid() == 1:
    # A server that is the first process of a container, before the rest of its modules are imported. The system ignores
    # signals that such a process doesn't handle; ha/process.py handles them once it runs.
    import signal

    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

if TYPE_CHECKING:
    from ha.config import Config
    from ha.node import Node, open_master, open_slave
    from ha.node.in_thread import NodeInThread
    from ha.protocol.codes import PutStatus
    from ha.protocol.record import Message as LogMessage
    from ha.protocol.record import MessageRecord

__all__ = [
    "Config",
    "LogMessage",
    "MessageRecord",
    "Node",
    "NodeInThread",
    "PutStatus",
    "__version__",
    "open_master",
    "open_slave",
]

_HOMES = {
    "Config": "ha.config",
    "LogMessage": "ha.protocol.record:Message",
    "MessageRecord": "ha.protocol.record",
    "Node": "ha.node",
    "NodeInThread": "ha.node.in_thread",
    "PutStatus": "ha.protocol.codes",
    "open_master": "ha.node",
    "open_slave": "ha.node",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, inner_name = _HOMES[name].partition(":")
    return getattr(import_module(module), inner_name or name)

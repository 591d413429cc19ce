"""`python -m ha.slave`: runs a slave, by default of a master on this machine."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

from ha.config import Config
from ha.process import TO_TRY, Entry


def open_service(config: Config) -> AbstractAsyncContextManager[str]:
    """Imports the node's modules, and returns a context manager that runs a slave and yields its READY line."""
    from ha.node import open_slave, serve

    return serve(open_slave(config))


ENTRY = Entry(
    "ha.slave",
    Config,
    open_service,
    defaults={"brokerRole": "SLAVE"},
    unconfigured=TO_TRY,
    later="ha.node.later",
)

if __name__ == "__main__":
    sys.exit(ENTRY.main())

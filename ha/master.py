"""`python -m ha.master`: runs a master, and a name server inside it if `namesrvAddr` is not set."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

from ha.config import Config
from ha.process import TO_TRY, Entry


def open_service(config: Config) -> AbstractAsyncContextManager[str]:
    """Imports the node's modules, and returns a context manager that runs a master and yields its READY line."""
    from ha.node import open_master, serve

    return serve(open_master(config))


ENTRY = Entry(
    "ha.master",
    Config,
    open_service,
    defaults={"brokerRole": "ASYNC_MASTER"},
    unconfigured=TO_TRY,
    later="ha.node.later",
)

if __name__ == "__main__":
    sys.exit(ENTRY.main())

"""`python -m ha.member`: runs a member of a failover group; elections decide whether it is master or slave."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

from ha.config import Config
from ha.process import TO_TRY, Entry


def open_service(config: Config) -> AbstractAsyncContextManager[str]:
    """Imports the node's modules, and returns a context manager that runs a member of a failover group and yields its
    READY line."""
    from ha.node import open_member_node, serve

    return serve(open_member_node(config))


ENTRY = Entry(
    "ha.member",
    Config,
    open_service,
    defaults={"brokerRole": "SYNC_MASTER"},
    unconfigured=TO_TRY,
    later="ha.node.later",
)

if __name__ == "__main__":
    sys.exit(ENTRY.main())

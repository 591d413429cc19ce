"""`python -m ha.member`: a member of a failover group, master or slave as the group elects."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

from ha.config import Config
from ha.process import Entry


def serve(config: Config) -> AbstractAsyncContextManager[str]:
    """The node, imported when it is wanted."""
    from ha.node import serve_member

    return serve_member(config)


ENTRY = Entry("ha.member", Config, serve, defaults={"brokerRole": "SYNC_MASTER"}, later="ha.node.later")

if __name__ == "__main__":
    sys.exit(ENTRY.main())

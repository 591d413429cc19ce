"""`python -m ha.master`: a master, and a name server with it while `namesrvAddr` is unset."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

from ha.config import Config
from ha.process import Entry


def serve(config: Config) -> AbstractAsyncContextManager[str]:
    """The node, imported when it is wanted."""
    from ha.node import serve_master

    return serve_master(config)


ENTRY = Entry("ha.master", Config, serve, defaults={"brokerRole": "ASYNC_MASTER"}, later="ha.node.later")

if __name__ == "__main__":
    sys.exit(ENTRY.main())

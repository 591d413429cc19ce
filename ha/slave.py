"""`python -m ha.slave`: a slave; without further word of the master on this machine."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

from ha.config import Config
from ha.process import Entry


def serve(config: Config) -> AbstractAsyncContextManager[str]:
    """The node, imported when it is wanted."""
    from ha.node import serve_slave

    return serve_slave(config)


ENTRY = Entry("ha.slave", Config, serve, defaults={"brokerRole": "SLAVE"}, later="ha.node.later")

if __name__ == "__main__":
    sys.exit(ENTRY.main())

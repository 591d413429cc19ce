"""`python -m ha.master`: a master, and a name server with it while `namesrvAddr` is unset."""

from __future__ import annotations

import sys

from ha.config import Config
from ha.node import serve_master
from ha.process import Entry

ENTRY = Entry("ha.master", Config, serve_master, defaults={"brokerRole": "ASYNC_MASTER"})

if __name__ == "__main__":
    sys.exit(ENTRY.main())

"""`python -m ha.slave`: a slave; without further word of the master on this machine."""

from __future__ import annotations

import sys

from ha.config import Config
from ha.node import serve_slave
from ha.process import Entry

ENTRY = Entry("ha.slave", Config, serve_slave, defaults={"brokerRole": "SLAVE"})

if __name__ == "__main__":
    sys.exit(ENTRY.main())

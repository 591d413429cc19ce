"""`python -m ha.member`: a member of a failover group, master or slave as the group elects."""

from __future__ import annotations

import sys

from ha.config import Config
from ha.node import serve_member
from ha.process import Entry

ENTRY = Entry("ha.member", Config, serve_member, defaults={"brokerRole": "SYNC_MASTER"})

if __name__ == "__main__":
    sys.exit(ENTRY.main())

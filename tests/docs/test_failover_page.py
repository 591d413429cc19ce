"""docs/failover.md: the group in ten lines comes about, and the command that switches it does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.pages import OWN_NETWORK, blocks, run_script, traced
from tests.failover.etcd_servers import require_etcd

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces, where every port is free"),
]

#: A group has chosen its master when one of its members is one, and the others follow it.
CHOSEN = """
status() { ha status --admin 127.0.0.1:11913 --admin 127.0.0.1:12913 --admin 127.0.0.1:13913 --json 2> status.log; }
export HALOG_ADMIN_TOKEN=let-me-switch-it
until status | grep -q '"in_sync": 2'; do sleep 0.5; done
"""
#: Whoever is the first one by chance: the page's command has number 2 become master.
NOT_2 = """
if ha switch --to 3 --reason first --admin 127.0.0.1:11913; then echo "3 is master"; else echo "3 was master"; fi
until status | grep -q '"in_sync": 2'; do sleep 0.5; done
"""


def test_the_group_in_ten_lines(tmp_path: Path) -> None:
    require_etcd()
    group, switch = blocks("failover.md")
    started = "".join(line for line in group.splitlines(True) if not line.startswith(("pip install", "apt install")))
    output = run_script(traced(["ip link set lo up", started, CHOSEN, NOT_2, switch]), tmp_path, prefix=OWN_NETWORK)
    assert "3 is master" in output or "3 was master" in output
    assert ">>> block 4" in output

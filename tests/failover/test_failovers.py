"""A failover of each kind under load; scripts/failovers runs any number of them."""

import os
from pathlib import Path

import pytest

from tests.failover.etcd_servers import require_etcd
from tests.failover.failovers import KINDS, run_failovers
from tests.faults.switch import NO_IPROUTE2, why_not

pytestmark = [pytest.mark.processes, pytest.mark.long]


async def test_nothing_acknowledged_is_lost_or_acknowledged_twice(tmp_path: Path) -> None:
    require_etcd()
    missing = why_not()
    if missing == NO_IPROUTE2 and os.environ.get("CI", "").lower() == "true":
        pytest.fail(missing, pytrace=False)
    kinds = [kind for kind in KINDS if kind != "cut" or not missing]
    said: list[str] = []
    outcome = await run_failovers(tmp_path, kinds, in_flight=16, seed=1, say=said.append)
    assert outcome.violations == [], said
    assert outcome.consumed >= outcome.acknowledged
    assert sorted(outcome.gaps) == sorted(kinds)

"""A master that ends with 200 requests in flight tells no lie. More often: `scripts/soak --stops 100`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load.stopping import Kind, StopTally, stop_under_load

pytestmark = pytest.mark.processes

SEEDS = (6, 2)
"""The slave is well and the flush synchronous; the slave is stuck and the flush asynchronous."""


@pytest.mark.parametrize("kind", Kind)
def test_nobody_is_told_what_is_not_so(kind: Kind, tmp_path: Path) -> None:
    tally = StopTally()
    for seed in SEEDS:
        tally = stop_under_load(tmp_path / str(seed), kind, seed=seed, tally=tally)
    print(tally)
    assert tally.statuses["SUCCESS"] > 100
    assert tally.sent > 2 * 200

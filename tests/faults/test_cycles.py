"""The end of a run of crash cycles, without any broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tests.faults.consuming import JournaledConsumer
from tests.faults.cycles import Plan, Run


class StalledConsumer:
    """Has the same message count as the other one, and is behind until it was polled a few times."""

    name = "consumer-stalled"
    error_count = 0
    failure = None

    def __init__(self) -> None:
        self.consumed: dict[int, list[int]] = {0: [1, 2, 3]}
        self._rounds: Iterator[int] = iter(range(100))

    @property
    def at_end_count(self) -> int:
        count = max(0, next(self._rounds) - 3)
        if count:
            self.consumed[0] = [1, 2, 3, 4]
        return count


def test_simultaneously_stalled_consumers_are_not_at_the_end() -> None:
    consumers: Any = [StalledConsumer(), StalledConsumer()]
    run = Run(Plan(seed=1, cycle_count=0, slave_count=1, flush="ASYNC_FLUSH"), Path(), print)
    run.wait_consumed(cast(list[JournaledConsumer], consumers))
    assert [consumer.consumed[0] for consumer in consumers] == [[1, 2, 3, 4]] * 2

"""Which connection is closed when there is no room for another one."""

import logging
from contextlib import ExitStack

import trio

from ha.remoting.open_connections import ConnectionCounts, OpenConnections

logger = logging.getLogger(__name__)


class Connection:
    """A connection that counts how often it was looked at."""

    looks = 0

    def __init__(self, host: str, opened_at: float, *, is_used: bool = False) -> None:
        self.peer = (host, 1)
        self.opened_at = opened_at
        self.is_used = is_used
        self.is_evicted = False

    @property
    def is_unused(self) -> bool:
        Connection.looks += 1
        return not self.is_used

    def evict(self) -> None:
        self.is_evicted = self.is_used = True


def counts(**limits: int) -> ConnectionCounts:
    both = {"total_max": 100, "per_host_max": 100, **limits}
    return ConnectionCounts(evictable_after_s=5, total_name="total", per_host_name="host", **both)


async def test_the_oldest_unused_one_is_found_without_a_look_at_all(autojump_clock: object) -> None:
    began = trio.current_time()
    open_ones = OpenConnections[Connection](logger, counts(total_max=100), refused="%s %s %d", ended="%s %d %s %s %d")
    connections = [Connection("h", began + n / 100, is_used=n < 2) for n in range(100)]
    with ExitStack() as stack:
        for each in connections:
            stack.enter_context(open_ones.added(each))
        assert not open_ones.make_room("h"), "none is old enough"
        await trio.sleep(5.5)
        Connection.looks = 0
        assert open_ones.make_room("h")
        assert [each.is_evicted for each in connections].index(True) == 2
        assert Connection.looks == 3
        await trio.sleep(60)
        for each in connections[:99]:
            each.is_used = True
        assert open_ones.make_room("other")
        assert connections[99].is_evicted
        assert not open_ones.make_room("other"), "all are used"


async def test_a_full_host_loses_its_own(autojump_clock: object) -> None:
    began = trio.current_time()
    open_ones = OpenConnections[Connection](logger, counts(per_host_max=2), refused="%s %s %d", ended="%s %d %s %s %d")
    connections = [Connection(host, began + n) for n, host in enumerate("abab")]
    await trio.sleep(20)
    with ExitStack() as stack:
        for each in connections:
            stack.enter_context(open_ones.added(each))
        assert open_ones.make_room("b")
        assert open_ones.make_room("c")
        assert [each.is_evicted for each in connections] == [False, True, False, False]

"""GroupTransfer: each request at its own deadline, each acknowledgement completes exactly what it satisfies."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from ha.protocol.codes import PutStatus
from ha.replication.group_transfer import ALL_IN_SYNC, ANY_SLAVE, AckRequest, GroupTransfer


class Slaves:
    """Acknowledged offsets as a test sets them: (offset, whether in sync)."""

    def __init__(self, *offsets: int) -> None:
        self.offsets = [(offset, True) for offset in offsets]
        self.push2_slave_max_offset = max(offsets, default=0)
        self.by_set: int | None = None

    def acknowledged_by_set(self) -> int | None:
        return self.by_set

    def set(self, *offsets: int) -> None:
        self.offsets = [(offset, True) for offset in offsets]
        self.push2_slave_max_offset = max([self.push2_slave_max_offset, *offsets])

    def acknowledged(self) -> list[int]:
        return sorted((offset for offset, _ in self.offsets), reverse=True)

    def acknowledged_in_sync(self) -> list[int]:
        return sorted((offset for offset, in_sync in self.offsets if in_sync), reverse=True)


class Puts:
    """Submits requests and records when and how each was completed."""

    def __init__(self, transfer: GroupTransfer) -> None:
        self.transfer = transfer
        self.done: list[tuple[float, str, PutStatus]] = []
        self.began = trio.current_time()

    def request(self, name: str, next_offset: int, *, ack_count: int = ANY_SLAVE, timeout_s: float = 3) -> AckRequest:
        def note(status: PutStatus) -> None:
            self.done.append((round(trio.current_time() - self.began, 6), name, status))

        return AckRequest(next_offset, ack_count, trio.current_time() + timeout_s, note)

    async def submit(self, *requests: AckRequest) -> None:
        self.transfer.submit_channel.send_nowait(list(requests))
        await wait_all_tasks_blocked()

    @property
    def outcomes(self) -> list[tuple[str, PutStatus]]:
        return [(name, status) for _, name, status in self.done]


@asynccontextmanager
async def running(slaves: Slaves, *, waiting_count_max: int = 1000) -> AsyncIterator[Puts]:
    transfer = GroupTransfer(slaves, waiting_count_max=waiting_count_max, batch_count_max=16)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transfer.run)
        yield Puts(transfer)
        nursery.cancel_scope.cancel()


async def test_a_request_that_waited_for_a_slave_is_not_completed_by_one_that_finds_none_in_sync() -> None:
    slaves = Slaves(0)
    async with running(slaves) as puts:
        await puts.submit(puts.request("first", 10, ack_count=ALL_IN_SYNC))
        slaves.offsets = [(0, False)]  # the puts themselves took it out of sync
        await puts.submit(puts.request("second", 20, ack_count=ALL_IN_SYNC))
        assert puts.outcomes == [("first", PutStatus.FLUSH_SLAVE_TIMEOUT), ("second", PutStatus.PUT_OK)]


async def test_each_request_ends_at_its_own_deadline() -> None:
    async with running(Slaves(0)) as puts:
        await puts.submit(puts.request("slow", 100, timeout_s=3))
        await trio.sleep(1)
        await puts.submit(puts.request("quick", 50, timeout_s=0.5), puts.request("later", 60, timeout_s=2.5))
        await trio.sleep(9)
        assert puts.done == [
            (1.5, "quick", PutStatus.FLUSH_SLAVE_TIMEOUT),
            (3.0, "slow", PutStatus.FLUSH_SLAVE_TIMEOUT),
            (3.5, "later", PutStatus.FLUSH_SLAVE_TIMEOUT),
        ]


async def test_an_acknowledgement_completes_exactly_what_it_satisfies() -> None:
    slaves = Slaves(0)
    async with running(slaves) as puts:
        await puts.submit(*(puts.request(str(offset), offset) for offset in (300, 100, 200)))
        slaves.set(200)
        puts.transfer.advance()
        assert puts.outcomes == [("100", PutStatus.PUT_OK), ("200", PutStatus.PUT_OK)]
        assert puts.transfer.waiting_count == 1


async def test_an_unsatisfied_request_delays_no_other() -> None:
    slaves = Slaves(500, 0)
    async with running(slaves) as puts:
        await puts.submit(puts.request("needs both", 400, ack_count=3), puts.request("needs one", 450, ack_count=2))
        assert puts.done == [(0.0, "needs one", PutStatus.PUT_OK)]


async def test_a_request_acknowledged_before_is_done_at_once() -> None:
    async with running(Slaves(100)) as puts:
        # RocketMQ 5.x looks at the deadline first and would call this late.
        await puts.submit(puts.request("late but there", 100, timeout_s=-1))
        assert puts.outcomes == [("late but there", PutStatus.PUT_OK)]


@pytest.mark.parametrize(
    ("ack_count", "status"),
    [
        (ANY_SLAVE, PutStatus.SLAVE_NOT_AVAILABLE),
        (2, PutStatus.FLUSH_SLAVE_TIMEOUT),
        (3, PutStatus.FLUSH_SLAVE_TIMEOUT),
        (ALL_IN_SYNC, PutStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
async def test_the_last_slave_that_could_acknowledge_leaves(ack_count: int, status: PutStatus) -> None:
    slaves = Slaves(*[0] * max(1, ack_count - 1))
    async with running(slaves) as puts:
        await puts.submit(puts.request("put", 10, ack_count=ack_count))
        await trio.sleep(1)
        assert puts.done == []
        slaves.offsets.pop()
        puts.transfer.advance()
        assert puts.done == [(1.0, "put", status)]


async def test_without_a_slave_no_request_waits() -> None:
    async with running(Slaves()) as puts:
        await puts.submit(
            puts.request("any", 10),
            puts.request("two", 10, ack_count=2),
            puts.request("all", 10, ack_count=ALL_IN_SYNC),
        )
        assert sorted(puts.done, key=lambda done: done[1]) == [
            (0.0, "all", PutStatus.PUT_OK),
            (0.0, "any", PutStatus.SLAVE_NOT_AVAILABLE),
            (0.0, "two", PutStatus.FLUSH_SLAVE_TIMEOUT),
        ]


async def test_all_in_sync_waits_for_the_last_of_them_but_not_for_one_far_behind() -> None:
    slaves = Slaves(100, 50)
    slaves.offsets.append((0, False))
    async with running(slaves) as puts:
        await puts.submit(puts.request("put", 100, ack_count=ALL_IN_SYNC))
        assert puts.done == []
        slaves.offsets[1] = (100, True)
        puts.transfer.advance()
        assert puts.outcomes == [("put", PutStatus.PUT_OK)]


async def test_requests_above_the_limit_are_refused() -> None:
    async with running(Slaves(0), waiting_count_max=2) as puts:
        await puts.submit(*(puts.request(str(number), 10) for number in range(5)))
        assert puts.outcomes == [(str(number), PutStatus.FLUSH_SLAVE_TIMEOUT) for number in (2, 3, 4)]
        assert puts.transfer.waiting_count == 2


async def test_a_queue_that_stays_full_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    slaves = Slaves(0)
    async with running(slaves, waiting_count_max=4) as puts:
        for number in range(1, 21):
            await puts.submit(puts.request("", 4 * number), puts.request("", 4 * number))
            if number > 3:
                slaves.set(4 * (number - 3))
                puts.transfer.advance()
        assert [record.getMessage() for record in caplog.records] == ["ha.ack_queue_filled waiting=4"]
        slaves.set(1000)
        await puts.submit(puts.request("", 10))
        assert [record.getMessage() for record in caplog.records][1:] == ["ha.ack_queue_drained waiting=0"]


async def test_submit_nowait_takes_a_batch_directly() -> None:
    slaves = Slaves(10)
    async with running(slaves) as puts:
        await wait_all_tasks_blocked()
        puts.transfer.submit_nowait([puts.request("reached", 10)])
        assert puts.outcomes == [("reached", PutStatus.PUT_OK)]
        puts.transfer.submit_nowait([puts.request("first", 20), puts.request("with it", 30)])
        puts.transfer.submit_nowait([puts.request("reached, too", 10)])
        assert puts.outcomes[1:] == [("reached, too", PutStatus.PUT_OK)]
        slaves.set(20)
        puts.transfer.advance()
        assert puts.outcomes[2:] == [("first", PutStatus.PUT_OK)]
        await trio.sleep(9)
        assert puts.done[3:] == [(3.0, "with it", PutStatus.FLUSH_SLAVE_TIMEOUT)]


async def test_submit_nowait_queues_unless_running() -> None:
    transfer = GroupTransfer(Slaves(10), waiting_count_max=9, batch_count_max=16)
    puts = Puts(transfer)
    transfer.submit_nowait([puts.request("early", 10)])
    assert puts.outcomes == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transfer.run)
        await wait_all_tasks_blocked()
        assert puts.outcomes == [("early", PutStatus.PUT_OK)]
        nursery.cancel_scope.cancel()
    with pytest.raises(trio.BrokenResourceError):
        transfer.submit_nowait([puts.request("late", 10)])


async def test_stopping_answers_all_requests() -> None:
    async with running(Slaves(0)) as puts:
        await puts.submit(puts.request("waiting", 10))
        puts.transfer.submit_channel.send_nowait([puts.request("on its way", 10)])
    assert puts.outcomes == [
        ("waiting", PutStatus.FLUSH_SLAVE_TIMEOUT),
        ("on its way", PutStatus.FLUSH_SLAVE_TIMEOUT),
    ]


SLAVE_SETS = st.lists(st.integers(0, 30), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 30), st.sampled_from([1, 2, 3, ALL_IN_SYNC]), st.integers(1, 5)),
        st.tuples(st.just("slaves"), SLAVE_SETS),
        st.tuples(st.just("sleep"), st.integers(1, 3)),
    ),
    max_size=20,
)


@given(STEPS)
def test_every_request_is_answered_once_and_correctly(steps: list[tuple[object, ...]]) -> None:
    async def scenario() -> None:
        slaves = Slaves(0)
        truths: dict[str, list[bool]] = {}
        async with running(slaves) as puts:
            requests: dict[str, AckRequest] = {}
            for number, step in enumerate(steps):
                if step[0] == "put":
                    _, offset, ack_count, timeout_s = step
                    assert isinstance(offset, int)
                    assert isinstance(ack_count, int)
                    assert isinstance(timeout_s, int)
                    request = puts.request(str(number), offset, ack_count=ack_count, timeout_s=timeout_s)
                    requests[str(number)] = request
                    await puts.submit(request)
                elif step[0] == "slaves":
                    offsets = step[1]
                    assert isinstance(offsets, list)
                    slaves.set(*offsets)
                    puts.transfer.advance()
                else:
                    assert isinstance(step[1], int)
                    await trio.sleep(step[1])
                acknowledged = slaves.acknowledged()
                for name, request in requests.items():
                    count = 1 + sum(offset >= request.next_offset for offset in acknowledged)
                    enough = {
                        ANY_SLAVE: slaves.push2_slave_max_offset >= request.next_offset,
                        ALL_IN_SYNC: count == 1 + len(acknowledged),
                    }.get(request.ack_count, count >= request.ack_count)
                    truths.setdefault(name, []).append(enough)
            await trio.sleep(10)
        assert sorted(name for name, _ in puts.outcomes) == sorted(requests)
        for name, status in puts.outcomes:
            if status is PutStatus.PUT_OK:
                assert any(truths[name])

    trio.run(scenario, clock=MockClock(autojump_threshold=0))

"""PullConsumer.reading: when it pulls, what it returns, and positions from which a program could resume at any time."""

import anyio
import pytest
from anyio.lowlevel import checkpoint

from ha.client import MessageQueue, PullConsumer, PullResult, PullStatus, ReadFrom, Reading, Stretch
from ha.client.messages import messages_of
from ha.errors import ConnectionFailed
from ha.protocol.record import split_records
from ha.protocol.remoting import RemotingCommand
from tests.client.backends import on_both_backends
from tests.client.fake_broker import name_server, route_body, serving, serving_all
from tests.client.test_consumer import open_consumer, pulled, record

QUEUES = [MessageQueue("T", "a", number) for number in range(3)]
PULL_COUNT = 2


class Broker:
    """Queues with a number of messages, and the pulls they received."""

    def __init__(self, *counts: int) -> None:
        self.ends = dict(zip(QUEUES, counts, strict=False))
        self.begins = dict.fromkeys(self.ends, 0)
        self.asked: list[tuple[int, int]] = []
        self.grown = anyio.Event()
        self.failure: Exception | None = None
        self.unwanted = range(0)
        self.unreadable: dict[int, int] = {}
        """Queue offset of a message that can't be read: number of pulls that fail to."""
        self.is_holding = False

    async def positions(self) -> dict[MessageQueue, int]:
        await checkpoint()
        return dict.fromkeys(self.ends, 0)

    async def pull(self, queue: MessageQueue, offset: int) -> PullResult:
        self.asked.append((queue.queue_id, offset))
        await checkpoint()
        while self.is_holding and offset == self.ends[queue] and self.failure is None:
            await self.grown.wait()
        if self.failure is not None:
            raise self.failure
        begin, end = self.begins[queue], self.ends[queue]
        if not begin <= offset <= end:
            return self._result(PullStatus.OFFSET_ILLEGAL, queue, max(begin, min(offset, end)))
        if offset == end:
            return self._result(PullStatus.NO_NEW_MSG, queue, offset)
        if self.unreadable.get(offset):
            self.unreadable[offset] -= 1
            return self._result(PullStatus.NO_NEW_MSG, queue, offset)
        following = min(offset + PULL_COUNT, end)
        found = [number for number in range(offset, following) if number not in self.unwanted]
        status = PullStatus.FOUND if found else PullStatus.NO_MATCHED_MSG
        return self._result(status, queue, following, *found)

    def _result(self, status: PullStatus, queue: MessageQueue, next_offset: int, *offsets: int) -> PullResult:
        messages = messages_of(queue, split_records(b"".join(map(record, offsets))))
        return PullResult(status, messages, next_offset, self.begins[queue], self.ends[queue], 0)

    def grow(self, queue: MessageQueue, count: int) -> None:
        self.ends[queue] += count
        self.grown.set()
        self.grown = anyio.Event()

    def reading(self, *, ends: bool = True) -> Reading:
        return Reading(self.positions, self.pull, ends=ends)


def offsets(stretch: Stretch) -> list[int]:
    return [message.queue_offset for message in stretch.messages]


async def settled() -> None:
    """Runs everything that needs no time."""
    for _ in range(30):
        await checkpoint()


async def fail_within(reading: Reading) -> None:
    async with reading:
        async for _ in reading:
            raise ZeroDivisionError


@on_both_backends()
async def test_next_pull_runs_while_the_program_works() -> None:
    broker = Broker(7)
    async with broker.reading() as reading:
        await settled()
        assert (broker.asked, reading.positions) == ([(0, 0)], {QUEUES[0]: 0})
        for number, expected in enumerate([[0, 1], [2, 3], [4, 5]]):
            stretch = await anext(reading)
            assert (offsets(stretch), stretch.begin_offset, stretch.next_offset) == (
                expected,
                2 * number,
                2 * number + 2,
            )
            await settled()
            assert broker.asked == [(0, 2 * ahead) for ahead in range(number + 2)]
            assert reading.positions == {QUEUES[0]: 2 * number + 2}
        assert offsets(await anext(reading)) == [6]
        with pytest.raises(StopAsyncIteration):
            await anext(reading)
        assert reading.positions == {QUEUES[0]: 7}


@on_both_backends()
async def test_queues_are_read_concurrently_and_in_order() -> None:
    broker = Broker(5, 0, 9)
    found: dict[MessageQueue, list[int]] = {}
    async with broker.reading() as reading:
        async for stretch in reading:
            found.setdefault(stretch.queue, []).extend(offsets(stretch))
            assert reading.positions[stretch.queue] == found[stretch.queue][-1] + 1
    assert found == {QUEUES[0]: [*range(5)], QUEUES[2]: [*range(9)]}
    assert reading.positions == broker.ends


@on_both_backends()
async def test_cancelled_wait_loses_no_message() -> None:
    broker = Broker(2)
    broker.is_holding = True
    async with broker.reading(ends=False) as reading:
        assert offsets(await anext(reading)) == [0, 1]
        for count in range(3):
            with anyio.move_on_after(0) as scope:
                await anext(reading)
            assert scope.cancelled_caught
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, reading)
                await settled()
                broker.grow(QUEUES[0], 1)  # arrives while the wait is being cancelled
                if count == 1:
                    await checkpoint()
                tasks.cancel_scope.cancel()
            position = reading.positions[QUEUES[0]]
            if position == 2 + count:
                assert offsets(await anext(reading)) == [position]
            assert reading.positions[QUEUES[0]] == 3 + count


@on_both_backends()
async def test_errors_are_raised_after_earlier_messages() -> None:
    broker = Broker(4)
    async with broker.reading() as reading:
        await settled()
        broker.failure = ConnectionFailed("a:1", "lost")
        assert offsets(await anext(reading)) == [0, 1]
        with pytest.raises(ConnectionFailed):
            await anext(reading)
        assert reading.positions == {QUEUES[0]: 2}
        with pytest.raises(StopAsyncIteration):
            await anext(reading)
    reading = Broker(4).reading()
    with pytest.raises(ZeroDivisionError):
        await fail_within(reading)
    with pytest.raises(RuntimeError, match="is not open: iterate"):
        await anext(reading)
    with pytest.raises(RuntimeError, match="is not open: iterate"):
        await anext(broker.reading())


@on_both_backends()
async def test_deleted_and_filtered_messages_are_skipped() -> None:
    broker = Broker(12)
    broker.begins[QUEUES[0]] = 3
    broker.unwanted = range(5, 9)
    async with broker.reading() as reading:
        assert [(stretch.begin_offset, offsets(stretch)) async for stretch in reading] == [
            (3, [3, 4]),
            (9, [9, 10]),
            (11, [11]),
        ]
    broker.unwanted = range(12)
    async with broker.reading() as reading:
        assert [stretch async for stretch in reading] == []
    assert reading.positions == {QUEUES[0]: 12}


@pytest.mark.parametrize("ends", [True, False])
async def test_a_message_that_can_not_be_read_yet_is_waited_for(
    autojump_clock: object, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """A broker that still tries to repair it answers as at the end of the queue, but with the real end."""
    broker = Broker(6)
    broker.unreadable = {2: 3}
    async with broker.reading(ends=ends) as reading:
        for expected in ([0, 1], [2, 3], [4, 5]):
            assert offsets(await anext(reading)) == expected
        if ends:
            with pytest.raises(StopAsyncIteration):
                await anext(reading)
    [line] = [line.getMessage() for line in caplog.records]
    assert line == f"client.message_not_readable queue={QUEUES[0]} offset=2"


@on_both_backends()
@pytest.mark.parametrize("suggested", [0, 1])
async def test_messages_that_a_suggested_slave_lacks_are_read_from_the_master(*, suggested: int) -> None:
    """The slave is new: it has no messages yet, and keeps the offset (RocketMQ's nextOffsetCorrection). It suggests
    itself if the group's brokerId is its own."""

    def master(command: RemotingCommand) -> RemotingCommand:
        offset = int(command.ext_fields["queueOffset"])
        if offset == 4:
            return pulled(command, 19, next_offset=4, suggest=suggested, end=4)
        return pulled(command, 0, record(offset), offset + 1, suggest=1, end=4)

    def slave(command: RemotingCommand) -> RemotingCommand:
        return pulled(command, 20, next_offset=int(command.ext_fields["queueOffset"]), suggest=suggested, end=0)

    async with open_consumer({0: master, 1: slave}) as (consumer, _), consumer.reading({QUEUES[1]: 0}) as reading:
        assert [offsets(stretch) async for stretch in reading] == [[0], [1], [2], [3]]


@on_both_backends()
@pytest.mark.parametrize("wait_s", [0.0, 15.0])
async def test_messages_before_those_of_a_young_slave_are_read_from_the_master(*, wait_s: float) -> None:
    """The group's brokerId is the slave's."""

    def master(command: RemotingCommand) -> RemotingCommand:
        offset = int(command.ext_fields["queueOffset"])
        return pulled(command, 0, record(offset), offset + 1, suggest=1, end=4)

    def slave(command: RemotingCommand) -> RemotingCommand:
        offset = int(command.ext_fields["queueOffset"])
        if offset < 3:
            return pulled(command, 20, next_offset=offset, suggest=1, begin=3, end=4)
        return pulled(command, 0, record(offset), offset + 1, suggest=1, begin=3, end=4)

    async with (
        open_consumer({0: master, 1: slave}) as (consumer, _),
        consumer.reading({QUEUES[1]: 0}, wait_s=wait_s) as reading,
    ):
        assert [offsets(await anext(reading)) for _ in range(4)] == [[0], [1], [2], [3]]


@on_both_backends()
@pytest.mark.parametrize("wait_s", [0.0, 15.0])
async def test_messages_that_only_the_master_has_wait_for_it(
    *, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wait_s: float
) -> None:
    """A young slave is the only broker that is registered."""
    monkeypatch.setattr("ha.client.reading._PAUSE_S", 0.0)

    def master(command: RemotingCommand) -> RemotingCommand:
        offset = int(command.ext_fields["queueOffset"])
        return pulled(command, 0, record(offset), offset + 1, end=6)

    def slave(command: RemotingCommand) -> RemotingCommand:
        if len(servers[1].commands) == 4:
            addresses[0] = servers[0].address
            routes["T"] = route_body({"a": addresses})
            consumer._client.routes.mark_stale("T")
        return pulled(command, 20, next_offset=int(command.ext_fields["queueOffset"]), begin=5, end=6)

    async with serving_all([master, slave]) as servers:
        addresses = {1: servers[1].address}
        routes = {"T": route_body({"a": addresses})}
        async with (
            serving(name_server(routes)) as names,
            PullConsumer(names.address) as consumer,
            consumer.reading({QUEUES[1]: 1}, wait_s=wait_s) as reading,
        ):
            assert [offsets(await anext(reading)) for _ in range(3)] == [[1], [2], [3]]
    messages = [line.getMessage() for line in caplog.records]
    assert messages == [f"client.message_not_readable queue={QUEUES[1]} offset=1"]


@on_both_backends()
async def test_a_chosen_slave_is_read_from_its_first_message_to_its_last() -> None:
    """A slave keeps an offset outside its queue, as RocketMQ's slaves do."""

    def slave(command: RemotingCommand) -> RemotingCommand:
        offset = int(command.ext_fields["queueOffset"])
        if 3 <= offset < 5:
            return pulled(command, 0, record(offset), offset + 1, begin=3, end=5)
        return pulled(command, 19 if offset == 5 else 20, next_offset=offset, begin=3, end=5)

    async with open_consumer({0: slave, 1: slave}, read_from=ReadFrom.SLAVE) as (consumer, servers):
        for begin, expected in ((1, [[3], [4]]), (5, []), (7, [])):
            async with consumer.reading({QUEUES[1]: begin}) as reading:
                assert [offsets(stretch) async for stretch in reading] == expected
        assert not servers[0].commands


@on_both_backends()
async def test_reading_with_long_polls_waits_for_messages() -> None:
    broker = Broker(1)
    broker.is_holding = True
    async with broker.reading(ends=False) as reading:
        assert offsets(await anext(reading)) == [0]
        await settled()
        broker.grow(QUEUES[0], 2)
        assert offsets(await anext(reading)) == [1, 2]
        await settled()
        broker.is_holding = False
        broker.grow(QUEUES[0], 0)  # an immediate empty answer
        await settled()
        asked = len(broker.asked)
        await settled()
        assert len(broker.asked) <= asked + 1


@on_both_backends()
async def test_invalid_tags_are_an_error_of_the_iteration() -> None:
    async with open_consumer({}) as (consumer, _), consumer.reading({QUEUES[0]: 0}, tags="||") as reading:
        with pytest.raises(ValueError, match="names no tag"):
            await anext(reading)


@on_both_backends()
async def test_closing_the_consumer_ends_an_iteration_that_has_a_response_left() -> None:
    has_response, is_closed = anyio.Event(), anyio.Event()

    def answer(command: RemotingCommand) -> RemotingCommand:
        return pulled(command, 0, record(0), next_offset=1)

    async def read(consumer: PullConsumer) -> None:
        async with consumer.reading({QUEUES[0]: 0}) as reading:
            while not reading._ready:
                await checkpoint()
            has_response.set()
            await is_closed.wait()
            assert offsets(await anext(reading)) == [0]
            with pytest.raises(RuntimeError, match="not open"):
                await anext(reading)

    async with anyio.create_task_group() as tasks:
        async with open_consumer({0: answer}) as (consumer, _):
            tasks.start_soon(read, consumer)
            await has_response.wait()
        is_closed.set()


@on_both_backends()
async def test_reading_a_topic_a_queue_or_positions() -> None:
    def handler(command: RemotingCommand) -> RemotingCommand:
        fields = command.ext_fields
        if "queueOffset" not in fields:
            return command.reply(0, None, {"offset": "1"})
        offset = int(fields["queueOffset"])
        assert (fields["maxMsgNums"], fields["subscription"]) == ("5", "x || y")
        if offset == 3:
            return pulled(command, 19, next_offset=3, end=3)
        return pulled(command, 0, record(offset, TAGS="x" if offset == 1 else "z"), next_offset=offset + 1)

    queue = MessageQueue("T", "a", 1)
    async with open_consumer({0: handler}, group="g") as (consumer, _):
        for source, expected in (("T", [0, 1, 2, 3]), (queue, [1]), ({queue: 1}, [1]), ({queue: 2}, [])):
            found = []
            async with consumer.reading(source, max_messages=5, tags="x || y") as reading:
                async for stretch in reading:
                    found.append(stretch.queue.queue_id)
                    assert offsets(stretch) == [1]
            assert sorted(found) == expected
            assert set(reading.positions.values()) == {3}

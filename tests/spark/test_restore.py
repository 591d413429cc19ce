"""Restoring into a running broker without Spark: tasks run inline. Each message arrives once, in order."""

import base64
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import msgspec
import pytest
from trio.testing import MockClock

from ha.client import (
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PullResult,
    PullStatus,
    ReceivedMessage,
    SendResult,
    SendStatus,
)
from ha.errors import (
    BrokerError,
    ClientError,
    ConnectionFailed,
    OptionError,
    RecordsGone,
    RequestTimedOut,
    RestoreFailed,
    RouteNotFound,
)
from ha.protocol.codes import SysFlag
from ha.protocol.properties import decode_properties
from ha.spark.jobs.archive import ArchiveOptions, archive
from ha.spark.jobs.restore import RestoreOptions, RestoreResult, restore
from ha.spark.jobs.restore import job as job
from ha.spark.jobs.restore import send as restore_send
from ha.spark.jobs.restore.send import ReplayPlan, TargetQueue
from ha.store.message_store import wall_clock_ms
from tests.interop.test_sdk import retry_on
from tests.protocol.golden import manifest
from tests.spark.clusters import running_broker
from tests.spark.inline import inline_spark
from tests.spark.stores import KilledError, make_store, message, named
from tests.unpacking import unpack_store

pytestmark = pytest.mark.processes
SPARK = inline_spark()
ADDED = {"HALOG_REPLAY", "HALOG_ORIGIN", "HALOG_BORN_TIMESTAMP"}
BROKERS_OWN = {"CLUSTER", "MSG_REGION", "TRACE_ON"}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_send, "_SETTLE_S", 0.02)
    monkeypatch.setattr(restore_send, "_PAUSE_S", 0.02)
    monkeypatch.setattr(restore_send, "_NEW_TOPIC_PATIENCE_S", 1.0)
    monkeypatch.setattr(restore_send, "_REQUEST_MESSAGES", 60)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_broker(tmp_path_factory.mktemp("restore")) as address:
        yield address


@pytest.fixture(scope="session")
def flights_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2000 messages in four queues of `flights`; read only."""
    return make_store(tmp_path_factory.mktemp("flights") / "broker-s", [message(number) for number in range(2000)])


def options_of(store: Path, servers: str, target: str, tmp_path: Path, **changes: Any) -> RestoreOptions:
    given: dict[str, Any] = {
        "path": str(store),
        "topic": "flights",
        "target": target,
        "servers": servers,
        "state": str(tmp_path / "state.json"),
    }
    return RestoreOptions(**given | changes)


def run(store: Path, servers: str, target: str, tmp_path: Path, **changes: Any) -> RestoreResult:
    return restore(SPARK, options_of(store, servers, target, tmp_path, **changes))


def stored(servers: str, topic: str) -> dict[int, list[ReceivedMessage]]:
    """What the broker holds, per queue."""

    async def read() -> dict[int, list[ReceivedMessage]]:
        found: dict[int, list[ReceivedMessage]] = defaultdict(list)
        async with PullConsumer(servers) as consumer:
            # A topic that a send has created is at the name server a moment later.
            for queue in await retry_on((RouteNotFound,), lambda: consumer.queues(topic)):
                offset, end = 0, await consumer.max_offset(queue)
                while offset < end:
                    result = await consumer.pull(queue, offset)
                    assert result.status is PullStatus.FOUND
                    found[queue.queue_id].extend(result.messages)
                    offset = result.next_offset
        return found

    return anyio.run(read, backend="trio")


def origins(messages: list[ReceivedMessage]) -> list[str]:
    return [message.properties["HALOG_ORIGIN"] for message in messages]


def assert_all_once(servers: str, topic: str, count: int = 2000) -> None:
    found = stored(servers, topic)
    for queue in range(4):
        assert origins(found[queue]) == [f"flights/broker-s/{queue}/{offset}" for offset in range(count // 4)]


def test_a_restore_of_an_earlier_version_goes_on(servers: str, tmp_path: Path) -> None:
    """Earlier versions named a broker after its directory, and messages already sent are recognized by that name."""
    store = make_store(tmp_path / "slave", [message(number) for number in range(40)])
    assert run(store, servers, "t-named", tmp_path).sent == 40
    named(store, "broker-a")
    again = run(store, servers, "t-named", tmp_path)
    assert (again.sent, again.already) == (0, 40)


def test_each_message_arrives_once_in_order_and_with_all_its_own(
    flights_store: Path, servers: str, tmp_path: Path
) -> None:
    result = run(flights_store, servers, "t-whole", tmp_path)
    assert (result.rows, result.sent, result.already, result.exit_code) == (2000, 2000, 0, 0)
    assert_all_once(servers, "t-whole")
    for queue, messages in stored(servers, "t-whole").items():
        for place, received in enumerate(messages):
            theirs = message(place * 4 + queue)
            assert (received.body, received.flag) == (theirs.body, theirs.flag)
            own = {k: v for k, v in received.properties.items() if k not in ADDED | BROKERS_OWN}
            assert own == decode_properties(theirs.properties)
            assert received.properties["HALOG_BORN_TIMESTAMP"] == str(theirs.born_timestamp_ms)


def test_second_run_sends_only_new_messages(flights_store: Path, servers: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "broker-s", [message(number) for number in range(400)])
    run(store, servers, "t-again", tmp_path)
    again = run(store, servers, "t-again", tmp_path)
    assert (again.rows, again.sent, again.already) == (400, 0, 400)
    make_store(store, [message(number) for number in range(400, 500)])
    more = run(store, servers, "t-again", tmp_path)
    assert (more.sent, more.already) == (100, 400)
    assert_all_once(servers, "t-again", 500)


def test_second_run_waits_for_messages_that_can_not_be_read_yet(
    servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker answers as at the end of the queue while it still tries to repair a message."""
    monkeypatch.setattr("ha.client.reading._PAUSE_S", 0.0)
    pull, tried = PullConsumer.pull, set[tuple[MessageQueue, int]]()

    async def first_without_messages(
        self: PullConsumer, queue: MessageQueue, queue_offset: int, **settings: Any
    ) -> PullResult:
        result = await pull(self, queue, queue_offset, **settings)
        if (queue, queue_offset) in tried:
            return result
        tried.add((queue, queue_offset))
        nothing: dict[str, Any] = {"status": PullStatus.NO_NEW_MSG, "messages": [], "next_offset": queue_offset}
        return msgspec.structs.replace(result, **nothing)

    store = make_store(tmp_path / "broker-s", [message(number) for number in range(400)])
    run(store, servers, "t-repaired", tmp_path)
    monkeypatch.setattr(PullConsumer, "pull", first_without_messages)
    again = run(store, servers, "t-repaired", tmp_path)
    assert (again.sent, again.already) == (0, 400)


@pytest.mark.parametrize("is_stored", [True, False])
def test_restore_resumes_after_kill_at_any_request(
    flights_store: Path, servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    send_batch = Producer.send_batch
    left = 0

    async def killed(self: Producer, *arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0 or is_stored:
            result = await send_batch(self, *arguments, **named)
        if left < 0:
            raise KilledError
        return result

    monkeypatch.setattr(Producer, "send_batch", killed)
    target = f"t-killed-{is_stored}"
    for number in (0, 1, 2, 3):
        left = number
        with pytest.raises(KilledError):
            run(flights_store, servers, target, tmp_path)
    left = 10**6
    result = run(flights_store, servers, target, tmp_path)
    assert 0 < result.already < 2000
    assert_all_once(servers, target)


@pytest.mark.parametrize("is_stored", [True, False])
def test_unanswered_request_is_searched_before_retry(
    flights_store: Path, servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    send_batch = Producer.send_batch
    count = 0

    async def lost(self: Producer, *arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count % 3 == 1:
            if is_stored:
                await send_batch(self, *arguments, **named)
            raise RequestTimedOut("broker", 10) if count % 2 else ConnectionFailed("broker", "lost")
        return await send_batch(self, *arguments, **named)

    monkeypatch.setattr(Producer, "send_batch", lost)
    result = run(flights_store, servers, f"t-lost-{is_stored}", tmp_path)
    assert result.sent == 2000
    assert_all_once(servers, f"t-lost-{is_stored}")


def test_filters_choose_and_a_dry_run_counts_the_same(flights_store: Path, servers: str, tmp_path: Path) -> None:
    expected = [n for n in range(2000) if n % 3 == 1 and n % 4 in (1, 2) and n % 7 == 5]
    wanted: dict[str, Any] = {"tags": ("tag1",), "queues": (1, 2), "keys": ("n5",)}
    counted = run(flights_store, "", "t-few", tmp_path, dry_run=True, state=None, **wanted)
    assert (counted.rows, counted.sent, counted.dry_run) == (len(expected), 0, True)
    assert sum(queue.body_bytes for queue in counted.queues) == 8 * len(expected)
    assert not (tmp_path / "state.json").exists()
    result = run(flights_store, servers, "t-few", tmp_path, **wanted)
    found = stored(servers, "t-few")
    assert sorted(int(each.body) for messages in found.values() for each in messages) == expected
    assert result.sent == counted.rows


def test_a_time_range_is_by_store_time(servers: str, tmp_path: Path) -> None:
    middle = wall_clock_ms()
    earlier, later = range(100), range(100, 150)
    store = make_store(tmp_path / "broker-s", [message(number) for number in earlier], clock_ms=lambda: middle - 1)
    make_store(store, [message(number) for number in later], clock_ms=lambda: middle)
    assert run(store, "", "x", tmp_path, dry_run=True, begin_ms=middle).rows == len(later)
    assert run(store, "", "x", tmp_path, dry_run=True, end_ms=middle).rows == len(earlier)


def test_what_a_java_client_sent_arrives_as_its_consumer_read_it(servers: str, tmp_path: Path) -> None:
    store = unpack_store("5.5.0", tmp_path / "broker-a")
    golden = manifest("5.5.0")
    result = run(store, servers, "t-golden", tmp_path, topic=golden["topic"])
    by_origin: dict[str, ReceivedMessage] = {}
    for messages in stored(servers, "t-golden").values():
        by_origin.update(zip(origins(messages), messages, strict=True))
    assert result.sent == len(by_origin) == len(golden["stored"])
    for theirs in golden["stored"]:
        ours = by_origin[f"{golden['topic']}/broker-a/{theirs['queueId']}/{theirs['queueOffset']}"]
        assert ours.body == base64.b64decode(theirs["body_base64"])
        assert ours.message_id == theirs["msgId"]
        assert (ours.tags, ours.flag) == (theirs["tags"], theirs["flag"])


def test_born_times_after_the_year_9999_are_restored(servers: str, tmp_path: Path) -> None:
    """A client that sends microseconds."""
    late = message(0)
    late.born_timestamp_ms = 1_700_000_000_000_000
    store = make_store(tmp_path / "broker-s", [late])
    assert run(store, servers, "t-late", tmp_path).sent == 1
    [received] = stored(servers, "t-late")[0]
    assert received.properties["HALOG_BORN_TIMESTAMP"] == "1700000000000000"


def test_delay_and_transaction_properties_are_dropped(servers: str, tmp_path: Path) -> None:
    once: dict[str, Any] = {
        "DELAY": "3",
        "TRAN_MSG": "true",
        "REAL_TOPIC": "x",
        "REAL_QID": "1",
        "TIMER_DELAY_SEC": "5",
        "WAIT": "false",
    }
    brokers: dict[str, Any] = {"CLUSTER": "old", "MSG_REGION": "old", "TRACE_ON": "old"}
    kept: dict[str, Any] = {"RETRY_TOPIC": "flights", "own": "1"}
    store = make_store(tmp_path / "broker-s", [message(0, **once, **brokers, **kept)])
    assert run(store, servers, "t-plain", tmp_path).sent == 1
    [received] = stored(servers, "t-plain")[0]
    assert not once.keys() & received.properties.keys()
    assert "old" not in received.properties.values()
    assert kept.items() <= received.properties.items()


def task_of() -> restore_send._Task:
    """A task of a replay, without a broker."""
    plan = restore_send.ReplayPlan(
        servers="",
        replay_id="r",
        targets=(),
        source_brokers=(),
        messages_per_s=None,
        skip_unsendable=False,
        is_again=False,
    )
    return restore_send._Task(plan, cast(Producer, None), cast(PullConsumer, None), 1 << 20)


def message_of(**row: object) -> Message:
    """The message that a replay sends for `row`."""
    done = restore_send.QueueReplay(topic="t", broker_name="b", queue_id=0, target=MessageQueue("t", "b", 0))
    whole = {"body": b"x", "sysFlag": 0, "flag": 0, "bornTimestamp": None, "crcOk": True, "propertiesString": ""}
    return task_of()._message({**whole, "queueOffset": 0, **row}, done)


def test_a_batch_in_one_record_is_not_sent_as_a_message() -> None:
    with pytest.raises(ValueError, match="batch of messages"):
        message_of(sysFlag=int(SysFlag.INNER_BATCH))


def test_rows_of_a_sink_are_visible_when_restored() -> None:
    """A reader with isolation=read_committed would wait for a commit of the new rows, which the sink never makes."""
    sent = message_of(propertiesString="own\x011\x02HALOG_SINK\x01query/3/0\x02")
    assert sent.properties == {"own": "1", "HALOG_REPLAY": "r", "HALOG_ORIGIN": "t/b/0/0"}


def test_fewer_target_queues_keep_the_order(flights_store: Path, servers: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "broker-s", [message(n, queue_id=n % 6) for n in range(600)])
    run(store, servers, "t-modulo", tmp_path)
    found = stored(servers, "t-modulo")
    for queue in range(6):
        mine = [o for o in origins(found[queue % 4]) if f"/{queue}/" in o]
        assert mine == [f"flights/broker-s/{queue}/{offset}" for offset in range(100)]


def test_the_rate_is_kept(flights_store: Path, servers: str, tmp_path: Path) -> None:
    started = time.monotonic()
    result = run(flights_store, servers, "t-slow", tmp_path, queues=(0,), messages_per_s=500.0)
    assert result.sent == 500
    # The last 20 go when 480 / 500 s have passed.
    assert time.monotonic() - started >= 0.96


def test_unsendable_messages_are_an_error_or_skipped(servers: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "broker-s", [message(0), message(4, body=b""), message(8)])
    with pytest.raises(RestoreFailed, match=r"queue offset 1: a body of 0 bytes.*skip_unsendable"):
        run(store, servers, "t-empty", tmp_path)
    result = run(store, servers, "t-empty", tmp_path, skip_unsendable=True)
    assert [queue.unsendable for queue in result.queues] == [1]
    assert result.exit_code == 3
    assert origins(stored(servers, "t-empty")[0]) == ["flights/broker-s/0/0", "flights/broker-s/0/2"]


def test_messages_without_room_for_more_properties_are_an_error_or_skipped(servers: str, tmp_path: Path) -> None:
    """A restore adds properties, of which 32,767 bytes are the most; the others of the same request are sent."""
    texts = ["x" * 32_000 if number in (3, 11) else "x" * 32_500 if number in (7, 8) else "x" for number in range(12)]
    messages = [message(number, queue_id=0, own=text) for number, text in enumerate(texts)]
    messages[5] = message(5, queue_id=0, own="x" * 32_690)  # no room for one more
    store = make_store(tmp_path / "broker-s", messages)
    with pytest.raises(RestoreFailed, match=r"queue offset 5: .*properties.*skip_unsendable leaves it out"):
        run(store, servers, "t-long", tmp_path)
    result = run(store, servers, "t-long", tmp_path, skip_unsendable=True)
    assert ([queue.unsendable for queue in result.queues], result.exit_code) == ([1], 3)
    kept = [offset for offset in range(12) if offset != 5]
    assert origins(stored(servers, "t-long")[0]) == [f"flights/broker-s/0/{offset}" for offset in kept]


def test_a_queue_of_two_topics_of_one_name_is_refused() -> None:
    """RocketMQ begins at queue offset 0 again: another run could not tell which messages were sent."""

    async def take(*places: tuple[int, int]) -> None:
        task = task_of()
        task._last_stored["t", "b", 0] = 1 << 60
        task.done["t", "b", 0] = restore_send.QueueReplay(topic="t", broker_name="b", queue_id=0)
        for offset, place in places:
            where = {"topic": "t", "brokerName": "b", "queueId": 0}
            await task.take({**where, "queueOffset": offset, "physicalOffset": place})

    anyio.run(take, (0, 0), (1, 100), (5, 300))
    for places in (((0, 0), (0, 900)), ((0, 900), (1, 1000), (7, 100))):
        with pytest.raises(RestoreFailed, match=r"t queue 0 of b, from queue offset [07] on: .*created again"):
            anyio.run(take, *places)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"archive": "/a"}, "archive, path"),
        ({"path": None}, "archive, path"),
        ({"messages_per_s": 0.0}, "messages_per_s"),
        ({"begin_ms": 5, "end_ms": 5}, "begin_ms"),
        ({"state": None}, "state"),
        ({"servers": "nowhere"}, "servers"),
        ({"topic": "absent"}, "topic"),
    ],
)
def test_wrong_options_are_named(flights_store: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"servers": "127.0.0.1:1"} | changes
    with pytest.raises(OptionError, match=words):
        restore(SPARK, options_of(flights_store, given.pop("servers"), "t", tmp_path, **given))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tags": ("a",)}, "^tags: .* tags"),
        ({"keys": ("k",)}, "^keys: .* uniqKey"),
        ({"topic": "flight"}, "^topic: .* none of the requested queues of flight"),
        ({"queues": (4, 5)}, "^topic: .* none of the requested queues"),
        ({"broker_name": "broker-t"}, "^topic: .* none of the requested queues"),
    ],
)
def test_an_archive_without_what_is_requested_is_refused(
    flights_store: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    target = str(tmp_path / "archive")
    archive(SPARK, ArchiveOptions(path=str(flights_store), archive=target, extra_columns=("keys",)))
    given: dict[str, Any] = {"archive": target, "topic": "flights", "dry_run": True}
    with pytest.raises(OptionError, match=words):
        restore(SPARK, RestoreOptions(**given | changes))


def test_a_state_file_of_another_replay_is_refused(flights_store: Path, servers: str, tmp_path: Path) -> None:
    run(flights_store, servers, "t-one", tmp_path, queues=(0,))
    with pytest.raises(OptionError, match="other values of target"):
        run(flights_store, servers, "t-two", tmp_path, queues=(0,))


def test_messages_that_are_gone_when_the_tasks_start_are_an_error(tmp_path: Path) -> None:
    """For example while a resync copies the log again."""
    store = make_store(tmp_path / "store", [message(number) for number in range(20)])

    def set_aside() -> None:
        for name in ("commitlog", "consumequeue"):
            (store / name).rename(store / f"{name}.aside-1")

    with pytest.raises(RecordsGone, match="flights queue"):
        restore(inline_spark(set_aside), RestoreOptions(path=str(store), topic="flights", dry_run=True))


class RestartingBroker:
    """A broker that name servers don't know for the first `away` requests. Its queue is empty."""

    def __init__(self, away: int) -> None:
        self.away = away

    async def max_offset(self, queue: MessageQueue) -> int:
        self.away -= 1
        if self.away >= 0:
            raise RouteNotFound(queue.topic, "a", 17, "no route")
        return 0

    async def min_offset(self, queue: MessageQueue) -> int:
        return 0

    async def broker_names(self) -> list[str]:
        self.away -= 1
        return ["b"] if self.away < 0 else ["another"]


PLAN = ReplayPlan(
    servers="s:1",
    replay_id="r",
    targets=(TargetQueue(MessageQueue("t", "b", 0), 0),),
    source_brokers=("b",),
    messages_per_s=None,
    skip_unsendable=False,
    is_again=False,
)


async def find_last(consumer: object) -> int:
    """Returns the last message of queue 0 of `flights` that was sent with PLAN."""
    task = restore_send._Task(PLAN, cast(Any, None), cast(Any, consumer), 1)
    return await task._find_last(("flights", "b", 0), may_be_new=False)


def test_broker_that_is_away_is_not_taken_for_one_without_the_topic() -> None:
    """The messages of an earlier run would be sent again."""
    with pytest.raises(RestoreFailed, match="is not registered"):
        anyio.run(find_last, RestartingBroker(2))
    back = RestartingBroker(1)
    assert anyio.run(find_last, back) == -1
    assert back.away <= -3  # the queue was looked for again, and read


class RetainingBroker:
    """A broker whose retention deletes all ten messages of a queue once the queue's start was asked for."""

    reading = PullConsumer.reading
    begin = 0

    async def max_offset(self, queue: MessageQueue) -> int:
        return 10

    async def min_offset(self, queue: MessageQueue) -> int:
        begin, self.begin = self.begin, 10
        return begin

    async def pull(self, queue: MessageQueue, queue_offset: int, **_: object) -> PullResult:
        status = PullStatus.OFFSET_ILLEGAL if queue_offset < 10 else PullStatus.NO_NEW_MSG
        return PullResult(status, [], 10, self.begin, 10, 0)


def test_messages_that_are_deleted_during_the_search_may_have_been_sent() -> None:
    with pytest.raises(RestoreFailed, match="before queue offset 10 were deleted"):
        anyio.run(find_last, RetainingBroker())


class BusyBroker:
    """A broker with a queue to which producers send all the time."""

    reading = PullConsumer.reading
    end = 0

    async def max_offset(self, queue: MessageQueue) -> int:
        self.end += 1
        return self.end

    async def min_offset(self, queue: MessageQueue) -> int:
        return 0

    async def pull(self, queue: MessageQueue, queue_offset: int, **_: object) -> PullResult:
        return PullResult(PullStatus.NO_MATCHED_MSG, [], self.end, 0, self.end, 0)


def test_a_restore_begins_although_others_send_to_the_queue() -> None:
    async def find_last_in_time() -> int:
        with anyio.fail_after(60):
            return await find_last(BusyBroker())

    clock = MockClock(autojump_threshold=0)
    assert anyio.run(find_last_in_time, backend="trio", backend_options={"clock": clock}) == -1


class UnavailableBroker:
    """A broker with an empty queue, which answers only after as many failures as are given."""

    def __init__(self, *failures: ClientError) -> None:
        self.failures = list(failures)

    async def max_offset(self, queue: MessageQueue) -> int:
        if self.failures:
            raise self.failures.pop(0)
        return 0

    async def min_offset(self, queue: MessageQueue) -> int:
        return 0


def test_the_search_outlasts_a_restart_of_the_broker() -> None:
    lost, silent, busy = ConnectionFailed("b", "refused"), RequestTimedOut("b", 5), BrokerError("b", 2, "busy")
    clock = {"clock": MockClock(autojump_threshold=0)}
    broker = UnavailableBroker(lost, silent, busy)
    assert anyio.run(find_last, broker, backend="trio", backend_options=clock) == -1
    with pytest.raises(ConnectionFailed):
        anyio.run(find_last, UnavailableBroker(*[lost] * 100), backend="trio", backend_options=clock)
    refused = UnavailableBroker(BrokerError("b", 16, "no permission"), lost)
    with pytest.raises(BrokerError, match="no permission"):
        anyio.run(find_last, refused)
    assert refused.failures == [lost]


@pytest.mark.parametrize("times", ["17", "?"])
def test_retries_above_their_maximum_are_found_again(servers: str, tmp_path: Path, times: str) -> None:
    """The broker stored them as dead letters, and the producer refused a number that is none."""
    topic = "%RETRY%g" if times == "17" else "%RETRY%h"
    retries = [
        message(number, topic=topic, queue_id=0, RECONSUME_TIME=times, MAX_RECONSUME_TIMES="16") for number in range(5)
    ]
    store = make_store(tmp_path / "broker-s", retries)
    assert run(store, servers, topic, tmp_path, topic=topic).sent == 5
    assert origins(stored(servers, topic)[0]) == [f"{topic}/broker-s/0/{offset}" for offset in range(5)]
    again = run(store, servers, topic, tmp_path, topic=topic)
    assert (again.sent, again.already) == (0, 5)


def test_a_message_that_the_producer_refuses_is_unsendable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: Producer, message: Message, **_: Any) -> SendResult:
        raise ValueError("no broker would accept it")

    monkeypatch.setattr(Producer, "send", refuse)
    row: dict[str, object] = dict.fromkeys(restore_send.SENT_COLUMNS, 0)
    row |= {"topic": "flights", "brokerName": "b", "body": b"x", "propertiesString": ""}

    async def take_row(*, skip: bool) -> int:
        plan = msgspec.structs.replace(PLAN, skip_unsendable=skip)
        task = restore_send._Task(plan, Producer("s:1"), cast(Any, UnavailableBroker()), 1)
        await task.take(row)
        await task.flush()
        [done] = task.done.values()
        return done.unsendable

    clock = {"clock": MockClock(autojump_threshold=0)}
    assert anyio.run(partial(take_row, skip=True), backend="trio", backend_options=clock) == 1
    with pytest.raises(RestoreFailed, match="skip_unsendable leaves it out"):
        anyio.run(partial(take_row, skip=False), backend="trio", backend_options=clock)


class TimedBroker(UnavailableBroker):
    """Stores everything at once, and records when it got each message."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    async def send_batch(self, messages: list[Message], *, queue: MessageQueue) -> SendResult:
        begin = len(self.times_s)
        self.times_s += [anyio.current_time()] * len(messages)
        return SendResult(SendStatus.SEND_OK, "", "", queue, begin, "")

    async def send(self, message: Message, *, queue: MessageQueue) -> SendResult:
        return await self.send_batch([message], queue=queue)


@pytest.mark.parametrize(("rate", "most"), [(0.5, 1), (10.0, 10), (25.5, 25), (1000.0, 120)])
def test_a_low_rate_is_kept_in_each_second(rate: float, most: int) -> None:
    async def send_rows() -> list[float]:
        broker = TimedBroker()
        plan = msgspec.structs.replace(PLAN, messages_per_s=rate)
        task = restore_send._Task(plan, cast(Any, broker), cast(Any, broker), 1000)
        for number in range(120):
            row: dict[str, object] = dict.fromkeys(restore_send.SENT_COLUMNS, 0)
            row |= {"topic": "flights", "brokerName": "b", "body": b"x", "propertiesString": "", "crcOk": True}
            await task.take(row | {"queueOffset": number, "physicalOffset": number})
        await task.flush()
        return broker.times_s

    clock = {"clock": MockClock(autojump_threshold=0)}
    times_s = anyio.run(send_rows, backend="trio", backend_options=clock)
    assert len(times_s) == 120
    assert max(sum(begin <= at < begin + 0.9 for at in times_s) for begin in times_s) == most
    assert times_s[-1] - times_s[0] < 120 / rate


class GroupBroker:
    """The brokers of a failover group, as producer and consumer. The first request is answered FLUSH_SLAVE_TIMEOUT.
    20 s later, or with the next request, its messages can be read, or, if `is_truncated`, another master has replaced
    the one that stored them.
    """

    reading = PullConsumer.reading

    def __init__(self, *, is_truncated: bool, foreign_count: int = 0) -> None:
        self.log: list[Message] = []
        self.readable = 0
        self.request_count = 0
        self.is_truncated, self.foreign_count = is_truncated, foreign_count

    async def send_batch(self, messages: list[Message], *, queue: MessageQueue) -> SendResult:
        self.settle(after_s=0.0)
        self.request_count += 1
        first = len(self.log)
        self.log += messages
        if self.request_count > 1:
            self.readable = len(self.log)
            return SendResult(SendStatus.SEND_OK, "", "", queue, first, "")
        self.sent_at = anyio.current_time()
        return SendResult(SendStatus.FLUSH_SLAVE_TIMEOUT, "", "", queue, first, "")

    async def send(self, message: Message, *, queue: MessageQueue) -> SendResult:
        return await self.send_batch([message], queue=queue)

    def settle(self, after_s: float) -> None:
        if self.request_count == 1 and anyio.current_time() >= self.sent_at + after_s:
            if self.is_truncated:
                self.log = [Message("t", b"x")] * self.foreign_count
            self.readable = len(self.log)

    async def max_offset(self, queue: MessageQueue) -> int:
        self.settle(after_s=20.0)
        return self.readable

    async def min_offset(self, queue: MessageQueue) -> int:
        return 0

    async def pull(self, queue: MessageQueue, queue_offset: int, **_: object) -> PullResult:
        found = [
            cast(ReceivedMessage, SimpleNamespace(queue_offset=at, properties=self.log[at].properties))
            for at in range(queue_offset, self.readable)
        ]
        status = PullStatus.FOUND if found else PullStatus.NO_NEW_MSG
        return PullResult(status, found, max(queue_offset, self.readable), 0, self.readable, 0)


@pytest.mark.parametrize(
    ("broker", "weak"),
    [
        (GroupBroker(is_truncated=False), 50),
        (GroupBroker(is_truncated=True), 0),
        (GroupBroker(is_truncated=True, foreign_count=7), 0),
        (GroupBroker(is_truncated=True, foreign_count=100), 0),
    ],
)
def test_messages_that_a_replaced_master_may_not_have_kept_arrive_once(broker: GroupBroker, weak: int) -> None:
    """It went on after FLUSH_SLAVE_TIMEOUT, and so lost the messages if the next master did not have them."""

    async def send_rows() -> restore_send.QueueReplay:
        task = restore_send._Task(PLAN, cast(Any, broker), cast(Any, broker), 1000)
        for number in range(120):
            row: dict[str, object] = dict.fromkeys(restore_send.SENT_COLUMNS, 0)
            row |= {"topic": "flights", "brokerName": "b", "body": b"x", "propertiesString": "", "crcOk": True}
            await task.take(row | {"queueOffset": number, "physicalOffset": number})
        await task.flush()
        [done] = task.done.values()
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore_send, "_REQUEST_MESSAGES", 50)
        done = anyio.run(send_rows, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
    sent = [message.properties["HALOG_ORIGIN"] for message in broker.log if "HALOG_ORIGIN" in message.properties]
    assert sent == [f"flights/b/0/{number}" for number in range(120)]
    assert (done.sent, done.weakly_stored) == (120, weak)

"""Lag of consumer groups: against what a real broker's store holds by its manifest, and against brokers that answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.from_thread
import msgspec
import pytest
from pyspark.sql import SparkSession

from ha.errors import ConnectionFailed, OptionError, StoreUnreadable
from ha.protocol.codes import RequestCode
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from ha.spark.jobs.lag import LagOptions, LagResult, QueueLag, committed_offsets, lag, lag_with
from tests.client.fake_broker import name_server, route_body, serving
from tests.protocol.golden import manifest
from tests.spark.inline import inline_runner
from tests.spark.stores import ODD_TIMES_MS, make_store, message, set_store_time
from tests.unpacking import unpack_store

MANIFEST = manifest("5.5.0")
STORED_MS = {
    record["offset"]: record["storeTimestamp"] for record in MANIFEST["commitlog"] if "storeTimestamp" in record
}
NOW_MS = max(STORED_MS.values()) + 5_000


def entries(topic: str, queue_id: int) -> list[tuple[int, int]]:
    """(physical offset, size) of a queue, by queue offset."""
    return [(at, size) for t, q, _, at, size, _ in MANIFEST["consumequeue"] if (t, q) == (topic, queue_id)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return unpack_store("5.5.0", tmp_path / "store")


def commit(store: Path, **offsets: dict[int, int]) -> None:
    """Writes the broker's table as a JVM does, integer keys bare. Keys: group_topic."""
    lines = []
    for name, by_queue in offsets.items():
        group, _, topic = name.partition("_")
        inner = ",".join(f"{queue_id}:{offset}" for queue_id, offset in by_queue.items())
        lines.append(f'"{topic}@{group}":{{{inner}}}')
    (store / "config" / "consumerOffset.json").write_text(f'{{"offsetTable":{{{",".join(lines)}}}}}')


def look(store: Path, **more: Any) -> LagResult:
    return lag_with(inline_runner(), LagOptions(path=str(store), now_ms=NOW_MS, **more))


def test_the_table_of_a_real_broker_is_read(store: Path) -> None:
    assert committed_offsets(store) == [
        ("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_HALF_TOPIC", 0, 2),
        ("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_OP_HALF_TOPIC", 0, 1),
        ("golden_reader", "GoldenTopic", 0, 11),
        ("golden_reader", "GoldenTopic", 1, 16),
        ("golden_reader", "GoldenTopic", 2, 12),
        ("golden_reader", "GoldenTopic", 3, 10),
    ]
    result = look(store)
    assert [group.group for group in result.groups] == ["CID_RMQ_SYS_TRANS", "golden_reader"]
    for queue in result.queues:
        held = entries(queue.topic, queue.queue_id)
        assert (queue.begin, queue.end) == (0, len(held))
        assert queue.messages == len(held) - queue.committed
        assert (queue.lost, queue.ahead, queue.is_unknown) == (0, 0, False)
    assert result.newest_ms == max(STORED_MS.values())


def test_lag_in_messages_bytes_and_seconds(store: Path) -> None:
    commit(store, shop_GoldenTopic={0: 4, 1: 0, 2: 12}, audit_GoldenTopic={0: 11})
    result = look(store)
    by_queue = {(queue.group, queue.queue_id): queue for queue in result.queues}
    offsets = {"shop": [4, 0, 12, 0], "audit": [11, 0, 0, 0]}  # without an offset, all messages are behind
    expected = {(group, queue_id): at for group, all_ in offsets.items() for queue_id, at in enumerate(all_)}
    assert by_queue.keys() == expected.keys()
    for (group, queue_id), committed in expected.items():
        left = entries("GoldenTopic", queue_id)[committed:]
        queue = by_queue[group, queue_id]
        assert (queue.committed, queue.messages, queue.bytes) == (committed, len(left), sum(size for _, size in left))
        assert queue.seconds == ((NOW_MS - STORED_MS[left[0][0]]) / 1000 if left else 0.0)
    shop = next(group for group in result.groups if group.group == "shop")
    parts = [queue for queue in result.queues if queue.group == "shop"]
    assert (shop.topics, shop.queues, shop.lost) == (1, 4, 0)
    assert (shop.messages, shop.bytes) == (sum(q.messages for q in parts), sum(q.bytes or 0 for q in parts))
    assert shop.seconds == max(queue.seconds or 0 for queue in parts)
    assert [group.group for group in look(store, groups=("audit",)).groups] == ["audit"]
    for misspelt in ({"groups": ("audit", "audti")}, {"topics": ("other",)}):
        with pytest.raises(OptionError, match=r"^(groups|topics): '(audti|other)' has no committed offset"):
            look(store, **misspelt)


def test_queues_that_consumers_no_longer_read_are_not_behind(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [message(number) for number in range(8)])
    (store / "config").mkdir()
    commit(store, shop_flights={0: 2})
    topics = {"flights": {"topicName": "flights", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}}
    (store / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": topics}))
    assert [(queue.queue_id, queue.messages) for queue in look(store).queues] == [(0, 0), (1, 2)]


def test_messages_deleted_before_consumption_are_lost(store: Path) -> None:
    (store / "commitlog" / f"{0:020d}").unlink()
    commit(store, shop_GoldenTopic={0: 2, 1: 0, 2: 0, 3: 0})
    queue = look(store).queues[0]
    held = entries("GoldenTopic", 0)
    begin = next(index for index, (at, _) in enumerate(held) if at >= 16_384)
    assert (queue.begin, queue.lost, queue.messages) == (begin, begin - 2, len(held) - begin)
    assert queue.bytes == sum(size for _, size in held[begin:])
    assert queue.seconds == (NOW_MS - STORED_MS[held[begin][0]]) / 1000


def test_unknown_topics_and_offsets_beyond_the_end_are_reported(store: Path) -> None:
    commit(store, shop_GoldenTopic={0: 999, 1: 0, 2: 0, 3: 0}, old_Gone={0: 7, 1: 8})
    result = look(store)
    gone = [queue for queue in result.queues if queue.topic == "Gone"]
    assert [(q.is_unknown, q.messages, q.lost, q.ahead, q.bytes) for q in gone] == [(True, 0, 0, 0, 0)] * 2
    ahead = next(queue for queue in result.queues if queue.topic == "GoldenTopic")
    assert (ahead.ahead, ahead.messages, ahead.seconds) == (999 - len(entries("GoldenTopic", 0)), 0, 0.0)
    old = next(group for group in result.groups if group.group == "old")
    assert (old.unknown_topics, old.queues, old.messages) == (("Gone",), 0, 0)


@pytest.mark.parametrize("store_ms", ODD_TIMES_MS)
def test_damaged_store_times(tmp_path: Path, store_ms: int) -> None:
    store = make_store(tmp_path / "store", [message(number, queue_id=0) for number in range(3)])
    set_store_time(store, 2, store_ms)
    (store / "config").mkdir()
    commit(store, shop_flights={0: 2})
    (queue,) = look(store).queues
    assert (queue.messages, queue.seconds) == (1, 0.0 if store_ms == ODD_TIMES_MS[0] else None)


def test_a_store_that_no_group_has_read_has_no_lag(store: Path) -> None:
    (store / "config" / "consumerOffset.json").unlink(missing_ok=True)
    (store / "config" / "consumerOffset.json.bak").unlink(missing_ok=True)
    assert (look(store).groups, look(store).queues) == ((), ())


def test_bad_input_is_refused_by_name(store: Path, tmp_path: Path) -> None:
    table = store / "config" / "consumerOffset.json"
    table.write_text("{not json")
    with pytest.raises(StoreUnreadable, match="consumerOffset"):
        look(store)
    (store / "config" / "consumerOffset.json.bak").write_text('{"offsetTable":{"T@g":{0:1}}}')
    assert [queue.committed for queue in look(store).queues] == [1]
    with pytest.raises(StoreUnreadable, match="nowhere"):
        look(tmp_path / "nowhere")
    for options in (LagOptions(), LagOptions(path="a", servers="127.0.0.1:1")):
        with pytest.raises(OptionError, match="path"):
            lag_with(inline_runner(), options)
    with pytest.raises(OptionError, match="groups"):
        lag_with(inline_runner(), LagOptions(servers="127.0.0.1:1", topics=("T",)))
    with pytest.raises(OptionError, match="servers"):
        lag_with(inline_runner(), LagOptions(servers="nonsense", topics=("T",), groups=("g",)))
    with pytest.raises(ConnectionFailed):
        lag_with(inline_runner(), LagOptions(servers="127.0.0.1:1", topics=("T",), groups=("g",)))


class Broker:
    """Two queues for each topic with messages [3, 10) a second apart; in T group g has committed 5 on queue 0 and 1 on
    1."""

    address = ""

    def handle(self, command: RemotingCommand) -> RemotingCommand:
        fields = command.ext_fields
        match command.code:
            case RequestCode.GET_MIN_OFFSET:
                return command.reply(0, ext_fields={"offset": "3"})
            case RequestCode.GET_MAX_OFFSET:
                return command.reply(0, ext_fields={"offset": "10"})
            case RequestCode.QUERY_CONSUMER_OFFSET:
                place = fields["consumerGroup"], fields["topic"], fields["queueId"]
                known = {("g", "T", "0"): "5", ("g", "T", "1"): "1", ("half", "T", "0"): "10"}.get(place)
                return command.reply(22) if known is None else command.reply(0, ext_fields={"offset": known})
            case RequestCode.PULL_MESSAGE:
                assert fields["consumerGroup"] == "halog-lag"
                offset = int(fields["queueOffset"])
                body = encode_record(
                    Message("T", int(fields["queueId"]), b"x"),
                    queue_offset=offset,
                    physical_offset=0,
                    store_timestamp_ms=offset * 1000,
                    store_host=encode_host("127.0.0.1", 10911),
                )
                answer = {"suggestWhichBrokerId": 0, "nextBeginOffset": offset + 1, "minOffset": 3, "maxOffset": 10}
                return command.reply(0, "", {key: str(value) for key, value in answer.items()}, body)
        return command.reply(3, "not supported")


@pytest.fixture
def servers() -> Iterator[str]:
    routes: dict[str, bytes] = {}
    with (
        anyio.from_thread.start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(serving(Broker().handle)) as server,
        portal.wrap_async_context_manager(serving(name_server(routes))) as names,
    ):
        routes["T"] = routes["U"] = route_body({"a": {0: server.address}}, 2)
        yield names.address


def test_lag_over_the_network(servers: str) -> None:
    options = LagOptions(servers=servers, groups=("g",), topics=("T", "Gone"), now_ms=20_000)
    result = lag_with(inline_runner(), options)
    with pytest.raises(OptionError, match=r"^groups: 'nobody' has no committed offset.*; accepted: g$"):
        lag_with(inline_runner(), msgspec.structs.replace(options, groups=("g", "nobody")))
    with pytest.raises(OptionError, match=r"^topics: 'U' has no committed offset"):
        lag_with(inline_runner(), msgspec.structs.replace(options, topics=("T", "U")))

    def figures(queue: QueueLag) -> tuple[object, ...]:
        return (queue.group, queue.topic, queue.queue_id, queue.messages, queue.lost, queue.bytes, queue.seconds)

    assert [figures(queue) for queue in result.queues if not queue.is_unknown] == [
        ("g", "T", 0, 5, 0, None, 15.0),
        ("g", "T", 1, 7, 2, None, 17.0),
    ]
    half = lag_with(inline_runner(), msgspec.structs.replace(options, groups=("half",), topics=("T",))).queues
    assert [figures(queue) for queue in half] == [("half", "T", 0, 0, 0, 0, 0.0), ("half", "T", 1, 7, 0, None, 17.0)]
    (g,) = result.groups
    assert (g.group, g.messages, g.lost, g.bytes, g.seconds, g.unknown_topics) == ("g", 12, 2, None, 17.0, ("Gone",))


def test_executors_look_at_the_queues(store: Path, spark: SparkSession) -> None:
    options = LagOptions(path=str(store), now_ms=NOW_MS)
    steps: list[tuple[str, int, int]] = []
    assert lag(spark, options, lambda *step: steps.append(step)) == lag_with(inline_runner(), options)
    assert steps[-1] == ("queues", 6, 6)

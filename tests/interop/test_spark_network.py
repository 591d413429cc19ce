"""The Spark source and sink over the network with real RocketMQ brokers; no Spark is started."""

import pytest
import trio

from ha.arrow.read_options import ReadOptions, RowFilter
from ha.client import Message, Producer, PullConsumer, ReadFrom, SendStatus
from ha.errors import BrokerError, ConnectionFailed, RouteNotFound
from ha.spark.sink.identity import SinkPart
from ha.spark.source.log_source import QueueKey, QueueSlice
from ha.spark.source.network import NetworkSettings, NetworkSource
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.test_sdk import retry_on
from tests.spark.sink_steps import (
    attempt,
    bodies,
    commit,
    dying_after,
    frame,
    options_for,
    read_committed,
    read_topic,
)
from tests.spark.stores import KilledError

COUNT = 1200


@pytest.mark.usual_release("4.9.7")
async def test_pulls_and_sink_on_a_real_cluster(children: Children, release: Release) -> None:
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER")
    slave = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1)
    await master.start()
    await slave.start()
    async with Producer(name_server, group="fill") as producer:
        first = Message("flights", b"first")
        for _ in range(200):
            result = await retry_on((RouteNotFound, ConnectionFailed), lambda: producer.send(first))
            if result.status is SendStatus.SEND_OK:
                break
            await trio.sleep(0.2)
        for start in range(0, COUNT, 40):
            numbers = range(start, start + 40)
            messages = [Message("flights", b"%d " % n * (n % 200 + 1), tags=f"T{n % 3}", keys=f"k{n}") for n in numbers]
            await producer.send_batch(messages)
    await check_pulls(name_server, also_from_slave=release.is_4)
    await trio.to_thread.run_sync(check_sink, name_server)


async def check_pulls(name_server: str, *, also_from_slave: bool) -> None:
    """The source reads from master and slave what the SDK's plain codec reads, and finds a time exactly."""
    plain: dict[QueueKey, list[tuple[int, bytes, str | None, int]]] = {}
    async with PullConsumer(name_server, group="plain", read_from=ReadFrom.MASTER) as consumer:
        for queue in await consumer.queues("flights"):
            rows = plain[QueueKey(queue.topic, queue.broker_name, queue.queue_id)] = []
            while len(rows) < await consumer.max_offset(queue):
                found = await consumer.pull(queue, len(rows))
                rows += [(m.queue_offset, m.body, m.tags, m.store_timestamp_ms) for m in found.messages]
    assert sum(map(len, plain.values())) >= COUNT

    def read(read_from: ReadFrom, where: RowFilter) -> dict[QueueKey, list[tuple[int, bytes, str | None]]]:
        source = NetworkSource(NetworkSettings(servers=(name_server,), read_from=read_from))
        try:
            assert "flights" in source.topics()
            found = {}
            for key in source.queues(frozenset({"flights"})):
                slices = [QueueSlice(key, *source.queue_range(key))]
                options = ReadOptions(columns=("queueOffset", "body", "tags"), where=where)
                batches = source.queue_partition(slices).read(options)
                found[key] = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
            return found
        finally:
            source.close()

    wanted = {key: [row[:3] for row in rows] for key, rows in plain.items()}
    assert await trio.to_thread.run_sync(read, ReadFrom.MASTER, RowFilter()) == wanted
    tagged = {key: [row for row in rows if row[2] in ("T0", "T2")] for key, rows in wanted.items()}
    where = RowFilter(tags=frozenset({"T0", "T2"}))
    assert await trio.to_thread.run_sync(read, ReadFrom.SUGGESTED, where) == tagged
    if also_from_slave:
        # A slave knows no queue until it has copied its master's topics: 4.9.7's after seconds, 5.5.0's after a minute,
        # which test_sdk.py waits for.
        copied = await retry_on((BrokerError,), lambda: trio.to_thread.run_sync(read, ReadFrom.SLAVE, RowFilter()))
        assert copied == wanted

    def search() -> None:
        source = NetworkSource(NetworkSettings(servers=(name_server,), read_from=ReadFrom.MASTER))
        try:
            for key, rows in plain.items():
                times = [row[3] for row in rows]
                for time_ms in (0, times[len(times) // 2], times[-1]):
                    at = next(number for number, stored_ms in enumerate(times) if stored_ms >= time_ms)
                    assert source.offset_for_time(key, time_ms) == at
                assert source.offset_for_time(key, times[-1] + 1) is None
        finally:
            source.close()

    await trio.to_thread.run_sync(search)


def check_sink(name_server: str) -> None:
    """An attempt dies while sending; the next one sends the rest; a committed batch is recognized."""
    options = options_for(name_server, topic="delays", acceptStatus="FLUSH_SLAVE_TIMEOUT")
    part = SinkPart("interop", 0, 0)
    with pytest.raises(KilledError):
        attempt(options, part, dying_after([frame(bodies(75))]))
    assert read_committed(name_server, "delays") == []
    again = attempt(options, part, [frame(bodies(200))])
    assert again.found_count == 75
    commit(options, again)
    assert attempt(options, part, [frame(bodies(200))]).already_committed
    following = attempt(options, SinkPart("interop", 1, 0), [frame(bodies(30, 1000))])
    commit(options, following)
    everything = sorted(bodies(200) + bodies(30, 1000))
    assert sorted(message.body for message in read_topic(name_server, "delays")) == everything
    assert read_committed(name_server, "delays") == everything
    assert len({message.message_id for message in read_topic(name_server, "delays")}) == 230

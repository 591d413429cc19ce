"""Real producers and consumers with halog's SYNC_MASTER, while its slave works, is paused, stopped and back."""

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from tests.interop.clusters import PROBE_SEQUENCE, wait_attached, wait_equal
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import Event, open_java_client, read_acks
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.stored_files import RecordHead, heads_at, log_range

pytestmark = pytest.mark.processes

SLAVE_TIMEOUT_MS = 1500


def check_stored(store: HalogBroker, sent: list[Event], store_host: str) -> None:
    """Checks that each message is at its offset message id, which contains the master's address."""
    heads = heads_at(store.commitlog, (event["physicalOffset"] for event in sent))
    for event, head in zip(sent, heads, strict=True):
        assert head == RecordHead(
            event["sequence"], event["queueId"], event["queueOffset"], event["size"], event["crc"]
        )
        assert event["storeHost"] == store_host
        assert event["msgId"] == event["uniqueKey"]


def statuses(sent: list[Event]) -> set[str]:
    return {event["status"] for event in sent}


async def start_pair(children: Children) -> tuple[HalogBroker, HalogBroker]:
    name_server = await start_halog_name_server(children)
    master = HalogBroker(children, "ha-master", name_server, "SYNC_MASTER", extra={"slaveTimeout": SLAVE_TIMEOUT_MS})
    slave = HalogBroker(children, "ha-slave", name_server, "SLAVE", broker_id=1)
    await master.start()
    await slave.start()
    return master, slave


async def test_statuses_follow_the_slave(children: Children, release: Release) -> None:
    master, slave = await start_pair(children)
    async with open_java_client(children, release, master.name_server) as client:
        await wait_attached(client, "probes")

        for mode in ("sync", "async"):
            sent = await client.send("orders", 20, mode=mode, size=2000)
            assert statuses(sent) == {"SEND_OK"}
            check_stored(master, sent, master.address)
            check_stored(slave, sent, master.address)

        assert slave.child is not None
        slave.child.send_signal(signal.SIGSTOP)
        late = await client.send("orders", 3, mode="async", first=100)
        assert statuses(late) == {"FLUSH_SLAVE_TIMEOUT"}
        assert all(event["ms"] >= SLAVE_TIMEOUT_MS - 100 for event in late)
        check_stored(master, late, master.address)
        hurried = await client.send("orders", 3, first=200, wait="false")
        assert statuses(hurried) == {"SEND_OK"}
        assert all(event["ms"] < SLAVE_TIMEOUT_MS for event in hurried)
        slave.child.send_signal(signal.SIGCONT)
        await wait_attached(client, "probes")
        check_stored(slave, late, master.address)

        await slave.stop()
        await client.send_until("probes", "SLAVE_NOT_AVAILABLE", first=PROBE_SEQUENCE)
        alone = await client.send("orders", 5, first=300)
        assert statuses(alone) == {"SLAVE_NOT_AVAILABLE"}
        assert all(event["ms"] < SLAVE_TIMEOUT_MS for event in alone)
        check_stored(master, alone, master.address)

        await slave.start()
        await wait_attached(client, "probes")
        check_stored(slave, late + hurried + alone, master.address)


@asynccontextmanager
async def registered_as_master(name_server: str, broker_name: str, address: str, topic: str) -> AsyncIterator[None]:
    """Registers the broker at `address` as a master while the block runs, so that clients send to it."""
    queues = {"order": False, "perm": 6, "readQueueNums": 1, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}
    table = {topic: {"topicName": topic, "writeQueueNums": 1, **queues}, "other": {"topicName": "other", **queues}}
    version = {"counter": 1, "stateVersion": 0, "timestamp": 1}
    body = {"filterServerList": [], "topicConfigSerializeWrapper": {"dataVersion": version, "topicConfigTable": table}}
    request = RemotingCommand(
        code=RequestCode.REGISTER_BROKER,
        ext_fields={
            "brokerName": broker_name,
            "brokerAddr": address,
            "clusterName": "InteropCluster",
            "haServerAddr": address,
            "brokerId": "0",
            "bodyCrc32": "0",
            "compressed": "false",
        },
        body=json.dumps(body, separators=(",", ":")).encode(),
    )
    async with open_remoting_client() as remoting:
        response = await remoting.invoke(name_server, request, 5.0)
        assert response.code == ResponseCode.SUCCESS, response
        yield  # the name server removes a broker whose connection ends


async def test_a_slave_refuses_writes(children: Children, release: Release) -> None:
    """Clients send only to brokers with id 0; a false registration makes one try."""
    _, slave = await start_pair(children)
    async with (
        registered_as_master(slave.name_server, "misled", slave.address, "astray"),
        open_java_client(children, release, slave.name_server) as client,
    ):
        (sent,) = await client.send("astray")
        assert sent["status"] == "ERROR"
        assert "CODE: 2 " in sent["error"], sent
        assert "SLAVE" in sent["error"], sent
        assert log_range(slave.commitlog).size == 0


async def test_consumers_read_back_what_was_sent(children: Children, release: Release) -> None:
    """Reads in order, from the master and from the slave, by pulling; and new messages at once, by pushing."""
    master, slave = await start_pair(children)
    async with open_java_client(children, release, master.name_server) as client:
        await wait_attached(client, "probes")
        acks = children.folder / "acks"
        await client.run("produce", topic="orders", count=2000, batch=20, threads=2, acks=acks)
        await client.send("orders", 5, first=2000, size=6000, compress="true")
        await wait_equal(master, slave)
        expected = {ack.sequence: (ack.queue_id, ack.queue_offset, ack.crc, ack.message_id) for ack in read_acks(acks)}

        for broker_id in (0, 1):
            read = await client.consume(
                "orders", children.folder / f"read-{broker_id}", brokerId=broker_id, group="readers"
            )
            found = {m.sequence: (m.queue_id, m.queue_offset, m.crc, m.message_id) for m in read}
            assert found.keys() == set(range(2005))
            assert {sequence: found[sequence] for sequence in range(2000)} == expected
            queues: dict[int, list[int]] = {}
            for message in read:
                queues.setdefault(message.queue_id, []).append(message.queue_offset)
            assert all(offsets == list(range(len(offsets))) for offsets in queues.values())
            assert {m.tags for m in read} == {"TagA", "TagB", "TagC", "null"}
            assert all(m.keys == f"key-{m.sequence}" for m in read if m.sequence % 5 == 0 and m.sequence % 50)

        first_queue = (await client.offsets("orders", "readers", commit="0:7"))[0]
        assert (first_queue["min"], first_queue["committed"]) == (0, 7)
        assert first_queue["max"] == sum(message.queue_id == 0 for message in read)
        await master.stop()
        await master.start()
        assert [queue["committed"] for queue in await client.offsets("orders", "readers")] == [7, 0, 0, 0]


@pytest.mark.usual_release("4.9.7")
async def test_push_consumer_gets_new_messages_at_once(children: Children, release: Release) -> None:
    """Heartbeat, rebalance, long polling, tag filter, and offsets that outlive the consumer."""
    master, _ = await start_pair(children)
    async with open_java_client(children, release, master.name_server) as client:
        await wait_attached(client, "probes")
        await client.send("news", 20)
        wanted = {sequence for sequence in range(40) if sequence % 4 != 3}
        tags = "TagA||TagB||TagC"
        push = await client.start("push", topic="news", group="readers", count=len(wanted), tags=tags)
        await push.wait("got", 60, sequence=18)
        for first in (20, 30):
            await client.send("news", 10, first=first)
        events = await push.result()
        assert events[-1]["missing"] == 0
        got = [event for event in events if event["event"] == "got"]
        assert {event["sequence"] for event in got} == wanted
        assert all(event["ageMs"] < 1500 for event in got if event["sequence"] >= 20)

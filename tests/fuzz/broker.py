"""The requests of a broker: its processors over a store in memory, behind a real connection."""

import functools
from itertools import count
from pathlib import Path

import trio
from trio.testing import wait_all_tasks_blocked

from ha.acl import AclGuard, AclPolicy
from ha.acl.policy import Account
from ha.acl.requirements import Right
from ha.broker.broker import BrokerPorts, Replication, open_broker
from ha.broker.options import BrokerOptions
from ha.broker.topics import topic_fault
from ha.broker.world import World
from ha.protocol.acl import ACCESS_KEY, AclCredentials
from ha.protocol.batch import encode_batch
from ha.protocol.record import MessageRecord, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import TRACE_TOPIC
from ha.remoting import RemotingServerOptions
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from tests.broker.node import PULL, SEND_V2
from tests.broker.test_headers import HEADERS
from tests.fuzz import requests
from tests.fuzz.harness import Harness
from tests.fuzz.replication import run_virtually
from tests.remoting.wire import MemoryListener
from tests.store.disks import MemoryDisk, run_inline
from tests.store.stores import WallClock, message, records

ROOT = Path("/store")
OPTIONS = BrokerOptions(
    cluster_name="C",
    broker_name="b0",
    host="10.0.0.1",
    config_dir=ROOT / "config",
    topic_count_max=24,
    group_count_max=8,
    client_count_max=8,
    hold_count_max=4,
    message_size_max=4096,
    suspend_s_max=5.0,
)
STORE = StoreOptions(
    root=ROOT,
    segment_size=1 << 15,
    queue_entry_count=64,
    index_slot_count=20,
    index_entry_count=64,
    message_size_max=4096,
    store_host=encode_host("10.0.0.1", 10911),
    checkpoint_interval_s=60.0,
    clean_interval_s=60.0,
    flush_interval_s=3.0,
)
CREDENTIALS = AclCredentials("limited-one", "a secret of its own")
POLICY = AclPolicy(
    [
        Account("limited-one", "a secret of its own", topics={"TT": Right.PUB | Right.SUB}, groups={"g": Right.SUB}),
        Account("administrator", "another secret", is_admin=True),
    ]
)
ALLOWED_TOPICS = {"TT", TRACE_TOPIC, "%RETRY%g", "%DLQ%g"}
"""A client that may read as a group may return messages; those returned too often become dead letters."""
STORED = {0, 10, 11, 12}
"""Codes that need no remark."""
ADMIN_CODES = (
    *(12, 17, 25, 26, 28, 33, 200, 202, 203, 204, 207, 208, 215, 222, 223, 225, 300, 303, 305, 306, 307, 308, 309),
    *(314, 315, 316, 317, 321, 328, 329, 343, 345, 351, 352, 906),
)
ADMIN_FIELDS = {
    **dict.fromkeys(("group", "consumerGroup", "producerGroup", "groupName", "srcGroup", "compareGroup"), "g"),
    **dict.fromkeys(("queueId", "offset", "index", "timestamp", "beginTimestamp", "topicSysFlag"), "0"),
    **dict.fromkeys(("isForce", "cleanOffset", "offline"), "true"),
    **dict.fromkeys(("order", "isOrder"), "false"),
    **dict.fromkeys(("attributes", "clientAddr", "filterGroups"), ""),
    "topic": "TT",
    "key": "k",
    "maxNum": "9",
    "count": "5",
    "endTimestamp": "9223372036854775807",
    "perm": "6",
    "readQueueNums": "2",
    "writeQueueNums": "2",
    "topicFilterType": "SINGLE_TAG",
    "clientId": "c",
    "destGroup": "h",
    "msgId": "0A00000100002A9F0000000000000000",
    "statsName": "TOPIC_PUT_NUMS",
    "statsKey": "TT",
}
"""What makes every request of an administrator a good one."""
ANSWER_S_MAX = 8.0
"""Virtual time after which the longest long poll is over."""


@functools.cache
def _filled_disk() -> MemoryDisk:
    """A store with messages of two topics in it."""
    disk = MemoryDisk()

    async def fill() -> None:
        async with (
            open_message_store(STORE, disk=disk, run_blocking=run_inline, wall_clock_ms=WallClock()) as store,
            open_broker(
                OPTIONS,
                store,
                Replication(),
                BrokerPorts(listeners=[MemoryListener()]),
                World(unique_id=lambda: "U", disk=disk, run_blocking=run_inline),
            ) as broker,
        ):
            await broker.topics.ensure("TT", 4)
            await store.log.put([message(n, topic="TT", queue_id=n % 4) for n in range(20)])

    run_virtually(fill)
    return disk


def answer_requests(data: bytes) -> None:
    """Any requests: each gets one answer or its connection ends; tables stay within bounds, the log stays good."""
    serve(requests.decode(data), None)


def answer_with_access_control(data: bytes) -> None:
    """The same with access control, some requests signed by an account that may use topic TT and group g alone."""
    stored = serve(requests.decode(data, CREDENTIALS), POLICY)
    assert {record.topic for record in stored[20:]} <= ALLOWED_TOPICS
    chunks = [[command for command in chunk if ACCESS_KEY not in command.ext_fields] for chunk in requests.decode(data)]
    assert len(serve(chunks, POLICY)) == 20


def serve(chunks: list[list[RemotingCommand]], policy: AclPolicy | None) -> list[MessageRecord]:
    """Run the requests on a broker and return the records in its log, 20 of which were there before."""
    disk = _filled_disk().kill()
    stored: list[MessageRecord] = []

    async def scenario() -> None:
        numbers = count()
        listener = MemoryListener()
        async with (
            open_message_store(STORE, disk=disk, run_blocking=run_inline, wall_clock_ms=WallClock()) as store,
            open_broker(
                OPTIONS,
                store,
                Replication(),
                BrokerPorts(listeners=[listener], options=RemotingServerOptions(idle_timeout_s=1000.0)),
                World(
                    unique_id=lambda: f"U{next(numbers)}",
                    disk=disk,
                    run_blocking=run_inline,
                    wall_clock_ms=WallClock(),
                ),
                acl_guard=None if policy is None else AclGuard(policy),
            ) as broker,
        ):
            client = requests.Client(listener.connect())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.receive)
                asked = []
                for chunk in chunks:
                    asked += await client.send(chunk)
                    await wait_all_tasks_blocked()
                await trio.sleep(ANSWER_S_MAX)
                if not client.is_closed:
                    unanswered = [request for request in asked if request.opaque not in client.answers]
                    assert not unanswered, unanswered
                for answer in client.answers.values():
                    assert answer.code in STORED or answer.remark, answer
                assert len(broker.puller.holds) == 0
                await client.stream.aclose()
                nursery.cancel_scope.cancel()
            await wait_all_tasks_blocked()
            assert len(broker.topics) <= OPTIONS.topic_count_max
            assert len(broker.groups) <= OPTIONS.group_count_max
            assert broker.clients._membership_count == 0
            stored.extend(await records(store))
            assert all(not topic_fault(record.topic) for record in stored)
            assert store.dispatcher.skipped_count == 0

    run_virtually(scenario)
    return stored


def seeds() -> list[bytes]:
    """A good request of each kind, and some together."""
    fields = {code: dict(found) for code, found in HEADERS.items()}
    pull = {**PULL, "suspendTimeoutMillis": 1000}
    fields[11] = fields[361] = pull
    heartbeat = (
        b'{"clientID":"c@1","consumerDataSet":[{"consumeFromWhere":2,"consumeType":"CONSUME_PASSIVELY","groupName":"g",'
        b'"messageModel":1,"subscriptionDataSet":[{"subString":"T || U","subVersion":"7","topic":"TT"}]}],'
        b'"producerDataSet":[{"groupName":"p"}],"heartbeatFingerprint":5}'
    )
    body = {310: b"hello", 10: b"hello", 320: encode_batch([(0, b"a", b"K\x01v\x02"), (1, b"b", b"")]), 34: heartbeat}
    single = [
        requests.to_bytes(code, found, body.get(code, b""), marks=number % 2)
        for number, (code, found) in enumerate(fields.items())
    ]
    waiting = requests.to_bytes(11, {**pull, "queueOffset": 5}) + requests.PAUSE + requests.to_bytes(310, SEND_V2, b"x")
    retry = requests.to_bytes(310, {**SEND_V2, "b": "%RETRY%g", "j": 20, "l": 3}, b"again")
    special = [
        requests.to_bytes(310, {**SEND_V2, "b": "made", "i": f"{pair}\x02"}, b"x")
        for pair in ("DELAY\x013", "TRAN_MSG\x01true", "TIMER_DELAY_MS\x015", "WAIT\x01false", "CLUSTER\x01x")
    ]
    after_heartbeat = [single[list(fields).index(34)], requests.to_bytes(11, {**pull, "sysFlag": 3, "subVersion": 7})]
    after_heartbeat.append(requests.to_bytes(38, {"consumerGroup": "g"}))
    after_heartbeat.append(requests.to_bytes(35, {"clientID": "c", "consumerGroup": "g", "producerGroup": "p"}))
    admin = [after_heartbeat[0] + requests.NEXT + requests.to_bytes(code, ADMIN_FIELDS) for code in ADMIN_CODES]
    return [*admin, *single, requests.NEXT.join(single), waiting, retry, *special, requests.NEXT.join(after_heartbeat)]


def _words() -> tuple[bytes, ...]:
    codes = {int(code).to_bytes(2, "big") for code in (*HEADERS, *ADMIN_CODES)}
    names = {name.encode() + b"\x1f" for name in {*ADMIN_FIELDS}.union(*HEADERS.values())}
    texts = ("TT", "TBW102", "%RETRY%g", "%DLQ%g", "SCHEDULE_TOPIC_XXXX", "*", "||", "SQL92", "-1", "2147483648")
    pairs = ("WAIT\x01false\x02", "DELAY\x013\x02", "UNIQ_KEY\x01a\x02", "INNER_NUM\x012\x02", "TAGS\x01x\x02")
    found = [*sorted(codes), *sorted(names), requests.NEXT, requests.PAUSE, requests.BODY]
    return (*found, *(text.encode() for text in (*texts, *pairs)), b'{"groupName":"g2"}', b'"consumerDataSet":[')


def signed_seeds() -> list[bytes]:
    """The same, signed; and what tries to be two things at once."""
    found = []
    for seed in seeds():
        parts = [part[:2] + bytes([part[2] | 8]) + part[3:] for part in seed.split(requests.NEXT) if len(part) > 2]
        found.append(requests.NEXT.join(parts))
    both = {**SEND_V2, "b": "other", "topic": "TT"}
    found.append(
        requests.to_bytes(310, both, b"x", marks=8) + requests.NEXT + requests.to_bytes(10, both, b"x", marks=8)
    )
    fields = {**SEND_V2, "AccessKey": "administrator", "Signature": "AAAA"}
    return [*found, requests.to_bytes(310, fields, b"x")]


HARNESSES = {
    "broker_access": Harness(
        run=answer_with_access_control,
        seeds=signed_seeds,
        words=(*_words(), b"AccessKey\x1f", b"Signature\x1f", b"limited-one", b"administrator", b"\x1etopic\x1fTT"),
        size_max=3000,
        seconds_max=5.0,
        memory_max=32 << 20,
    ),
    "broker": Harness(
        run=answer_requests, seeds=seeds, words=_words(), size_max=3000, seconds_max=5.0, memory_max=32 << 20
    ),
}

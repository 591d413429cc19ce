"""What a name server answers: the observed transcripts and JSON texts of real ones, request by request."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from ha.namesrv import NameServerOptions
from ha.namesrv.processor import BODY_SIZE_MAX, LARGE_COUNT
from ha.protocol.remoting import RemotingCommand
from tests.namesrv.brokers import (
    VERSION,
    Site,
    broker_fields,
    compressed_body,
    open_site,
    register,
    register_body,
    route,
    route_of,
    topic_json,
    unregister,
)
from tests.remoting.wire import Peer

ROUTE = (
    '{"brokerDatas":[{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.2:10911"},"brokerName":"b0","cluster":"C",'
    '"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"b0","perm":6,"readQueueNums":4,'
    '"topicSysFlag":0,"writeQueueNums":4}]}'
)
ROUTE_STANDARD = ROUTE.replace('{0:"', '{"0":"').replace(',1:"', ',"1":"')
CLUSTER = (
    '{"brokerAddrTable":{"b0":{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.2:10911"},"brokerName":"b0","cluster":"C",'
    '"enableActingMaster":false}},"clusterAddrTable":{"C":["b0"]}}'
)
MASTER = register()
SLAVE = register(broker_id=1, address="10.0.0.2:10911", ha="10.0.0.2:10912")


async def test_a_master_registers_without_an_answer_and_its_slave_is_told_of_it(site: Site) -> None:
    broker = site.connect()
    answer = await broker.ask(MASTER)
    assert (answer.code, answer.remark, answer.ext_fields, answer.body) == (0, None, {}, b"")
    answer = await broker.ask(SLAVE)
    assert (answer.code, answer.ext_fields) == (
        0,
        {"haServerAddr": "10.0.0.1:10912", "masterAddr": "10.0.0.1:10911"},
    )


async def test_a_slave_without_a_master_is_told_nothing(site: Site) -> None:
    answer = await site.connect().ask(SLAVE)
    assert (answer.code, answer.ext_fields) == (0, {})


@pytest.mark.parametrize(
    ("version", "ext", "text"),
    [
        (317, {}, ROUTE),  # Go
        (333, {}, ROUTE),  # C++
        (400, {}, ROUTE),
        (401, {}, ROUTE_STANDARD),
        (479, {}, ROUTE_STANDARD),
        (317, {"acceptStandardJsonOnly": "true"}, ROUTE_STANDARD),
        (317, {"acceptStandardJsonOnly": "false"}, ROUTE),
    ],
)
async def test_a_route_in_the_dialect_of_the_client(peer: Peer, version: int, ext: dict[str, str], text: str) -> None:
    await peer.ask(MASTER)
    await peer.ask(SLAVE)
    answer = await peer.ask(route("T1", version=version, **ext))
    assert answer.code == 0
    assert bytes(answer.body).decode() == text


@pytest.mark.parametrize("version", [317, 479])
async def test_the_cluster_always_has_bare_keys(peer: Peer, version: int) -> None:
    await peer.ask(MASTER)
    await peer.ask(SLAVE)
    answer = await peer.ask(RemotingCommand(106, version=version))
    assert bytes(answer.body).decode() == CLUSTER


async def test_an_unknown_topic_has_no_route(site: Site) -> None:
    answer = await site.connect().ask(route("Tx"))
    assert answer.code == 17
    assert answer.remark is not None
    assert answer.remark.startswith("No topic route info in name server for the topic: Tx")


async def test_an_unknown_code_is_not_supported(site: Site) -> None:
    answer = await site.connect().ask(RemotingCommand(9999, 8))
    assert (answer.code, answer.opaque, answer.remark) == (3, 8, " request type 9999 not supported")


async def test_one_topic_from_an_unknown_id_is_refused(peer: Peer) -> None:
    answer = await peer.ask(register(["T1"]))
    assert (answer.code, answer.remark) == (1, "register broker failed")
    assert await route_of(peer, "T1") is None
    await peer.ask(MASTER)
    newer = {**VERSION, "counter": 3}
    assert (await peer.ask(register(["T3"], version=newer))).code == 0  # now it tells of one new topic
    assert await route_of(peer, "T3") is not None
    assert await route_of(peer, "T1") is not None  # topics that a table lacks stay


async def test_a_wrong_checksum_is_refused_and_zero_is_not_checked(peer: Peer) -> None:
    answer = await peer.ask(register(bodyCrc32="12345"))
    assert (answer.code, answer.remark) == (1, "crc32 not match")
    assert (await peer.ask(register(bodyCrc32="0"))).code == 0


async def test_the_checksum_of_the_golden_body() -> None:
    """The body of the specification's vectors, with the checksum that a real broker sends for it."""
    body = register_body(["t"])
    assert zlib.crc32(body) & 0x7FFFFFFF == 1645359917


async def test_a_compressed_registration(peer: Peer) -> None:
    body = compressed_body(["T1", "T2"])
    command = register(compressed="true", bodyCrc32=str(zlib.crc32(body) & 0x7FFFFFFF))
    command.body = body
    assert (await peer.ask(command)).code == 0
    assert (await route_of(peer, "T2")) == json.loads(ROUTE_STANDARD.replace(',"1":"10.0.0.2:10911"', ""))


@pytest.mark.parametrize(
    "change",
    [
        {"compressed": "true"},  # but the body is not
        {"brokerId": "x"},
        {"brokerId": "99999999999999999999999"},
    ],
)
async def test_a_registration_that_can_not_be_understood(peer: Peer, change: dict[str, Any]) -> None:
    assert (await peer.ask(register(**change))).code == 1
    assert (await peer.ask(MASTER)).code == 0


@pytest.mark.parametrize("missing", ["brokerName", "brokerAddr", "clusterName", "haServerAddr", "brokerId"])
async def test_a_missing_field_is_named(site: Site, missing: str) -> None:
    command = register()
    del command.ext_fields[missing]
    answer = await site.connect().ask(command)
    assert answer.code == 1
    assert answer.remark is not None
    assert missing in answer.remark


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"topicConfigSerializeWrapper":7}']
)
async def test_any_body_gets_an_answer(peer: Peer, body: bytes) -> None:
    command = register(bodyCrc32="0")
    command.body = body
    assert (await peer.ask(command)).code in (0, 1)
    assert (await peer.ask(RemotingCommand(322, ext_fields=broker_fields(), body=body))).code in (0, 1)
    assert (await peer.ask(MASTER)).code == 0


async def test_data_versions_are_compared(peer: Peer) -> None:
    query = RemotingCommand(322, ext_fields=broker_fields(), body=json.dumps(VERSION).encode())
    answer = await peer.ask(query)
    assert (answer.ext_fields, answer.body) == ({"changed": "true"}, b"")
    await peer.ask(MASTER)
    answer = await peer.ask(query)
    assert answer.ext_fields == {"changed": "false"}
    assert answer.body == b'{"counter":2,"stateVersion":0,"timestamp":1}'
    query.body = b'{"counter":3,"stateVersion":0,"timestamp":1}'
    answer = await peer.ask(query)
    assert answer.ext_fields == {"changed": "true"}
    assert answer.body == b'{"counter":2,"stateVersion":0,"timestamp":1}'


async def test_write_permission_off_and_on(peer: Peer) -> None:
    await peer.ask(MASTER)

    async def perm() -> int:
        found = await route_of(peer, "T1")
        assert found is not None
        return int(found["queueDatas"][0]["perm"])

    answer = await peer.ask(RemotingCommand(205, ext_fields={"brokerName": "b0"}))
    assert (answer.ext_fields, await perm()) == ({"wipeTopicCount": "2"}, 4)
    await peer.ask(MASTER)  # the same version: nothing is taken anew
    assert await perm() == 4
    answer = await peer.ask(RemotingCommand(327, ext_fields={"brokerName": "b0"}))
    assert (answer.ext_fields, await perm()) == ({"addTopicCount": "2"}, 6)


async def test_the_master_leaves_and_the_slave_stays_then_its_connection_closes(site: Site) -> None:
    client, master, slave = site.connect(), site.connect(), site.connect()
    await master.ask(MASTER)
    await slave.ask(SLAVE)
    assert (await master.ask(unregister())).code == 0
    found = await route_of(client, "T1")
    assert found is not None
    assert found["brokerDatas"][0]["brokerAddrs"] == {"1": "10.0.0.2:10911"}
    await slave.stream.aclose()
    assert await route_of(client, "T1") is None
    answer = await client.ask(RemotingCommand(106))
    assert bytes(answer.body) == b'{"brokerAddrTable":{},"clusterAddrTable":{}}'


async def test_lists_of_topics(peer: Peer) -> None:
    await peer.ask(MASTER)
    await peer.ask(register(["T2", "T3"], name="b1", cluster="D", address="10.0.0.5:10911"))
    assert (await peer.ask(RemotingCommand(206))).body == b'{"topicList":["T1","T2","T3"]}'
    assert (await peer.ask(RemotingCommand(224, ext_fields={"cluster": "D"}))).body == b'{"topicList":["T2","T3"]}'
    assert (await peer.ask(RemotingCommand(224, ext_fields={"cluster": "E"}))).body == b'{"topicList":[]}'
    answer = await peer.ask(RemotingCommand(304))
    assert json.loads(bytes(answer.body)) == {"brokerAddr": "10.0.0.1:10911", "topicList": ["C", "b0", "D", "b1"]}
    assert (await peer.ask(RemotingCommand(216, ext_fields={"topic": "T2", "clusterName": "C"}))).code == 0
    found = await route_of(peer, "T2")
    assert found is not None
    assert [queues["brokerName"] for queues in found["queueDatas"]] == ["b1"]
    await peer.ask(RemotingCommand(216, ext_fields={"topic": "T2"}))
    assert await route_of(peer, "T2") is None


async def test_the_replicas_of_a_name(peer: Peer) -> None:
    await peer.ask(MASTER)
    answer = await peer.ask(RemotingCommand(901, ext_fields={"brokerName": "b0", "clusterName": "C"}))
    assert answer.body == (
        b'{"brokerMemberGroup":{"brokerAddrs":{0:"10.0.0.1:10911"},"brokerName":"b0","cluster":"C"}}'
    )


def queue_body(*brokers: str, queues: int = 8) -> bytes:
    """217's body, of a 5.x broker with enableSingleTopicRegister."""
    listed = [
        {"brokerName": name, "perm": 6, "readQueueNums": queues, "topicSysFlag": 0, "writeQueueNums": queues}
        for name in brokers
    ]
    return json.dumps({"brokerDatas": [], "filterServerTable": {}, "queueDatas": listed}).encode()


async def test_one_topic_of_a_broker() -> None:
    async with open_site(NameServerOptions(topics_max=4, queue_entries_max=5)) as site:
        peer = site.connect()
        await peer.ask(MASTER)

        async def add(topic: str, body: bytes) -> int:
            return (await peer.ask(RemotingCommand(217, ext_fields={"topic": topic}, body=body))).code

        async def queues(topic: str) -> list[tuple[str, int]]:
            found = await route_of(peer, topic)
            return (
                [] if found is None else [(each["brokerName"], each["readQueueNums"]) for each in found["queueDatas"]]
            )

        assert await add("New", queue_body("b0")) == 0
        assert await queues("New") == [("b0", 8)]
        assert await add("T1", queue_body("b0", queues=16)) == 0
        assert await queues("T1") == [("b0", 16)]
        assert await add("Other", queue_body("unknown", "b0")) == 0
        assert await queues("Other") == []
        assert await add("Other", queue_body()) == 0
        assert await add("x" * 256, queue_body("b0")) == 1
        assert await add("Other", b"[") == 1
        assert await add("T4", queue_body("b0")) == 0
        assert await add("T5", queue_body("b0")) == 1
        assert await add("T4", queue_body("b0")) == 0


async def test_its_configuration_is_shown_and_stays() -> None:
    async with open_site(NameServerOptions(host="10.0.0.7", port=9999)) as site:
        peer = site.connect()
        body = (await peer.ask(RemotingCommand(319))).body
        assert (
            body
            == b"bindAddress=10.0.0.7\nlistenPort=9999\norderMessageEnable=false\nserverChannelMaxIdleTimeSeconds=120\n"
        )
        assert (await peer.ask(RemotingCommand(318, body=body))).code == 0
        answer = await peer.ask(RemotingCommand(318, body=b"listenPort=1\nxyz=1\n"))
        assert answer.code == 16
        assert (answer.remark or "").endswith("listenPort is 9999; xyz is no key here")
        assert (await peer.ask(RemotingCommand(318, body=b"#" * 70_000))).code == 1


@pytest.mark.parametrize("is_acknowledged", [True, False])
async def test_settings(is_acknowledged: bool) -> None:
    async with open_site(NameServerOptions(order_message_enable=is_acknowledged)) as site:
        peer = site.connect()
        at = {"namespace": "ORDER_TOPIC_CONFIG", "key": "T1"}
        assert (await peer.ask(RemotingCommand(101, ext_fields=at))).code == 22
        assert (await peer.ask(RemotingCommand(219, ext_fields=at))).code == 22
        assert (await peer.ask(RemotingCommand(100, ext_fields={**at, "value": "b0:4;b1:4"}))).code == 0
        assert (await peer.ask(RemotingCommand(101, ext_fields=at))).ext_fields == {"value": "b0:4;b1:4"}
        assert (await peer.ask(RemotingCommand(219, ext_fields=at))).body == b'{"table":{"T1":"b0:4;b1:4"}}'
        assert (await peer.ask(MASTER)).body == b'{"table":{"T1":"b0:4;b1:4"}}'
        found = await route_of(peer, "T1")
        assert found is not None
        assert found.get("orderTopicConf") == ("b0:4;b1:4" if is_acknowledged else None)
        assert (await peer.ask(RemotingCommand(102, ext_fields=at))).code == 0
        assert (await peer.ask(RemotingCommand(101, ext_fields=at))).code == 22


class Worker:
    """Runs nothing before it is released."""

    def __init__(self) -> None:
        self.release = trio.Event()
        self.names: list[str] = []

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.names.append(getattr(function, "__name__", "read"))
        await self.release.wait()
        return function(*arguments)


LARGE_ANSWERS = [
    route("T1"),
    RemotingCommand(106, ext_fields={}),
    RemotingCommand(206, ext_fields={}),
    RemotingCommand(224, ext_fields={"cluster": "C"}),
]


async def test_large_tables_are_read_and_encoded_beside_the_event_loop() -> None:
    worker = Worker()
    async with open_site(run_blocking=worker) as site:
        broker = site.connect()
        for n in range(LARGE_COUNT + 1):
            answer = await broker.ask(register(["T1", f"T{n}x"], name=f"b{n}", address=f"h:{n}"))
            assert answer.code == 0
        assert not worker.names, "a usual registration is cheap"
        body = compressed_body(["new", "newer"])
        fields = {**broker_fields("compressed", 0, "h:9999"), "haServerAddr": "", "compressed": "true"}
        requests = [RemotingCommand(103, ext_fields=fields, body=body), *LARGE_ANSWERS]
        peers = [site.connect() for _ in requests]
        for peer, request in zip(peers, requests, strict=True):
            await peer.send(request)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(worker.names) == ["encode", "read"], "one of each kind at a time"
        assert (await broker.ask(route("T5x"))).code == 0, "others are served meanwhile"
        assert (await broker.ask(route("new"))).code == 17
        worker.release.set()
        answers = [await peer.expect() for peer in peers]
        assert [answer.code for answer in answers] == [0] * len(requests)
        assert worker.names.count("encode") == len(LARGE_ANSWERS)
        found = [json.loads(bytes(answer.body).replace(b"{0:", b'{"0":')) for answer in answers[1:]]
        assert len(found[0]["queueDatas"]) == LARGE_COUNT + 1
        assert len(found[1]["brokerAddrTable"]) > LARGE_COUNT
        assert {"T1", "T5x"} <= set(found[2]["topicList"]) & set(found[3]["topicList"])
        assert (await broker.ask(route("new"))).code == 0


async def test_a_broker_that_is_gone_before_its_registration_is_read_is_not_registered() -> None:
    worker = Worker()
    async with open_site(run_blocking=worker) as site:
        broker = site.connect()
        fields = {**broker_fields(), "haServerAddr": "", "compressed": "true"}
        await broker.send(RemotingCommand(103, ext_fields=fields, body=compressed_body(["T1", "T2"])))
        await trio.testing.wait_all_tasks_blocked()
        await broker.stream.aclose()
        worker.release.set()
        await trio.testing.wait_all_tasks_blocked()
        assert site.name_server.statistics().brokers == 0


@pytest.mark.parametrize("code", [322, 217, 105])
async def test_bodies_other_than_registrations_are_limited(site: Site, code: int) -> None:
    fields = {**broker_fields(), "topic": "T1"}
    body = b"[" + b"[]," * (BODY_SIZE_MAX // 3) + b"[]]"
    answer = await site.connect().ask(RemotingCommand(code, ext_fields=fields, body=body))
    assert (answer.code, answer.remark) == (1, f"a body of {len(body)} bytes; the maximum is {BODY_SIZE_MAX}")


async def test_requests_that_change_nothing_are_not_logged(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> list[str]:
        return [r.getMessage().split()[0] for r in caplog.records if r.name == "ha.namesrv.processor"]

    caplog.set_level("INFO")
    for code, fields in ((216, {"topic": "x" * 10_000}), (205, {"brokerName": "x" * 10_000})):
        assert (await peer.ask(RemotingCommand(code, ext_fields=fields))).code == 0
    assert logged() == []
    await peer.ask(MASTER)
    for code, fields in ((216, {"topic": "T1"}), (216, {"topic": "T1"}), (205, {"brokerName": "b0"})):
        assert (await peer.ask(RemotingCommand(code, ext_fields=fields))).code == 0
    assert logged() == ["namesrv.broker_registered", "namesrv.topic_deleted", "namesrv.write_permission_changed"]


async def test_strangers_can_not_fill_the_memory() -> None:
    options = NameServerOptions(brokers_max=2, topics_max=5, config_entries_max=1)
    async with open_site(options) as site:
        peer = site.connect()
        assert (await peer.ask(MASTER)).code == 0
        assert (await peer.ask(register(["x1", "x2", "x3", "x4"], name="b1", address="h:1"))).code == 1  # topics
        assert (await peer.ask(register(["x1", "x2"], name="b1", address="h:1"))).code == 0
        assert (await peer.ask(register(["x1", "x2"], name="b2", address="h:2"))).code == 1  # brokers
        assert (await peer.ask(MASTER)).code == 0
        setting = {"namespace": "n", "key": "k", "value": "v"}
        assert (await peer.ask(RemotingCommand(100, ext_fields=setting))).code == 0
        assert (await peer.ask(RemotingCommand(100, ext_fields=setting))).code == 0
        assert (await peer.ask(RemotingCommand(100, ext_fields={**setting, "key": "l"}))).code == 1
        assert (await peer.ask(RemotingCommand(100, ext_fields={**setting, "value": "v" * 70_000}))).code == 1


async def test_topics_without_a_name_of_their_own_and_old_brokers_bodies() -> None:
    """A 4.9 broker's body: no attributes, no mapping fields, no stateVersion."""
    config = topic_json("T1")
    del config["attributes"]
    wrapper = {
        "dataVersion": {"counter": 2, "timestamp": 1},
        "topicConfigTable": {"T1": config, "T2": topic_json("T2")},
    }
    async with open_site() as site:
        peer = site.connect()
        command = register(bodyCrc32="0")
        command.body = msgspec.json.encode({"filterServerList": [], "topicConfigSerializeWrapper": wrapper})
        assert (await peer.ask(command)).code == 0
        assert await route_of(peer, "T1") is not None


@pytest.mark.parametrize("code", [100, 102])
async def test_the_namespace_of_duplicate_brokers_can_not_be_changed(peer: Peer, code: int) -> None:
    setting = {"namespace": "HALOG_DUPLICATE_BROKERS", "key": "b0:0", "value": "a:1;b:1"}
    answer = await peer.ask(RemotingCommand(code, ext_fields=setting))
    assert answer.code == 1
    assert answer.remark == "namespace HALOG_DUPLICATE_BROKERS can't be changed: it lists the duplicate brokers"
    for read in (101, 219):
        assert (await peer.ask(RemotingCommand(read, ext_fields=setting))).code == 22

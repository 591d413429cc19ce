"""The requests of a name server, behind a real connection."""

from zlib import crc32

import trio
from trio.testing import wait_all_tasks_blocked

from ha.namesrv import NameServer, NameServerOptions
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingServerOptions
from tests.fuzz import requests
from tests.fuzz.harness import Harness
from tests.fuzz.replication import run_virtually
from tests.namesrv.brokers import compressed_body, register_body
from tests.remoting.wire import MemoryListener
from tests.store.disks import run_inline

OPTIONS = NameServerOptions(
    brokers_max=6, topics_max=12, config_entries_max=4, remoting=RemotingServerOptions(idle_timeout_s=1000.0)
)


def answer_requests(data: bytes) -> None:
    """Any requests: each gets one answer; the tables stay within bounds and can be asked for; nothing stays behind."""
    chunks = requests.decode(data)

    async def scenario() -> None:
        server = NameServer(OPTIONS, run_blocking=run_inline)
        listener = MemoryListener()
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, [listener])
            client = requests.Client(listener.connect())
            nursery.start_soon(client.receive)
            asked = []
            for chunk in chunks:
                asked += await client.send(chunk)
                await wait_all_tasks_blocked()
            if not client.is_closed:
                unanswered = [request for request in asked if request.opaque not in client.answers]
                assert not unanswered, unanswered
            assert {answer.code for answer in client.answers.values()} <= {0, 1, 3, 16, 17, 22}
            found = server.statistics()
            assert found.brokers <= OPTIONS.brokers_max
            assert found.topics <= OPTIONS.topics_max
            witness = requests.Client(listener.connect())
            nursery.start_soon(witness.receive)
            topics = [
                RemotingCommand(105, opaque=n, ext_fields={"topic": t}) for n, t in enumerate(server.routes.topics())
            ]
            await witness.send([*topics, RemotingCommand(106, opaque=100), RemotingCommand(206, opaque=101)])
            await wait_all_tasks_blocked()
            assert len(witness.answers) == len(topics) + 2
            assert {answer.code for answer in witness.answers.values()} <= {0, 17}
            await client.stream.aclose()
            await wait_all_tasks_blocked()
            # They spoke over that connection only.
            assert server.statistics().brokers == 0
            assert server.statistics().topics == 0
            assert not server.routes.cluster_info().broker_addr_table
            assert not server.routes.clusters()
            nursery.cancel_scope.cancel()

    run_virtually(scenario)


BROKER = {"brokerName": "b0", "brokerAddr": "h:1", "clusterName": "C", "haServerAddr": "h:2", "brokerId": 0}


def seeds() -> list[bytes]:
    """A good request of each kind, and some together."""
    plain = register_body(["T1", "T2"])
    packed = compressed_body(["T1", "T2"])
    single = [
        requests.to_bytes(103, {**BROKER, "bodyCrc32": crc32(plain) & 0x7FFFFFFF}, plain),
        requests.to_bytes(103, {**BROKER, "compressed": "true", "brokerId": 1, "brokerAddr": "h:3"}, packed, marks=1),
        requests.to_bytes(103, {**BROKER, "heartbeatTimeoutMillis": 5000, "enableActingMaster": "true"}, plain),
        requests.to_bytes(105, {"topic": "T1"}),
        requests.to_bytes(105, {"topic": "T1", "acceptStandardJsonOnly": "true"}, marks=4),
        requests.to_bytes(322, BROKER, b'{"counter":1,"stateVersion":0,"timestamp":5}'),
        requests.to_bytes(904, BROKER),
        *(requests.to_bytes(code, {}) for code in (106, 206, 304)),
        *(requests.to_bytes(code, BROKER) for code in (205, 327, 901)),
        requests.to_bytes(224, {"cluster": "C"}),
        requests.to_bytes(216, {"topic": "T1", "clusterName": "C"}),
        requests.to_bytes(100, {"namespace": "ORDER_TOPIC_CONFIG", "key": "T1", "value": "b0:4"}),
        *(requests.to_bytes(code, {"namespace": "ORDER_TOPIC_CONFIG", "key": "T1"}) for code in (101, 219, 102)),
        requests.to_bytes(104, BROKER),
    ]
    newer = b'{"topicConfigSerializeWrapper":{"dataVersion":{"stateVersion":7},"topicConfigTable":{"T":{},"U":{}}}}'
    twice = [
        requests.to_bytes(103, {**BROKER, "brokerId": 1, "brokerAddr": "h:9"}, plain),
        requests.to_bytes(103, BROKER, newer),
        requests.to_bytes(103, {**BROKER, "brokerId": 0, "brokerAddr": "h:9"}, plain),
    ]
    return [
        requests.NEXT.join(twice),
        *single,
        requests.NEXT.join(single),
        requests.NEXT.join([single[1], single[0], single[3]]),
    ]


CODES = (103, 104, 105, 106, 205, 206, 216, 217, 219, 224, 304, 318, 319, 322, 327, 901, 904)
WORDS = (
    *(int(code).to_bytes(2, "big") for code in CODES),
    *(name.encode() + b"\x1f" for name in (*BROKER, "topic", "namespace", "key", "value", "cluster", "compressed")),
    requests.NEXT,
    requests.PAUSE,
    requests.BODY,
    b'"topicConfigTable":{',
    b'"topicConfigSerializeWrapper":{',
    int(RequestCode.REGISTER_BROKER).to_bytes(2, "big") + b"\x00",
)

HARNESSES = {
    "name_server": Harness(
        run=answer_requests, seeds=seeds, words=WORDS, size_max=3000, seconds_max=5.0, memory_max=32 << 20
    )
}

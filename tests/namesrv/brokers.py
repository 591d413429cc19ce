"""Requests as brokers and clients send them to a name server, and a name server over memory streams to send them to."""

import json
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from ha.namesrv import NameServer, NameServerOptions
from ha.protocol.remoting import RemotingCommand
from tests.remoting.wire import MemoryListener, Peer

VERSION = {"counter": 2, "stateVersion": 0, "timestamp": 1}


class Site:
    """A running name server and the way to it."""

    def __init__(self, name_server: NameServer, listener: MemoryListener, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.name_server = name_server
        self.listener = listener

    def connect(self) -> Peer:
        return Peer(self.listener.connect())


@asynccontextmanager
async def open_site(options: NameServerOptions | None = None, **parts: Any) -> AsyncIterator[Site]:
    """`parts`: `guard` and `run_blocking` of the name server."""
    listener = MemoryListener()
    name_server = NameServer(options, **parts)
    async with trio.open_nursery() as nursery:
        await nursery.start(name_server.serve, [listener])
        yield Site(name_server, listener, nursery)
        nursery.cancel_scope.cancel()


def topic_json(topic: str, queues: int = 4, perm: int = 6) -> dict[str, Any]:
    return {
        "attributes": {},
        "order": False,
        "perm": perm,
        "readQueueNums": queues,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic,
        "topicSysFlag": 0,
        "writeQueueNums": queues,
    }


def register_body(topics: Sequence[str | dict[str, Any]], version: dict[str, int] | None = None) -> bytes:
    """A 5.x broker's body, with its $ref."""
    configs = [topic_json(topic) if isinstance(topic, str) else topic for topic in topics]
    wrapper = {
        "dataVersion": version or VERSION,
        "mappingDataVersion": {"$ref": "$.topicConfigSerializeWrapper.dataVersion"},
        "topicConfigTable": {config["topicName"]: config for config in configs},
        "topicQueueMappingDetailMap": {},
        "topicQueueMappingInfoMap": {},
    }
    return json.dumps({"filterServerList": [], "topicConfigSerializeWrapper": wrapper}, separators=(",", ":")).encode()


def compressed_body(topics: Sequence[str], version: dict[str, int] | None = None) -> bytes:
    """The same as a broker with compressedRegister sends it."""
    data_version = json.dumps(version or VERSION, separators=(",", ":")).encode()
    parts = [struct.pack(">i", len(data_version)), data_version, struct.pack(">i", len(topics))]
    for topic in topics:
        line = f"{topic} 4 4 6 SINGLE_TAG {{}}".encode()
        parts += (struct.pack(">i", len(line)), line)
    parts += (struct.pack(">i", 2), b"[]", struct.pack(">i", 0))
    return zlib.compress(b"".join(parts))


def register(
    topics: Sequence[str | dict[str, Any]] = ("T1", "T2"),
    *,
    name: str = "b0",
    broker_id: int = 0,
    address: str = "10.0.0.1:10911",
    cluster: str = "C",
    ha: str = "10.0.0.1:10912",
    version: dict[str, int] | None = None,
    opaque: int = 1,
    **ext: Any,
) -> RemotingCommand:
    """103 REGISTER_BROKER."""
    body = register_body(topics, version)
    fields = {
        "brokerName": name,
        "brokerAddr": address,
        "clusterName": cluster,
        "haServerAddr": ha,
        "brokerId": str(broker_id),
        "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF),
        **ext,
    }
    return RemotingCommand(103, opaque, ext_fields=fields, body=body)


def broker_fields(
    name: str = "b0", broker_id: int = 0, address: str = "10.0.0.1:10911", cluster: str = "C"
) -> dict[str, str]:
    return {"brokerName": name, "brokerAddr": address, "clusterName": cluster, "brokerId": str(broker_id)}


def unregister(*args: Any, **kwargs: Any) -> RemotingCommand:
    """104 UNREGISTER_BROKER."""
    return RemotingCommand(104, 2, ext_fields=broker_fields(*args, **kwargs))


def route(topic: str, *, version: int = 479, **ext: str) -> RemotingCommand:
    """105 GET_ROUTEINFO_BY_TOPIC."""
    return RemotingCommand(105, 3, ext_fields={"topic": topic, **ext}, version=version)


async def route_of(peer: Peer, topic: str) -> dict[str, Any] | None:
    """The route as a modern client reads it; None if there is none."""
    answer = await peer.ask(route(topic))
    if answer.code == 17:
        return None
    assert answer.code == 0
    body: dict[str, Any] = json.loads(bytes(answer.body))
    return body

"""Limits of a name server, over real sockets."""

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from ha.namesrv import NameServer, NameServerOptions, open_name_server
from ha.namesrv.settings import TOTAL_SIZE_MAX
from ha.protocol.remoting import RemotingCommand
from tests.limits.sockets import anonymous_bytes
from tests.namesrv.brokers import broker_fields, compressed_body, register, route_of
from tests.remoting.wire import Peer

GROWTH_MAX = 48 << 20
FIELDS = {**broker_fields(), "haServerAddr": "h:2"}


@asynccontextmanager
async def open_site(**limits: Any) -> AsyncIterator[tuple[NameServer, Peer, Peer]]:
    """A name server, the connection of a broker whose topic G has to stay known, and an untrusted peer's."""
    async with open_name_server(NameServerOptions(port=0, **limits)) as server:
        good, stranger = [Peer(await trio.open_tcp_stream(*server.address)) for _ in range(2)]
        assert (await good.ask(register(["G", "H"], name="good", address="g:1", cluster="G"))).code == 0
        try:
            yield server, good, stranger
            assert await route_of(good, "G") is not None
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(good.stream)
                await trio.aclose_forcefully(stranger.stream)


async def test_brokers() -> None:
    async with open_site(brokers_max=5) as (server, _, stranger):
        answers = [await stranger.ask(register(name=f"b{n}", address=f"h:{n}")) for n in range(1, 10)]
        assert [answer.code for answer in answers] == [0] * 4 + [1] * 5
        assert "already 5 brokers" in str(answers[-1].remark)
        assert server.statistics().brokers == 5


async def test_topics_and_entries() -> None:
    async with open_site(topics_max=12, queue_entries_max=20) as (server, _, stranger):
        topics = [f"t{n}" for n in range(10)]
        assert (await stranger.ask(register(topics, name="b1", address="h:1"))).code == 0
        answer = await stranger.ask(register([*topics, "one more"], name="b1", address="h:1"))
        assert (answer.code, answer.remark) == (1, "register broker failed: already 12 topics")
        answer = await stranger.ask(register(topics, name="b2", address="h:2"))
        assert answer.code == 1
        assert answer.remark == "register broker failed: already 12 topics of brokers, and 10 more are beyond 20"
        assert server.statistics().topics == 12


async def test_names() -> None:
    async with open_site() as (server, _, stranger):
        long = "n" * 256
        for hostile in (register(name=long), register(address=long), register(cluster=long), register(ha=long)):
            answer = await stranger.ask(hostile)
            assert answer.code == 1
            assert "a name of 256 characters" in str(answer.remark)
        assert server.statistics().brokers == 1
        before = server.statistics().topics
        assert (await stranger.ask(register(["U1", "t" * 256, "U2"], name="b2", address="h:2"))).code == 0
        assert server.statistics().brokers == 2, "a long name of a topic takes no other one away"
        assert server.statistics().topics == before + 2


def bomb(size: int) -> bytes:
    """At most one MiB that inflates to `size` zeros."""
    packer = zlib.compressobj(1)
    piece = bytes(1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(size >> 20)), packer.flush()])


async def test_a_zip_bomb() -> None:
    async with open_site(topics_max=100) as (server, _, stranger):
        fields = {**FIELDS, "compressed": "true"}
        for _ in range(2):  # the first time, the allocator takes memory that it keeps
            before = anonymous_bytes()
            for body in (bomb(64 << 20), bomb(15 << 20), compressed_body(["t"] * 101)):
                assert len(body) < 8 << 20
                answer = await stranger.ask(RemotingCommand(103, ext_fields=fields, body=body))
                assert answer.code == 1
        assert "101 topics; at most 100" in str(answer.remark)
        assert anonymous_bytes() - before < GROWTH_MAX
        assert server.statistics().brokers == 1


async def test_json_nested_deeply() -> None:
    async with open_site() as (server, _, stranger):
        for depth in (65, 1000, 100_000):
            body = b'{"x":' + b"[" * depth + b"]" * depth + b"}"
            answer = await stranger.ask(RemotingCommand(322, ext_fields=FIELDS, body=body))
            assert answer.code == 1
            assert "JSON" in str(answer.remark)
        assert server.statistics().brokers == 1


async def test_settings() -> None:
    async with open_site(config_entries_max=3) as (_, __, stranger):
        codes = []
        for n in range(5):
            fields = {"namespace": "n", "key": f"k{n}", "value": "v"}
            codes.append((await stranger.ask(RemotingCommand(100, ext_fields=fields))).code)
        assert codes == [0, 0, 0, 1, 1]
        long = {"namespace": "n", "key": "k0", "value": "v" * 65_536}
        assert (await stranger.ask(RemotingCommand(100, ext_fields=long))).code == 1


async def test_characters_of_all_settings() -> None:
    async with open_site() as (_, __, stranger):

        async def put(key: str, size: int) -> int:
            fields = {"namespace": "n", "key": key, "value": "v" * size}
            return (await stranger.ask(RemotingCommand(100, ext_fields=fields))).code

        count = TOTAL_SIZE_MAX // 65_536
        assert [await put(f"{n:03}", 65_000) for n in range(count + 2)].count(0) == count
        assert await put("000", 10) == 0
        assert await put("999", 60_000) == 0, "a shorter value makes room"
        assert (await stranger.ask(RemotingCommand(102, ext_fields={"namespace": "n", "key": "001"}))).code == 0
        assert await put("998", 65_000) == 0, "so does a deleted one"
        assert await put("997", 65_000) == 1
        listed = await stranger.ask(RemotingCommand(219, ext_fields={"namespace": "n"}))
        assert listed.code == 0
        assert len(listed.body) > TOTAL_SIZE_MAX - 65_536

"""Limits of one connection of a remoting server, and of all of them together. docs/limits.md has the table."""

import struct

import pytest
import trio
import trio.testing

from ha.protocol.remoting import EXT_FIELD_COUNT_MAX, RemotingCommand, encode_command
from ha.remoting import RemotingConnection, RemotingServerOptions
from tests.limits.sockets import TIMEOUT_S, anonymous_bytes, ended, open_site, push, settled
from tests.remoting.wire import Peer, Recorder

GROWTH_MAX = 24 << 20


def frame(opaque: int = 1, body: bytes = b"", fields: dict[str, str] | None = None, *, size: int = 0) -> bytes:
    """A request for a response of `size` bytes, if the handler looks at that."""
    return encode_command(RemotingCommand(10, opaque, ext_fields={"size": str(size), **(fields or {})}, body=body))


def json_frame(header: bytes) -> bytes:
    return struct.pack(">ii", 4 + len(header), len(header)) + header


def answer_with_size(connection: RemotingConnection, request: RemotingCommand) -> None:
    connection.reply(request, request.reply(0, body=bytes(int(request.ext_fields.get("size", "0")))))


async def answer_all(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
    for request in requests:
        answer_with_size(connection, request)


HOSTILE = {
    "a frame longer than frame_size_max": struct.pack(">ii", 1 << 20, 10) + bytes(100),
    "a frame of 2 GiB": struct.pack(">ii", 0x7FFFFFFF, 10) + bytes(100),
    "a frame of a negative size": struct.pack(">ii", -5, 10) + bytes(100),
    "a header longer than header_size_max": struct.pack(">ii", 60_000, 20_001) + bytes(100),
    "more ext fields than EXT_FIELD_COUNT_MAX": frame(fields={f"n{n}": "" for n in range(EXT_FIELD_COUNT_MAX)}),
    "JSON nested deeper than the parser goes": json_frame(b"[" * 10_000),
    "a number of ten thousand digits": json_frame(b'{"code":' + b"9" * 10_000 + b"}"),
    "an ext value nested deeply": json_frame(b'{"code":1,"extFields":{"a":%b1%b}}' % (b"[" * 5000, b"]" * 5000)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
async def test_malformed_frame_closes_only_its_connection(data: bytes) -> None:
    options = RemotingServerOptions(frame_size_max=65_536, header_size_max=20_000)
    async with open_site(Recorder(), options) as site:
        witness = await site.witness()
        assert await witness.is_served()
        before = anonymous_bytes()
        peers = [await site.connect() for _ in range(20)]
        for peer in peers:
            await push(peer, data)
        for peer in peers:
            assert await ended(peer)
        assert anonymous_bytes() - before < GROWTH_MAX
        assert await witness.is_served()
        assert site.server.statistics().closed == {"protocol error": 20}


async def test_slow_frame_closes_the_connection(socket_clock: trio.testing.MockClock) -> None:
    """Slowloris: a byte now and then keeps a connection from being idle, but not a frame from being overdue."""
    async with open_site(Recorder()) as site:
        witness = await site.witness()
        peer = await site.connect()
        for byte in frame():
            await push(peer, bytes([byte]))
            await trio.sleep(10)
            if site.server.statistics().closed:
                break
        assert trio.current_time() < 50
        assert await ended(peer)
        assert site.server.statistics().closed == {"incomplete frame": 1}
        assert await witness.is_served()


async def test_idle_connection_is_closed(socket_clock: trio.testing.MockClock) -> None:
    async with open_site(Recorder()) as site:
        assert await ended(await site.connect(), timeout_s=121)
        assert site.server.statistics().closed == {"idle": 1}


async def test_incomplete_frames_share_a_limit() -> None:
    options = RemotingServerOptions(partial_bytes_max=4 << 20)
    async with open_site(Recorder(), options) as site:
        witness = await site.witness()
        assert await witness.is_served()
        before = anonymous_bytes()
        peers = [await site.connect() for _ in range(10)]
        for peer in peers:
            await push(peer, struct.pack(">ii", 16_000_000, 100) + bytes(1 << 20))
        await site.closed("protocol error", 6)
        await settled()
        assert site.server.statistics().partial_bytes <= 4 << 20
        assert anonymous_bytes() - before < GROWTH_MAX
        assert await witness.is_served()


async def test_peer_that_does_not_read_is_closed(socket_clock: trio.testing.MockClock) -> None:
    """Small requests, long responses: no more requests of a chunk are carried out than can be sent."""
    answered = 0

    async def answer_when_ready(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        nonlocal answered
        for request in requests:
            if not await connection.is_ready():
                return
            answered += 1
            answer_with_size(connection, request)

    async with open_site(answer_when_ready) as site:
        witness = await site.witness()
        assert await witness.is_served()
        before = anonymous_bytes()
        for _ in range(3):
            await push(await site.connect(), frame(size=200_000) * 5000)
        await site.closed("peer does not read", 3, timeout_s=40)
        assert answered < 3 * 100, "a gigabyte of responses each was asked for"
        assert anonymous_bytes() - before < GROWTH_MAX
        assert await witness.is_served()
        assert site.server.statistics().outbox_bytes == 0


async def test_full_outbox_closes_the_connection() -> None:
    async with open_site(answer_all, RemotingServerOptions(outbox_bytes_max=4 << 20)) as site:
        witness = await site.witness()
        await push(await site.connect(), frame(size=200_000) * 200)
        await site.closed("outbox full")
        assert await witness.is_served()


async def test_fullest_outbox_is_closed_when_all_exceed_their_limit() -> None:
    options = RemotingServerOptions(outbox_total_bytes_max=24 << 20, send_timeout_s=60)
    async with open_site(answer_all, options) as site:
        witness = await site.witness()
        modest = await site.connect()
        await push(modest, frame(7, size=4 << 20))
        await settled()
        for _ in range(5):
            await push(await site.connect(), frame(size=15 << 20))
        await site.closed("outbox full", 4)
        assert site.server.statistics().outbox_bytes <= 24 << 20
        assert await witness.is_served()
        answer = await modest.expect()
        assert len(answer.body) == 4 << 20


async def test_reading_pauses_while_handlers_hold_too_much() -> None:
    go_on = trio.Event()
    seen: list[int] = []

    async def wait(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        seen.append(sum(len(request.body) for request in requests))
        await go_on.wait()
        for request in requests:
            connection.reply(request, request.reply(0))

    options = RemotingServerOptions(handled_bytes_max=3 << 20)
    async with open_site(wait, options) as site:
        peers: list[Peer] = []
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                peer = await site.connect()
                peers.append(peer)
                nursery.start_soon(peer.stream.send_all, frame(body=bytes(1 << 20)) * 3)
            await settled()
            assert 1 <= len(seen) <= 5, "each megabyte comes in several chunks: only those not paused in between"
            go_on.set()
        for peer in peers:
            for _ in range(3):
                with trio.fail_after(TIMEOUT_S):
                    assert await peer.receive() is not None
        assert sum(seen) == 30 << 20
        assert site.server.statistics().handled_bytes == 0


async def test_connections_of_one_host_are_limited() -> None:
    options = RemotingServerOptions(connections_max=100, connections_per_host_max=5, evictable_after_s=60)
    async with open_site(Recorder(), options) as site:
        witness = await site.witness()
        assert await witness.is_served()
        peers = [await site.connect() for _ in range(4)]
        assert await ended(await site.connect())
        assert site.server.statistics().refused == 1
        await peers[0].stream.aclose()
        await site.closed("end of stream")
        another = await site.witness()
        assert await another.is_served()
        assert await witness.is_served()


@pytest.mark.parametrize("limit", ["connections_max", "connections_per_host_max"])
async def test_idle_connection_is_evicted_when_full(limit: str, socket_clock: trio.testing.MockClock) -> None:
    """Peers that only connect keep nobody out, and no connection with a request is closed for another one."""
    async with open_site(Recorder(), RemotingServerOptions(**{limit: 4})) as site:
        witness = await site.witness()
        assert await witness.is_served()
        silent = []
        for _ in range(3):
            silent.append(await site.connect())
            await trio.sleep(3)
        for oldest in silent:
            assert await (await site.witness()).is_served()
            assert await ended(oldest)
            await trio.sleep(3)
        assert await ended(await site.connect())
        assert await witness.is_served()
        assert site.server.statistics().closed == {"evicted": 3}

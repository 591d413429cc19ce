"""What one connection, and all of them together, may take of a remoting server. docs/limits.md has the table."""

from __future__ import annotations

import struct

import pytest
import trio

from ha.protocol.remoting import EXT_FIELD_COUNT_MAX, RemotingCommand, encode_command
from ha.remoting import RemotingConnection, RemotingServerOptions
from tests.limits.sockets import TIMEOUT_S, anonymous_bytes, ended, open_site, push
from tests.remoting.wire import Peer, Recorder

GROWTH_MAX = 24 << 20


def frame(opaque: int = 1, body: bytes = b"", fields: dict[str, str] | None = None, *, size: int = 0) -> bytes:
    """A request whose answer shall have `size` bytes, if the handler listens to that."""
    return encode_command(RemotingCommand(10, opaque, ext_fields={"size": str(size), **(fields or {})}, body=body))


def json_frame(header: bytes) -> bytes:
    return struct.pack(">ii", 4 + len(header), len(header)) + header


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
async def test_what_no_frame_may_be_ends_its_connection_alone(data: bytes) -> None:
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


async def test_a_frame_that_trickles_is_cut() -> None:
    """Slowloris: a byte now and then keeps a connection from being idle, but a frame has its own time."""
    options = RemotingServerOptions(frame_timeout_s=0.5, idle_timeout_s=60)
    async with open_site(Recorder(), options) as site:
        witness = await site.witness()
        peer = await site.connect()
        with trio.fail_after(TIMEOUT_S):
            async with trio.open_nursery() as nursery:

                async def trickle() -> None:
                    for byte in frame():
                        await push(peer, bytes([byte]))
                        await trio.sleep(0.1)

                nursery.start_soon(trickle)
                assert await ended(peer)
                nursery.cancel_scope.cancel()
        assert site.server.statistics().closed == {"incomplete frame": 1}
        assert await witness.is_served()


async def test_a_silent_peer_is_cut() -> None:
    async with open_site(Recorder(), RemotingServerOptions(idle_timeout_s=0.5)) as site:
        assert await ended(await site.connect())
        assert site.server.statistics().closed == {"idle": 1}


async def test_incomplete_frames_share_a_bound() -> None:
    options = RemotingServerOptions(partial_bytes_max=4 << 20)
    async with open_site(Recorder(), options) as site:
        witness = await site.witness()
        assert await witness.is_served()
        before = anonymous_bytes()
        peers = [await site.connect() for _ in range(10)]
        for peer in peers:
            await push(peer, struct.pack(">ii", 16_000_000, 100) + bytes(1 << 20))
        await site.closed("protocol error", 6)
        await trio.sleep(0.2)
        assert site.server.statistics().partial_bytes <= 4 << 20
        assert anonymous_bytes() - before < GROWTH_MAX
        assert await witness.is_served()


async def test_who_asks_much_and_reads_nothing_is_cut_and_holds_little() -> None:
    """Small requests, long answers: the outbox is bounded, and of a chunk no more is done than can be sent."""
    answered = 0

    async def answer_at_length(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        nonlocal answered
        for request in requests:
            if not await connection.is_ready():
                return
            answered += 1
            connection.reply(request, request.reply(0, body=bytes(200_000 if request.code == 10 else 0)))

    options = RemotingServerOptions(send_timeout_s=0.7, outbox_high_bytes=1 << 20)
    async with open_site(answer_at_length, options) as site:
        witness = await site.witness()
        assert await witness.is_served()
        before = anonymous_bytes()
        for _ in range(3):
            await push(await site.connect(), frame() * 5000)
        await site.closed("peer does not read", 3)
        assert answered < 3 * 100, "a gigabyte of answers each was asked for"
        assert anonymous_bytes() - before < GROWTH_MAX
        assert await witness.is_served()
        assert site.server.statistics().outbox_bytes == 0


async def test_an_outbox_that_grows_all_the_same_is_cut() -> None:
    async def answer_blindly(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        for request in requests:
            connection.reply(request, request.reply(0, body=bytes(200_000 if request.code == 10 else 0)))

    async with open_site(answer_blindly, RemotingServerOptions(outbox_bytes_max=4 << 20)) as site:
        witness = await site.witness()
        await push(await site.connect(), frame() * 200)
        await site.closed("outbox full")
        assert await witness.is_served()


async def test_all_outboxes_share_a_bound_and_the_fullest_goes() -> None:
    async def answer_at_length(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        for request in requests:
            size = int(request.ext_fields.get("size", "0"))
            connection.reply(request, request.reply(0, body=bytes(size)))

    options = RemotingServerOptions(outbox_total_bytes_max=24 << 20, send_timeout_s=60)
    async with open_site(answer_at_length, options) as site:
        witness = await site.witness()
        modest = await site.connect()
        await push(modest, frame(7, size=4 << 20))
        await trio.sleep(0.1)
        for _ in range(5):
            await push(await site.connect(), frame(size=15 << 20))
        await site.closed("outbox full", 4)
        assert site.server.statistics().outbox_bytes <= 24 << 20
        assert await witness.is_served()
        answer = await modest.receive()
        assert answer is not None
        assert len(answer.body) == 4 << 20


async def test_while_handlers_have_much_in_hand_nobody_is_read() -> None:
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
            with trio.move_on_after(0.7):
                await trio.sleep_forever()
            assert 1 <= len(seen) <= 5, "each megabyte comes in several chunks: only who was not stopped between them"
            go_on.set()
        for peer in peers:
            for _ in range(3):
                with trio.fail_after(TIMEOUT_S):
                    assert await peer.receive() is not None
        assert sum(seen) == 30 << 20
        assert site.server.statistics().handled_bytes == 0


async def test_one_host_can_not_take_all_connections() -> None:
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
async def test_who_says_nothing_makes_way(limit: str) -> None:
    """Strangers that only connect keep nobody out, and nobody who has asked something is closed for another."""
    async with open_site(Recorder(), RemotingServerOptions(evictable_after_s=0.2, **{limit: 4})) as site:
        witness = await site.witness()
        assert await witness.is_served()
        silent = [await site.connect() for _ in range(3)]
        await trio.sleep(0.3)
        newcomers = [await site.witness() for _ in range(3)]
        for newcomer in newcomers:
            assert await newcomer.is_served()
        for peer in silent:
            assert await ended(peer)
        assert await ended(await site.connect())
        assert await witness.is_served()
        assert site.server.statistics().closed == {"evicted": 3}

"""The encrypted stream by itself: a stream as Trio wants them, and what makes it other than trio.SSLStream."""

import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from ha.protocol.remoting import RemotingCommand, encode_command
from ha.remoting import PortTls, RemotingServer
from ha.tls.files import TlsFiles, server_context
from ha.tls.stream import RECORD_SIZE, SEND_SIZE, TlsStream
from ha.transport import EncryptedTransport, SocketTransport, transport_for
from tests.remoting.wire import Recorder
from tests.tls.pki import Pki


def contexts(pki: Pki, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    files = TlsFiles(certificate=str(pki.folder / "server.pem"), key=str(pki.folder / "server.key"))
    client = pki.client()
    client.maximum_version = version
    return server_context(files), client


async def encrypt(
    pair: tuple[trio.abc.Stream, trio.abc.Stream], pki: Pki, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> tuple[TlsStream, TlsStream]:
    """Client and server, shaken."""
    server, client = contexts(pki, version)
    ours, theirs = TlsStream(pair[0], client, host="localhost"), TlsStream(pair[1], server, server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.do_handshake)
        nursery.start_soon(theirs.do_handshake)
    return ours, theirs


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_is_a_stream_as_trio_wants_them(version: ssl.TLSVersion, session_pki: Pki) -> None:
    async def make() -> tuple[TlsStream, TlsStream]:
        return await encrypt(trio.testing.memory_stream_pair(), session_pki, version)

    await trio.testing.check_two_way_stream(make, None)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_ways_at_once_over_a_stream_that_pushes_back(version: ssl.TLSVersion, session_pki: Pki) -> None:
    sides = await encrypt(trio.testing.lockstep_stream_pair(), session_pki, version)
    whole = bytes(range(256)) * 5000
    assert len(whole) > 4 * SEND_SIZE

    async def send(stream: TlsStream) -> None:
        await stream.send_all(whole)

    async def receive(stream: TlsStream) -> None:
        received = b""
        while len(received) < len(whole):
            received += await stream.receive_some()
        assert received == whole

    async with trio.open_nursery() as nursery:
        for side in sides:
            nursery.start_soon(send, side)
            nursery.start_soon(receive, side)


async def test_all_records_that_came_are_one_chunk(session_pki: Pki) -> None:
    ours, theirs = await encrypt(trio.testing.memory_stream_pair(), session_pki)
    for number in range(100):
        await ours.send_all(b"%03d" % number)
    assert await theirs.receive_some() == b"".join(b"%03d" % number for number in range(100))
    await ours.send_all(bytes(2 * RECORD_SIZE))
    assert len(await theirs.receive_some(RECORD_SIZE + 1)) == RECORD_SIZE + 1
    assert len(await theirs.receive_some()) == RECORD_SIZE - 1


async def test_what_came_before_nonsense_is_still_given(session_pki: Pki) -> None:
    below = trio.testing.memory_stream_pair()
    ours, theirs = await encrypt(below, session_pki)
    await ours.send_all(b"good")
    await below[0].send_all(b"\x17\x03\x03\x00\x13" + bytes(19))
    assert await theirs.receive_some() == b"good"
    for _ in range(2):
        with pytest.raises(trio.BrokenResourceError, match=r"(?i)bad record mac|decryption failed"):
            await theirs.receive_some()


async def test_the_other_side_is_told_why_a_handshake_failed(session_pki: Pki) -> None:
    """trio.SSLStream hangs up without a word."""
    server, client = contexts(session_pki)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    below = trio.testing.memory_stream_pair()
    ours, theirs = TlsStream(below[0], client, host="localhost"), TlsStream(below[1], server, server_side=True)
    told: list[str] = []

    async def shake(stream: TlsStream) -> None:
        with pytest.raises(trio.BrokenResourceError) as caught:
            await stream.do_handshake()
        told.append(str(caught.value))

    with trio.fail_after(5):  # without a word the other side would wait
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shake, ours)
            nursery.start_soon(shake, theirs)
    assert any("alert protocol version" in text.lower().replace("_", " ") for text in told)


async def test_a_cut_connection_ends_like_a_closed_one(session_pki: Pki) -> None:
    for is_proper in (True, False):
        below = trio.testing.memory_stream_pair()
        ours, theirs = await encrypt(below, session_pki)
        await ours.send_all(b"last words")
        await (ours if is_proper else below[0]).aclose()
        assert await theirs.receive_some() == b"last words"
        assert await theirs.receive_some() == b""


# Over TCP, moved with the bare system calls


@asynccontextmanager
async def tcp_pair(pki: Pki) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    ours, theirs = (trio.SocketStream(each) for each in trio.socket.socketpair())
    async with ours, theirs:
        yield await encrypt((ours, theirs), pki)


async def test_a_socket_is_read_and_written_with_system_calls(session_pki: Pki) -> None:
    async with tcp_pair(session_pki) as (ours, theirs):
        moved = transport_for(ours, 65_536)
        assert isinstance(moved, EncryptedTransport)
        assert moved.send_nowait(b"hello") == 5
        assert await theirs.receive_some() == b"hello"
        await theirs.send_all(b"hello, too")
        assert await moved.receive() == b"hello, too"
        assert isinstance(transport_for(ours.transport_stream, 65_536), SocketTransport)


async def test_what_the_system_does_not_take_at_once_is_sent_once(session_pki: Pki) -> None:
    """The peer doesn't read: sends fill the socket until one is taken in part, and the writer has to end it."""
    async with tcp_pair(session_pki) as (ours, theirs):
        moved = transport_for(ours, 65_536)
        sent, number = [], 0
        while True:
            data = b"%08d" % number * 10_000
            number += 1
            sent.append(data)
            if not moved.send_nowait(data):
                break
        assert moved.send_nowait(b"not now") == 0
        received = b""

        async def receive() -> None:
            nonlocal received
            while len(received) < sum(map(len, sent)) + 4:
                received += await theirs.receive_some()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await moved.send_all(memoryview(sent[-1]))
            if not moved.send_nowait(b"last"):
                await moved.send_all(b"last")
        assert received == b"".join(sent) + b"last"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
async def test_a_client_that_changes_keys_is_answered(session_pki: Pki) -> None:
    """Its reader has to answer a key update (TLS 1.3) while its writer may be sending."""
    server, _ = contexts(session_pki)

    async def secure(stream: trio.abc.Stream, first: bytes) -> trio.abc.Stream:
        secured = TlsStream(stream, server, server_side=True, received=first)
        await secured.do_handshake()
        return secured

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        tls = PortTls(secure=secure, is_required=True)
        await nursery.start(RemotingServer(Recorder(), tls=tls).serve, listeners)
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-CAfile", session_pki.trust, "-tls1_3"]
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            shown = b""
            with trio.fail_after(20):
                for number in range(3):
                    frame = encode_command(RemotingCommand(10, number, body=b"answer number %d;" % number))
                    await process.stdin.send_all(b"K\n")
                    while b"KEYUPDATE" not in shown:
                        shown += await process.stdout.receive_some()
                    shown = b""
                    await process.stdin.send_all(frame)
                    while b"answer number %d;" % number not in shown:
                        shown += await process.stdout.receive_some()
        finally:
            process.kill()
            await process.wait()
            await process.stdin.aclose()
            await process.stdout.aclose()
        nursery.cancel_scope.cancel()

"""A remoting port in each mode, and every kind of client that may come to it."""

from __future__ import annotations

import logging
import ssl

import pytest
import trio
import trio.testing

from ha.protocol.remoting import RemotingCommand, encode_command
from ha.remoting import RemotingServerOptions
from ha.tls.files import TlsFiles, client_context
from tests.remoting.wire import Peer, request
from tests.tls.pki import Pki
from tests.tls.ports import is_served, open_port

NONE, OPTIONAL, REQUIRED = ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED

SERVED = {
    # mode         wanted    plain  TLS    with certificate  with a stranger's
    ("disabled", NONE): (True, False, False, False),
    ("permissive", NONE): (True, True, True, True),
    ("permissive", OPTIONAL): (True, True, True, False),
    ("enforcing", NONE): (False, True, True, True),
    ("enforcing", OPTIONAL): (False, True, True, False),
    ("enforcing", REQUIRED): (False, False, True, False),
}
"""RocketMQ's HandshakeHandler and netty's ClientAuth. A certificate that the server never asks for is never shown."""


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("strangers"), "strangers")


def server_files(pki: Pki) -> TlsFiles:
    return TlsFiles(certificate=str(pki.folder / "server.pem"), key=str(pki.folder / "server.key"), trust=pki.trust)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(("mode", "wanted"), SERVED)
async def test_who_is_served(
    mode: str, wanted: ssl.VerifyMode, version: ssl.TLSVersion, session_pki: Pki, strangers: Pki, autojump_clock: object
) -> None:
    certificate, key = strangers.issue("stranger")
    astray = TlsFiles(certificate=certificate, key=key, trust=session_pki.trust)
    clients = (session_pki.client(), session_pki.client("friend"), client_context(astray))
    async with open_port(mode, server_files(session_pki), client_certificates=wanted) as port:
        served = [await is_served(Peer(port.connect()))]
        for context in clients:
            context.maximum_version = version
            try:
                served.append(await is_served(await port.connect_tls(context)))
            except trio.BrokenResourceError:
                served.append(False)
        assert tuple(served) == SERVED[mode, wanted]


async def test_plain_and_encrypted_clients_talk_at_the_same_time(session_pki: Pki, autojump_clock: object) -> None:
    async with open_port("permissive", server_files(session_pki)) as port:
        plain, secret = Peer(port.connect()), await port.connect_tls(session_pki.client())
        for number in range(20):
            assert await is_served(plain, b"plain %d" % number)
            assert await is_served(secret, b"x" * (number * 10_000 + 1))


async def test_many_pipelined_requests_are_answered_in_order(session_pki: Pki, autojump_clock: object) -> None:
    async with open_port("enforcing", server_files(session_pki)) as port:
        peer = await port.connect_tls(session_pki.client())
        await peer.send(*(request(opaque, b"x" * opaque) for opaque in range(1, 1000)))
        for opaque in range(1, 1000):
            answer = await peer.receive()
            assert answer is not None
            assert (answer.opaque, len(answer.body)) == (opaque, opaque)


async def test_a_client_that_wants_another_server_hangs_up(session_pki: Pki, autojump_clock: object) -> None:
    async with open_port("enforcing", server_files(session_pki)) as port:
        with pytest.raises(trio.BrokenResourceError) as caught:
            await port.connect_tls(session_pki.client(), host="elsewhere.example")
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)


# Strangers: each ends its own connection, in bounded time, with a line in the log, and another client notices nothing.


def hello(pki: Pki) -> bytes:
    """A client's first flight."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = pki.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        ours.do_handshake()
    return outgoing.read()


OLD_HELLO = bytes.fromhex("16030100310100002d0302") + bytes(32) + bytes.fromhex("000006c013c014002f0100")
"""TLS 1.1 as the newest version that the client knows, and the ciphers of its time."""

STRANGERS = {
    # what they send, then the mode, when they are gone (s), and why as the log has it
    "plain bytes": (b"GET / HTTP/1.1\r\n\r\n", "enforcing", 0, "no TLS, which this port requires"),
    "TLS where there is none": (None, "disabled", 0, "TLS handshake on a port that speaks plain remoting"),
    "one byte": (b"\x16", "enforcing", 10, "not completed within 10 s"),
    "one byte, permissive": (b"\x16", "permissive", 10, "not completed within 10 s"),
    "half a hello": (100, "enforcing", 10, "not completed within 10 s"),
    "hello, and silence": (None, "enforcing", 10, "not completed within 10 s"),
    "a record of nonsense": (b"\x16\x03\x01\x00\x05hello", "enforcing", 0, "TLS handshake failed"),
    "SSL 3": (b"\x16\x03\x00\x00\x05\x01\x00\x00\x01\x00", "enforcing", 0, "TLS handshake failed"),
    "TLS 1.1": (OLD_HELLO, "enforcing", 0, "unsupported protocol"),
    "a huge record": (b"\x16\x03\x01\xff\xff" + bytes(70_000), "enforcing", 0, "TLS handshake failed"),
    "nothing": (b"", "enforcing", 120, None),
}


@pytest.mark.parametrize("name", STRANGERS)
async def test_strangers(
    name: str, session_pki: Pki, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    what, mode, gone_after_s, reason = STRANGERS[name]
    first = hello(session_pki)
    sent = first if what is None else first[:what] if isinstance(what, int) else what
    async with open_port(mode, server_files(session_pki)) as port:
        other = Peer(port.connect()) if mode == "disabled" else await port.connect_tls(session_pki.client())
        assert await is_served(other)
        stranger, began = port.connect(), trio.current_time()
        if sent:
            await stranger.send_all(sent)
        with caplog.at_level(logging.WARNING):
            while True:  # a hello is answered first
                try:
                    if not await stranger.receive_some():
                        break
                except trio.BrokenResourceError:
                    break
        assert trio.current_time() - began == pytest.approx(gone_after_s)
        await trio.testing.wait_all_tasks_blocked()
        if reason is not None:
            (line,) = (record.getMessage() for record in caplog.records if "connection_closed" in record.getMessage())
            assert reason in line
        assert gone_after_s >= 120 or await is_served(other)
        assert len(port.server.connections) == (gone_after_s < 120)
        assert port.handshakes.statistics().under_way == 0


async def test_a_hello_byte_by_byte_is_a_handshake_like_any_other(session_pki: Pki, autojump_clock: object) -> None:
    class Slow(trio.abc.Stream):
        def __init__(self, stream: trio.abc.Stream) -> None:
            self.stream = stream

        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            for byte in bytes(data):
                await self.stream.send_all(bytes([byte]))
                await trio.sleep(0.001)

        async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
            return await self.stream.receive_some(max_bytes)

        async def wait_send_all_might_not_block(self) -> None:
            await self.stream.wait_send_all_might_not_block()

        async def aclose(self) -> None:
            await self.stream.aclose()

    async with open_port("permissive", server_files(session_pki)) as port:
        context = session_pki.client("slowly")
        peer = Peer(trio.SSLStream(Slow(port.connect()), context, server_hostname="localhost", https_compatible=True))
        assert await is_served(peer)


async def test_a_stranger_who_comes_back_does_not_fill_the_log(
    session_pki: Pki, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_port("enforcing", server_files(session_pki)) as port:
        for _ in range(3):
            for _ in range(100):
                assert not await is_served(Peer(port.connect()))
            await trio.sleep(60)
        times = [r.getMessage().rpartition(" ")[2] for r in caplog.records if "connection_closed" in r.getMessage()]
        assert times == ["times=1", "times=100", "times=100"]
        assert port.closed == {"protocol error": 300}


async def test_a_handshake_too_many_ends_the_oldest(
    session_pki: Pki, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers who hold their handshakes open keep nobody out."""
    async with open_port("permissive", server_files(session_pki), count_max=3) as port:
        waiting = [port.connect() for _ in range(3)]
        for stream in waiting:
            await stream.send_all(b"\x16")
            await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        for _ in range(2):
            assert await is_served(await port.connect_tls(session_pki.client()))
            assert await is_served(Peer(port.connect()))
        assert trio.current_time() == began
        assert await waiting[0].receive_some() == b""
        assert port.handshakes.statistics().refused == 1
        assert port.handshakes.statistics().under_way == 2
        full = [r.getMessage() for r in caplog.records if "tls.handshakes_full" in r.getMessage()]
        assert full == ['tls.handshakes_full handshakes=3 times=1 hint="each new one cancels the oldest"']
        assert "cancelled for a newer handshake" in caplog.text
        assert len(await waiting[1].receive_some()) == 0
        assert trio.current_time() - began == 10


async def test_too_many_handshakes_again_and_again_do_not_fill_the_log(
    session_pki: Pki, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_port("permissive", server_files(session_pki), count_max=3) as port:
        for _ in range(2):
            for _ in range(10):
                streams = [port.connect() for _ in range(4)]
                for stream in streams:
                    await stream.send_all(b"\x16")
                    await trio.testing.wait_all_tasks_blocked()
                for stream in streams:
                    await stream.aclose()
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(60)
        full = [r.getMessage().split()[2] for r in caplog.records if "tls.handshakes_full" in r.getMessage()]
        assert full == ["times=1", "times=10"]


async def test_strangers_count_as_connections(session_pki: Pki, autojump_clock: object) -> None:
    options = RemotingServerOptions(connections_max=4)
    async with open_port("enforcing", server_files(session_pki), options=options) as port:
        for _ in range(4):
            await port.connect().send_all(b"\x16")
        await trio.testing.wait_all_tasks_blocked()
        assert not await is_served(Peer(port.connect()))
        await trio.sleep(11)
        assert await is_served(await port.connect_tls(session_pki.client()))


async def test_nobody_resumes_a_session(session_pki: Pki, autojump_clock: object) -> None:
    """It would skip the check of a certificate that is no longer trusted."""
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        async with open_port("enforcing", server_files(session_pki)) as port:
            context = session_pki.client()
            context.maximum_version = version
            first = await port.connect_tls(context)
            assert await is_served(first)
            assert isinstance(first.stream, trio.SSLStream)
            assert not (first.stream.session and first.stream.session.has_ticket)
            if version is ssl.TLSVersion.TLSv1_3:
                continue
            second = trio.SSLStream(port.connect(), context, server_hostname="localhost", https_compatible=True)
            second.session = first.stream.session
            assert await is_served(Peer(second))


def test_the_first_byte_is_no_others() -> None:
    """A frame begins with its length, at most 16 MiB; a slave's report with an offset, or -1."""
    assert encode_command(RemotingCommand(10, 1, body=bytes(16_000_000)))[0] == 0
    assert (2**56 - 1).to_bytes(8, "big", signed=True)[0] == 0
    assert (-1).to_bytes(8, "big", signed=True)[0] == 0xFF

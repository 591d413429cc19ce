"""haSharedSecret between every kind of master and slave, and against other peers.

Authorized slaves follow; others get no byte of the log, both sides log why, and no side hangs."""

import itertools
import logging
import random
from collections.abc import Iterator

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from ha.protocol.ha_handshake import CHALLENGE_BEGIN, HELLO, HandshakeKey, encode_handshake_frame
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.handshake import HandshakeOptions
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason
from ha.replication.statistics import Condition
from tests.replication.link import Link, following
from tests.replication.master_side import serve_as_rocketmq
from tests.replication.memory_log import MemoryLog

CONTENT = random.Random(5).randbytes(9000)
A, B = "a secret of one cluster", "a secret of another one"


def options_with(secret: str | None, seed: int = 1) -> HAOptions:
    """`secret` None: haSharedSecret is not set."""
    if secret is None:
        return HAOptions()
    return HAOptions(handshake=HandshakeOptions(key=HandshakeKey(secret), random_bytes=random.Random(seed).randbytes))


@pytest.mark.parametrize(
    ("masters", "slaves", "condition", "detail", "closed"),
    [
        (None, None, Condition.CONNECTED, "", None),
        (A, A, Condition.CONNECTED, "", None),
        (A, B, Condition.NOT_AUTHENTICATED, "its own is another one", "another one"),
        (A, None, Condition.NOT_AUTHENTICATED, "demands haSharedSecret", "here it is set"),
        (None, A, Condition.NOT_AUTHENTICATED, "the master has none", None),
    ],
)
@pytest.mark.parametrize("held", [0, 5000])
async def test_every_combination_of_master_and_slave(
    autojump_clock: MockClock,
    masters: str | None,
    slaves: str | None,
    condition: Condition,
    detail: str,
    closed: str | None,
    held: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    master, slave = MemoryLog(CONTENT), MemoryLog(CONTENT[:held])
    service = HAService(master, options_with(masters, 1))
    async with following(service, slave, options_with(slaves, 2)) as (client, link):
        await trio.sleep(12)
        found = client.statistics()
        if condition is Condition.CONNECTED:
            assert found.condition is condition
            assert slave.content[-100:] == CONTENT[-100:]
        else:
            assert bytes(slave.content) == CONTENT[:held]
            assert found.condition is condition
            assert detail in found.detail
            assert service.acknowledged() == []
            # A master that closes without an answer may have crashed: the slave retries once before it knows why.
            told_at = 1 if (masters, slaves) == (A, None) else 0
            pauses = [after - before for before, after in itertools.pairwise(link.times)]
            assert pauses[told_at:] == pytest.approx([5.0, 5.0])  # no loop
            if closed is not None:
                assert service.statistics().closed_counts[CloseReason.NOT_AUTHENTICATED] == len(link.times)
                reasons = [r.getMessage() for r in caplog.records if "reason=not_authenticated" in r.getMessage()]
                assert reasons
                assert "haSharedSecret" in reasons[0]
        assert not any(secret in caplog.text for secret in (A, B))


async def test_slave_with_a_secret_does_not_follow_rocketmq(autojump_clock: MockClock) -> None:
    slave = MemoryLog()
    async with trio.open_nursery() as nursery:

        async def connect(address: str) -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            ours, theirs = memory_stream_pair()
            nursery.start_soon(serve_as_rocketmq, theirs, MemoryLog(CONTENT))
            return ours

        client = HAClient(slave, options_with(A), connect)
        nursery.start_soon(client.run)
        client.set_master("master:1")
        await trio.sleep(11)
        assert client.statistics().condition is Condition.NOT_AUTHENTICATED
        assert "RocketMQ's masters can't" in client.statistics().detail
        assert slave.content == b""
        nursery.cancel_scope.cancel()


class Stranger:
    """Talks to a master with secret A, and records everything received."""

    def __init__(self, nursery: trio.Nursery, log: MemoryLog | None = None, seed: int = 1) -> None:
        self.service = HAService(log or MemoryLog(CONTENT), options_with(A, seed))
        self.stream, theirs = memory_stream_pair()
        self.heard = b""
        self.reason: CloseReason | None = None
        self.closed_at = -1.0

        async def serve() -> None:
            self.reason = await self.service.handle(theirs, "10.6.6.6:666")
            self.closed_at = trio.current_time()

        nursery.start_soon(serve)
        nursery.start_soon(self._hear)

    async def _hear(self) -> None:
        while chunk := await self.stream.receive_some():
            self.heard += chunk

    async def say(self, chunk: bytes) -> None:
        try:
            await self.stream.send_all(chunk)
        except trio.BrokenResourceError:
            pass
        await wait_all_tasks_blocked()


@settings(max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=90), min_size=1, max_size=5), st.booleans())
@example([HELLO, b"\0" * 64, b"\0" * 8], False)
def test_unauthenticated_peer_gets_at_most_a_challenge(chunks: list[bytes], begins_well: bool) -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            stranger = Stranger(nursery)
            for chunk in [HELLO, *chunks] if begins_well else chunks:
                await stranger.say(chunk)
            await trio.sleep(11)
            assert len(stranger.heard) in (0, 44)
            assert CONTENT[:16] not in stranger.heard
            assert stranger.reason is CloseReason.NOT_AUTHENTICATED
            assert stranger.service.statistics().push2_slave_max_offset == 0

    logging.disable(logging.CRITICAL)
    try:
        trio.run(scenario, clock=MockClock(autojump_threshold=0))
    finally:
        logging.disable(logging.NOTSET)


def words() -> Iterator[bytes]:
    """First bytes of unauthenticated peers."""
    yield b"\0" * 8  # RocketMQ's slave with an empty log
    yield (5000).to_bytes(8, "big")  # and one that goes on
    yield b"\0" * 80
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    yield CHALLENGE_BEGIN + b"\0" * 36
    yield b"\xff" * 7 + b"\xfe"


@pytest.mark.parametrize("opening", list(words()), ids=lambda word: word[:12].hex())
async def test_peer_without_a_handshake_gets_nothing(autojump_clock: MockClock, opening: bytes) -> None:
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        stranger = Stranger(nursery)
        await stranger.say(opening)
        assert stranger.heard == b""
        assert stranger.reason is CloseReason.NOT_AUTHENTICATED
        assert stranger.closed_at == began  # at once, not at some deadline


@pytest.mark.parametrize(
    "answer",
    [b"\0" * 64, b"\xff" * 64, HELLO * 8, (100).to_bytes(8, "big") * 8],
    ids=["zeros", "ff", "hello", "report"],
)
async def test_wrong_answer_gets_only_the_challenge(autojump_clock: MockClock, answer: bytes) -> None:
    async with trio.open_nursery() as nursery:
        stranger = Stranger(nursery)
        await stranger.say(HELLO)
        assert len(stranger.heard) == 44
        await stranger.say(answer)
        assert len(stranger.heard) == 44
        assert stranger.reason is CloseReason.NOT_AUTHENTICATED
        assert stranger.service.statistics().closed_counts == {CloseReason.NOT_AUTHENTICATED: 1}


async def test_silent_or_slow_peer_is_closed_after_ten_seconds(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        silent, dripping = Stranger(nursery), Stranger(nursery)
        for _ in range(12):
            await dripping.say(b"\xff")
            await trio.sleep(1.5)
        assert (silent.closed_at - began, dripping.closed_at - began) == (10, 10)
        assert silent.heard == b""
        assert silent.reason is dripping.reason is CloseReason.NOT_AUTHENTICATED


class Tap(trio.abc.Stream):
    """Records both directions."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.sent, self.received = b"", b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        chunk = await self.stream.receive_some(max_bytes)
        self.received += bytes(chunk)
        return chunk

    async def aclose(self) -> None:
        await self.stream.aclose()


async def overheard(nursery: trio.Nursery) -> Tap:
    """The connection of a valid slave up to the first bytes of the log, recorded at the slave."""
    service = HAService(MemoryLog(CONTENT), options_with(A, 1))
    taps: list[Tap] = []
    link = Link(service, nursery)

    async def connect(address: str) -> trio.abc.Stream:
        taps.append(Tap(await link.connect(address)))
        return taps[0]

    client = HAClient(MemoryLog(), options_with(A, 2), connect)
    nursery.start_soon(client.run)
    client.set_master("master:1")
    await trio.sleep(1)
    [tap] = taps
    assert tap.received[44:52] == CHALLENGE_BEGIN
    assert CONTENT[8192:] in tap.received
    return tap


async def test_recorded_handshake_can_not_be_replayed(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        tap = await overheard(nursery)
        again = Stranger(nursery, seed=7)
        await again.say(HELLO)
        await again.say(tap.sent[8:])
        assert len(again.heard) == 44
        assert again.reason is CloseReason.NOT_AUTHENTICATED
        # The recording works at a master that repeats its nonce: above, the old nonce was refused.
        same = Stranger(nursery, seed=1)
        await same.say(HELLO)
        await same.say(tap.sent[8 : 8 + 64 + 8])  # and the first report, a request of 0
        assert CONTENT[8192:] in same.heard
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("trick", ["replay", "reflect", "nothing", "own secret"])
async def test_slave_rejects_a_false_master(autojump_clock: MockClock, trick: str) -> None:
    async with trio.open_nursery() as nursery:
        tap = await overheard(nursery)
        slave = MemoryLog()
        theirs: list[trio.abc.Stream] = []

        async def connect(address: str) -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            ours, other = memory_stream_pair()
            theirs.append(other)
            nursery.start_soon(deceive, other)
            return ours

        async def deceive(stream: trio.abc.Stream) -> None:
            assert await stream.receive_some(8) == HELLO
            nonce = tap.received[12:44]
            await stream.send_all(encode_handshake_frame(nonce))
            answer = bytes(await stream.receive_some(64))
            proof = {
                "replay": tap.received[56:88],
                "reflect": answer[32:],
                "nothing": bytes(32),
                "own secret": HandshakeKey(B).master_proof(nonce, answer[:32]),
            }[trick]
            await stream.send_all(encode_handshake_frame(proof) + tap.received[88:])

        client = HAClient(slave, options_with(A, 9), connect)
        nursery.start_soon(client.run)
        client.set_master("master:1")
        await trio.sleep(1)
        assert client.statistics().condition is Condition.NOT_AUTHENTICATED
        assert "does not know haSharedSecret" in client.statistics().detail
        assert slave.content == b""
        assert await theirs[0].receive_some() == b""
        nursery.cancel_scope.cancel()


async def test_master_that_stops_in_the_handshake_is_given_up(autojump_clock: MockClock) -> None:
    for count in (0, 11, 12, 43, 44, 60):
        async with trio.open_nursery() as nursery:

            async def connect(address: str, nursery: trio.Nursery = nursery, count: int = count) -> trio.abc.Stream:
                await trio.lowlevel.checkpoint()
                ours, other = memory_stream_pair()
                nursery.start_soon(other.send_all, (encode_handshake_frame(bytes(32)) * 2)[:count])
                return ours

            client = HAClient(MemoryLog(), options_with(A), connect)
            nursery.start_soon(client.run)
            client.set_master("master:1")
            await trio.sleep(9.9)
            assert client.statistics().condition is not Condition.NOT_AUTHENTICATED
            await trio.sleep(0.2)
            assert client.statistics().condition is Condition.NOT_AUTHENTICATED
            nursery.cancel_scope.cancel()


def test_secret_is_not_shown() -> None:
    options = options_with(A)
    assert A not in repr(options)
    assert A not in repr(options.handshake)


async def test_unauthenticated_peers_do_not_fill_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    service = HAService(MemoryLog(CONTENT), options_with(A))
    for number in range(100):
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.handle, theirs, f"127.0.0.1:{40_000 + number}")
            await ours.send_all(bytes(8))
    assert service.statistics().closed_counts == {CloseReason.NOT_AUTHENTICATED: 100}
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1


async def test_empty_slave_recovers_after_a_refused_handshake(autojump_clock: MockClock) -> None:
    """Its master closes for another reason: the slave asks once, learns nothing, and follows when it can."""
    master, slave = MemoryLog(CONTENT), MemoryLog()
    service = HAService(master)
    said: list[int] = []
    async with trio.open_nursery() as nursery:

        async def hang_up(stream: trio.abc.Stream, at_once: bool) -> None:
            said.append(int.from_bytes(await stream.receive_some(8), "big", signed=True))
            if not at_once:
                await trio.sleep(3)
            await stream.aclose()

        async def connect(address: str) -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            ours, theirs = memory_stream_pair()
            if len(said) < 4:
                nursery.start_soon(hang_up, theirs, len(said) != 1)
            else:
                nursery.start_soon(service.handle, theirs, "127.0.0.1:1")
            return ours

        client = HAClient(slave, HAOptions(), connect)
        nursery.start_soon(client.run)
        client.set_master("master:1")
        await trio.sleep(30)
        assert said == [0, -1, 0, 0]  # the second connection asks, hears nothing for a second, and is given up
        assert slave.content == CONTENT[8192:]
        nursery.cancel_scope.cancel()

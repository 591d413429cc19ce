"""Fetching a range from a halog or RocketMQ peer that is sound, damaged, empty or faulty."""

import errno
from contextlib import suppress

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ha.errors import OffsetGone, RemoteProtocolError
from ha.protocol.ha_frame import encode_transfer_header
from ha.replication.ha_service import HAService
from ha.replication.heal_fetch import FETCH_S_MAX, SILENCE_S_MAX, Fetched, HealFetchError, fetch_range
from ha.replication.healer import ATTEMPTS, RETRY_S, Healer
from ha.replication.options import HAOptions
from ha.store.damage import DamagedRange, DamageRegistry
from tests.replication.master_side import MasterSide, serve_as_rocketmq
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog
from tests.replication.slave_side import SlaveSide, connected

CONTENT = bytes(n * 7 % 251 for n in range(3 * SEGMENT_SIZE))
LOG = b"\0" + CONTENT[1:]
"""Byte 0 is 0, as in every log that starts with a record."""


class Peer:
    """A peer controlled by the test: `connect` gives the fetching side a stream to it."""

    def __init__(self, nursery: trio.Nursery, service: HAService | None = None) -> None:
        self._nursery = nursery
        self.service = service
        self.streams: list[trio.abc.Stream] = []

    async def connect(self, address: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_stream_pair()
        self.streams.append(ours)
        if self.service is not None:
            self._nursery.start_soon(self.service.handle, ours, "10.0.0.9:4711")
        return theirs


async def fetch(peer: Peer, begin: int, end: int) -> Fetched:
    return await fetch_range("peer:1", begin, end, connect=peer.connect, options=HAOptions(), segment_size=SEGMENT_SIZE)


@pytest.mark.parametrize(("begin", "end"), [(0, 100), (0, 1), (1, 2), (SEGMENT_SIZE, 2 * SEGMENT_SIZE), (5000, 5001)])
async def test_a_range_of_a_halog_peer(begin: int, end: int, nursery: trio.Nursery) -> None:
    began = trio.current_time()
    peer = Peer(nursery, HAService(MemoryLog(LOG)))
    assert await fetch(peer, begin, end) == Fetched(LOG[begin:end], "")
    assert trio.current_time() - began < 1


async def test_a_reader_is_no_slave(nursery: trio.Nursery) -> None:
    """Neither for acknowledgements nor retention nor explanations, and a slave on the same host is not affected."""
    log = MemoryLog(LOG)
    service = HAService(log)
    slave = SlaveSide(service, "10.0.0.9:40000")
    present = trio.CancelScope()

    async def run_slave() -> None:
        with present:
            async with trio.open_nursery() as inner:
                slave.start(inner)

    nursery.start_soon(run_slave)
    await wait_all_tasks_blocked()
    await slave.report(len(LOG))
    await wait_all_tasks_blocked()
    reader, theirs = memory_stream_pair()
    nursery.start_soon(service.handle, theirs, "10.0.0.9:40001")
    await reader.send_all(b"\xff" * 16)
    await reader.send_all((100).to_bytes(8, "big"))
    await wait_all_tasks_blocked()
    assert service.connection_count == 2
    assert service.acknowledged() == [len(LOG)]
    assert service.lowest_needed_offset() == len(LOG)
    assert len(service.statistics().slaves) == 1
    assert service.explain(len(LOG)) == ""
    present.cancel()
    await wait_all_tasks_blocked()
    assert service.acknowledged() == []
    assert not service.is_slave_ok(len(LOG))
    assert service.explain(len(LOG)).startswith("no slave is connected")
    await reader.aclose()
    await wait_all_tasks_blocked()
    assert service.connection_count == 0
    assert service.lowest_needed_offset() == len(LOG), "where the slave was, not where the reader began"


@pytest.mark.parametrize("begin", [0, 1, 300, SEGMENT_SIZE])
async def test_a_range_of_a_rocketmq_peer(begin: int, nursery: trio.Nursery) -> None:
    """It doesn't answer the question; the one report is for bytes that are held here anyway."""
    master = MasterSide(nursery)
    log = MemoryLog(LOG)

    async def connect(address: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_stream_pair()
        nursery.start_soon(serve_as_rocketmq, ours, log)
        return theirs

    async def spy(address: str) -> trio.abc.Stream:
        return await master.connect(address)

    got = await fetch_range(
        "peer:1", begin, begin + 1000, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE
    )
    assert got == Fetched(LOG[begin : begin + 1000], "")
    with pytest.raises(HealFetchError):
        await fetch_range("peer:1", begin, begin + 9, connect=spy, options=HAOptions(), segment_size=SEGMENT_SIZE)
    assert master.values == [-1, -1, max(begin, 1)]


async def test_a_rocketmq_peer_that_has_only_the_start_of_a_range(nursery: trio.Nursery) -> None:
    """Only silence shows that no more comes: its heartbeats are 5 s apart."""

    async def connect(address: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_stream_pair()
        nursery.start_soon(serve_as_rocketmq, ours, MemoryLog(LOG))
        return theirs

    begin = len(LOG) - 300
    got = await fetch_range(
        "peer:1", begin, begin + 1000, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE
    )
    assert got.raw == LOG[begin:]
    assert "sent 300 of 1000 bytes in time" in got.trouble or "has no bytes" in got.trouble


async def test_a_distant_halog_peer_has_time_to_answer(nursery: trio.Nursery) -> None:
    """Connecting takes a round trip of 1.5 s, and so does the answer, which was taken for the requested bytes."""

    async def answer(stream: trio.abc.Stream) -> None:
        await trio.sleep(1.5)
        await stream.send_all(encode_transfer_header(0, 0) + encode_transfer_header(len(LOG), 0))
        await trio.sleep(1.5)
        await stream.send_all(encode_transfer_header(100, 10) + LOG[100:110])

    async def connect(address: str) -> trio.abc.Stream:
        await trio.sleep(1.5)
        ours, theirs = memory_stream_pair()
        nursery.start_soon(answer, ours)
        return theirs

    got = await fetch_range("peer:1", 100, 110, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    assert got == Fetched(LOG[100:110], "")


async def test_a_slow_peer_is_not_silent(nursery: trio.Nursery) -> None:
    """It takes 49 s, and closes a connection on which it receives nothing for haHousekeepingInterval, 20 s."""
    log = MemoryLog(bytes(60_000), segment_size=1 << 16)
    peer = Peer(nursery, HAService(log, HAOptions(transfer_bytes_per_s_max=1024)))
    got = await fetch_range(
        "peer:1", 100, 50_100, connect=peer.connect, options=HAOptions(), segment_size=log.segment_size
    )
    assert got == Fetched(bytes(50_000), "")


async def test_ranges_that_a_peer_refuses(nursery: trio.Nursery) -> None:
    log = MemoryLog(LOG[SEGMENT_SIZE:], first_offset=SEGMENT_SIZE, hot_bytes=0)
    peer = Peer(nursery, HAService(log))
    with pytest.raises(HealFetchError, match=rf"holds \[{SEGMENT_SIZE}, {len(LOG)}\)"):
        await fetch(peer, 100, 200)
    with pytest.raises(HealFetchError, match="holds"):
        await fetch(peer, len(LOG), len(LOG) + 10)
    got = await fetch(peer, len(LOG) - 10, len(LOG) + 10)
    assert got == Fetched(LOG[-10:], f"peer:1 holds [{SEGMENT_SIZE}, {len(LOG)})")
    log.damage(SEGMENT_SIZE + 50, SEGMENT_SIZE + 60)
    with pytest.raises(HealFetchError, match="damaged there, too"):
        await fetch(peer, SEGMENT_SIZE + 50, SEGMENT_SIZE + 100)
    got = await fetch(peer, SEGMENT_SIZE, SEGMENT_SIZE + 100)
    assert got.raw == LOG[SEGMENT_SIZE : SEGMENT_SIZE + 50]
    assert "damaged there, too" in got.trouble
    assert await fetch(peer, SEGMENT_SIZE, SEGMENT_SIZE + 50) == Fetched(got.raw, "")


async def test_faulty_peers(nursery: trio.Nursery) -> None:
    peer = Peer(nursery)
    began = trio.current_time()
    with pytest.raises(HealFetchError, match="sent 0 of 10"):
        await fetch(peer, 100, 110)
    assert trio.current_time() - began == HAOptions().range_answer_timeout_s + SILENCE_S_MAX

    async def fetch_with(raw: bytes) -> None:
        async with trio.open_nursery() as inner:

            async def answer() -> None:
                await wait_all_tasks_blocked()
                await peer.streams[-1].send_all(raw)

            inner.start_soon(answer)
            await fetch(peer, 100, 110)

    for raw in (encode_transfer_header(100, 10) + bytes(10), encode_transfer_header(90, 0) * 2 + b"\xff" * 12):
        with pytest.raises(ExceptionGroup) as group:
            await fetch_with(raw)
        assert isinstance(group.value.exceptions[0], HealFetchError)


class Reset(trio.abc.Stream):
    """A stream that delivers `chunks`, then raises `error`."""

    def __init__(self, chunks: list[bytes], error: Exception) -> None:
        self._chunks = chunks
        self._error = error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._chunks:
            raise self._error
        return self._chunks.pop(0)

    async def send_all(self, data: object) -> None:
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    "error", [ConnectionResetError(errno.ECONNRESET, "reset"), trio.BrokenResourceError(), RemoteProtocolError("reset")]
)
async def test_what_came_before_a_reset_is_used(error: Exception) -> None:
    range_ = encode_transfer_header(0, 0) + encode_transfer_header(len(LOG), 0)
    header = encode_transfer_header(100, 2000)

    async def fetch_from(*chunks: bytes) -> Fetched:
        async def connect(address: str) -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            return Reset([range_, *chunks], error)

        return await fetch_range("peer:1", 100, 2100, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE)

    got = await fetch_from(header + LOG[100:1100])
    assert got.raw == LOG[100:1100]
    assert "reset" in got.trouble or "the connection broke" in got.trouble
    with pytest.raises(HealFetchError, match=r"peer:1: (.*reset|the connection broke)"):
        await fetch_from(header)


async def test_bytes_before_a_wrong_frame_are_used(nursery: trio.Nursery) -> None:
    async def answer(stream: trio.abc.Stream) -> None:
        await stream.send_all(encode_transfer_header(0, 0) + encode_transfer_header(len(LOG), 0))
        await wait_all_tasks_blocked()
        await stream.send_all(encode_transfer_header(100, 10) + LOG[100:110] + encode_transfer_header(500, 10))

    async def connect(address: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_stream_pair()
        nursery.start_soon(answer, ours)
        return theirs

    got = await fetch_range("peer:1", 100, 200, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    assert got == Fetched(LOG[100:110], "peer:1: it sends from 500, not 110")


async def test_a_slave_gets_heartbeats_while_the_range_is_damaged() -> None:
    log = MemoryLog(LOG, hot_bytes=0)
    log.damage(300, 400)
    service = HAService(log, HAOptions(housekeeping_interval_s=60))
    async with connected(service, 1) as slave:
        await trio.sleep(12)
        assert [(head[1], head[2]) for head in slave.heads] == [(1, 299), (300, 0), (300, 0)]
        assert "waits at 300: bytes [300, 400) of the log are damaged" in service.explain(len(LOG) + (1 << 30))
        log.heal(before=350)
        await wait_all_tasks_blocked()
        assert b"".join(body for _, _, body in slave.frames) == LOG[1:350]
        assert "waits at 350" in service.explain(len(LOG) + (1 << 30))
        log.heal()
        await wait_all_tasks_blocked()
        assert b"".join(body for _, _, body in slave.frames) == LOG[1:]


class DamagedLog:
    """A store for the healer: bytes with a damaged range; `right` proves fetched ones."""

    def __init__(self, content: bytes, begin: int, end: int) -> None:
        self.damage = DamageRegistry(lambda: 1)
        self.right = content
        self.held = bytearray(content)
        self.held[begin:end] = bytes(end - begin)
        self.writes: list[tuple[int, int]] = []
        self.known_to = begin
        """Up to here bytes are proven without what follows"""
        self.damage.add(begin, end, file="f", reason="r", found_by="scrub", by_checksum=True)

    async def is_sound(self, damage: DamagedRange) -> bool:
        await trio.lowlevel.checkpoint()
        return self.held[damage.begin : damage.end] == self.right[damage.begin : damage.end]

    async def proves(self, damage: DamagedRange, begin: int, raw: bytes) -> int:
        await trio.lowlevel.checkpoint()
        return len(raw) if raw == self.right[begin : begin + len(raw)] else 0

    async def proves_alone(self, damage: DamagedRange, begin: int, raw: bytes) -> int:
        await trio.lowlevel.checkpoint()
        known = self.right[begin : min(begin + len(raw), self.known_to)]
        return len(known) if raw.startswith(known) else 0

    async def rewrite(self, begin: int, raw: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.writes.append((begin, len(raw)))
        self.held[begin : begin + len(raw)] = raw

    async def agrees(self, damage: DamagedRange, raw: bytes) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    def after_heal(self, damage: DamagedRange) -> None:
        pass


@pytest.mark.parametrize("lies", [False, True])
async def test_only_proven_bytes_are_written_and_the_next_peer_is_asked(lies: bool, nursery: trio.Nursery) -> None:
    log = DamagedLog(LOG, 1000, 2000)
    [damage] = log.damage.open
    liar = Peer(nursery, HAService(MemoryLog(bytes(len(LOG)))))
    honest = Peer(nursery, HAService(MemoryLog(LOG)))

    async def connect(address: str) -> trio.abc.Stream:
        return await (liar if address == "liar:1" else honest).connect(address)

    async def peers() -> list[str]:
        await trio.lowlevel.checkpoint()
        return ["liar:1"] if lies else ["liar:1", "honest:1"]

    healer = Healer(log, peers, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    nursery.start_soon(healer.run)
    await trio.sleep(RETRY_S * 30)
    assert not damage.is_hopeless
    if lies:
        await trio.sleep(RETRY_S * 2)
        assert log.writes == []
        assert damage.is_hopeless
        assert "not what was written here" in damage.heal_trouble
    else:
        assert log.writes == [(1000, 1000)]
        assert bytes(log.held) == LOG
        assert not log.damage.open
        assert damage.healed_from == "honest:1"


async def test_what_a_truncation_leaves_of_a_range_stays_listed_until_it_is_healed(nursery: trio.Nursery) -> None:
    """Its last block has no checksum any more, so a read would not notice the damage."""
    log = DamagedLog(LOG, 1000, 2000)
    peer = Peer(nursery, HAService(MemoryLog(LOG)))
    rewrite = log.rewrite

    async def truncate_before(begin: int, raw: bytes) -> None:
        await trio.lowlevel.checkpoint()
        log.rewrite = rewrite  # type: ignore[method-assign]
        log.damage.truncate(1500, lambda begin: begin)
        raise OffsetGone(begin + len(raw), 0, 1500)

    async def peers() -> list[str]:
        await trio.lowlevel.checkpoint()
        return ["peer:1"]

    log.rewrite = truncate_before  # type: ignore[method-assign]
    healer = Healer(log, peers, connect=peer.connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    nursery.start_soon(healer.run)
    await wait_all_tasks_blocked()
    assert [(each.begin, each.end) for each in log.damage.open] == [(1000, 1500)]
    await trio.sleep(RETRY_S)
    await wait_all_tasks_blocked()
    assert log.writes == [(1000, 500)]
    assert not log.damage.open


async def test_a_peer_that_sends_a_byte_now_and_then_does_not_hold_up_the_others(nursery: trio.Nursery) -> None:
    log = DamagedLog(LOG, 1000, 2000)
    slow = Peer(nursery)
    honest = Peer(nursery, HAService(MemoryLog(LOG)))

    async def send_slowly(stream: trio.abc.Stream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await trio.sleep(2)  # until it has asked
            await stream.send_all(encode_transfer_header(1000, 1000))
            while True:
                await trio.sleep(SILENCE_S_MAX / 2)
                await stream.send_all(b"?")

    async def connect(address: str) -> trio.abc.Stream:
        if address == "honest:1":
            return await honest.connect(address)
        stream = await slow.connect(address)
        nursery.start_soon(send_slowly, slow.streams[-1])
        return stream

    async def peers() -> list[str]:
        await trio.lowlevel.checkpoint()
        return ["slow:1", "honest:1"]

    healer = Healer(log, peers, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    nursery.start_soon(healer.run)
    await trio.sleep(FETCH_S_MAX + 5)
    assert not log.damage.open


async def test_a_range_is_healed_as_far_as_the_peer_has_it(nursery: trio.Nursery) -> None:
    """The next peer has the rest, or the same one later."""
    log = DamagedLog(LOG, 1000, 2000)
    log.known_to = 1900
    [damage] = log.damage.open
    short = MemoryLog(LOG[:1200])
    shorter = MemoryLog(LOG[:1100])
    longer = MemoryLog(LOG[:1500])
    held = {name: Peer(nursery, HAService(peer)) for name, peer in {"a": short, "b": shorter, "c": longer}.items()}

    async def connect(address: str) -> trio.abc.Stream:
        return await held[address].connect(address)

    async def peers() -> list[str]:
        await trio.lowlevel.checkpoint()
        return list(held)

    healer = Healer(log, peers, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    nursery.start_soon(healer.run)
    await trio.sleep(0.5)
    assert log.writes == [(1000, 200), (1200, 300)]
    assert [(each.begin, each.end) for each in log.damage.open] == [(1500, 2000)]
    assert "a holds [0, 1200); b holds [0, 1100); c holds [0, 1500)" in damage.heal_trouble
    shorter.put(LOG[1100:])
    await trio.sleep(RETRY_S)
    assert log.writes[2:] == [(1500, 500)]
    assert bytes(log.held) == LOG
    assert not log.damage.open
    assert damage.healed_from == "b"


@pytest.mark.parametrize("size", [600, 1000])
async def test_unknown_records_are_not_written_without_the_end(size: int, nursery: trio.Nursery) -> None:
    """They may be of another history: the next start would take them for this node's."""
    log = DamagedLog(LOG, 1000, 2000)
    real = log.proves

    async def proves(damage: DamagedRange, begin: int, raw: bytes) -> int:
        await real(damage, begin, raw)
        return min(len(raw), 500)  # sound records

    log.proves = proves  # type: ignore[method-assign]
    peer = Peer(nursery, HAService(MemoryLog(LOG[: 1000 + size])))

    async def peers() -> list[str]:
        await trio.lowlevel.checkpoint()
        return ["peer:1"]

    healer = Healer(log, peers, connect=peer.connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    nursery.start_soon(healer.run)
    await trio.sleep(0.5)
    assert log.writes == []
    assert [(each.begin, each.end) for each in log.damage.open] == [(1000, 2000)]


async def test_checksums_that_cannot_be_read_now_are_read_again_later(nursery: trio.Nursery) -> None:
    """As while the process has no file descriptor left."""
    log = DamagedLog(LOG, 1000, 2000)
    [damage] = log.damage.open
    is_sound = log.is_sound
    can_read = False

    async def is_sound_if_read(damage: DamagedRange) -> bool:
        if not can_read:
            raise OSError(errno.EMFILE, "Too many open files")
        return await is_sound(damage)

    log.is_sound = is_sound_if_read  # type: ignore[method-assign]
    peer = Peer(nursery, HAService(MemoryLog(LOG)))

    async def peers() -> list[str]:
        await trio.lowlevel.checkpoint()
        return ["peer:1"]

    healer = Healer(log, peers, connect=peer.connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    nursery.start_soon(healer.run)
    await trio.sleep(RETRY_S / 2)
    assert "Too many open files" in damage.heal_trouble
    can_read = True
    await trio.sleep(RETRY_S)
    assert damage.healed_from == "peer:1"


async def test_a_range_is_not_given_up_before_a_slave_of_a_restarted_master_is_known(nursery: trio.Nursery) -> None:
    log = DamagedLog(LOG, 1000, 2000)
    [damage] = log.damage.open
    honest = Peer(nursery, HAService(MemoryLog(LOG)))
    known: list[str] = []

    async def peers() -> list[str]:
        await trio.lowlevel.checkpoint()
        return known

    healer = Healer(log, peers, connect=honest.connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    nursery.start_soon(healer.run)
    await trio.sleep(RETRY_S * 30)
    assert "no peer is known" in damage.heal_trouble
    assert not damage.is_hopeless
    known.append("honest:1")
    await trio.sleep(RETRY_S * 2)
    assert damage.healed_from == "honest:1"


async def test_an_unreachable_peer_is_retried_before_giving_up(nursery: trio.Nursery) -> None:
    log = DamagedLog(LOG, 1000, 2000)
    [damage] = log.damage.open
    attempts: list[float] = []
    began = trio.current_time()

    async def connect(address: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        attempts.append(trio.current_time() - began)
        raise ConnectionRefusedError("nobody there")

    async def peers() -> list[str]:
        await trio.lowlevel.checkpoint()
        return ["away:1"]

    healer = Healer(log, peers, connect=connect, options=HAOptions(), segment_size=SEGMENT_SIZE)
    nursery.start_soon(healer.run)
    await trio.sleep(RETRY_S * 30)
    assert attempts == [0, 1, 3, 7, 15]
    assert not damage.is_hopeless
    await trio.sleep(RETRY_S * 2)
    assert attempts[ATTEMPTS - 1 :] == [31]
    assert damage.is_hopeless
    log.held[:] = LOG  # an operator restores the file
    await trio.sleep(RETRY_S * 32)
    assert damage.healed_from == "the disk, read again"

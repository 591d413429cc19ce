"""Arbitrary bytes from a peer, on either side, close the connection and do nothing else."""

import logging

import trio
from hypothesis import example, given
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog

END = 5000


def is_honest(report: bytes) -> bool:
    """Whether a slave might have sent this: an offset that the log has."""
    return 0 <= int.from_bytes(report, "big", signed=True) <= END


CHUNKS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6)


@given(CHUNKS)
@example([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
@example([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
@example([b"\xff" * 8, b"\xff" * 8])
@example([b"\xff" * 7, b"\xfe"])
@example([b"\x00" * 6 + b"\x13\x89"])
@example([b"\x80" + b"\x00" * 7])
def test_arbitrary_bytes_close_the_connection_and_never_count(chunks: list[bytes]) -> None:
    stream = b"".join(chunks)

    async def scenario() -> None:
        service = HAService(MemoryLog(bytes(END)))
        reasons: list[CloseReason] = []
        ours, theirs = memory_stream_pair()
        peer_count = 0

        async def serve() -> None:
            reasons.append(await service.handle(theirs, "10.6.6.6:666"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            for chunk in chunks:
                try:
                    await ours.send_all(chunk)
                except trio.BrokenResourceError:
                    break
                await wait_all_tasks_blocked()
                peer_count = max(peer_count, len(service.acknowledged()))
            await trio.sleep(60)
            assert service.connection_count == 0
        assert len(reasons) == 1
        assert reasons[0] is not CloseReason.SERVICE_STOPPED
        assert service.push2_slave_max_offset <= END
        if not any(is_honest(stream[at : at + 8]) for at in range(0, len(stream) - 7, 8)):
            assert peer_count == 0
            assert service.push2_slave_max_offset == 0

    logging.disable(logging.CRITICAL)
    try:
        trio.run(scenario, clock=MockClock(autojump_threshold=0))
    finally:
        logging.disable(logging.NOTSET)


@given(
    CHUNKS, st.integers(0, 2 * SEGMENT_SIZE), st.sampled_from(["wait", "resync"]), st.sampled_from(["last", "first"])
)
def test_an_arbitrary_master_appends_only_what_fits(
    chunks: list[bytes], own: int, out_of_range: str, start_from: str
) -> None:
    async def scenario() -> None:
        content = bytes(range(256)) * 32
        log = MemoryLog(content[:own])
        options = HAOptions(out_of_range=out_of_range, start_from=start_from)  # type: ignore[arg-type]

        async def connect(address: str) -> trio.abc.Stream:
            ours, theirs = memory_stream_pair()
            nursery.start_soon(speak, ours)
            return theirs

        async def speak(stream: trio.abc.Stream) -> None:
            try:
                for chunk in chunks:
                    await stream.send_all(chunk)
                    await wait_all_tasks_blocked()
                await trio.sleep(30)
                await stream.aclose()
            except trio.BrokenResourceError:
                pass

        async with trio.open_nursery() as nursery:
            client = HAClient(log, options, connect)
            nursery.start_soon(client.run)
            client.set_master("stranger:1")
            await trio.sleep(26)
            nursery.cancel_scope.cancel()
        if log.min_offset == 0:
            assert log.content[:own] == content[:own]

    logging.disable(logging.CRITICAL)
    try:
        trio.run(scenario, clock=MockClock(autojump_threshold=0))
    finally:
        logging.disable(logging.NOTSET)

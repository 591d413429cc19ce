"""Reads a range of the log from a peer's HA port, to heal the log here. The connection is not that of a slave.

Any broker, halog or RocketMQ, master or slave, sends its log from any offset that is requested. Two special cases:

- A request of 0 means "the last segment", so 1 is requested instead, and byte 0 is restored: it is the first byte of a
  record's size, which is below 16 MiB (first_byte.py).
- A request is also an acknowledgement, so only the start of the requested range is ever reported: it is below the end
  of the log here, and below what any put waits for. The report is repeated, because peers close silent connections. A
  halog peer learns before the request that this is no slave (range_question.py), and doesn't count the connection.

The bytes are untrusted: the caller verifies them against checksums, or as valid records, before it writes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec
import trio

from ha.errors import ConfigError, RemoteProtocolError
from ha.protocol.ha_frame import TransferHeader, TransferParser, encode_report
from ha.replication.handshake import authenticate_to_master
from ha.replication.options import HAOptions
from ha.replication.range_question import RANGE_QUESTION

Connect = Callable[[str], Awaitable[trio.abc.Stream]]

RECEIVE_SIZE = 256 << 10
SILENCE_S_MAX = 5.0
"""Time in seconds without a byte from the peer after which it is assumed not to have the bytes, or not to be able to
send them now."""
FETCH_S_MAX = 60.0
"""Maximum time in seconds for one range. The bytes received by then are used, and other peers are asked for the
rest."""
REPORT_INTERVAL_S = 5.0
"""Interval of the reports in seconds. A peer closes a connection on which it receives nothing for
haHousekeepingInterval, by default 20 s."""
ANSWER_COUNT = 2
"""Number of empty frames with which a halog peer answers the range question."""


class HealFetchError(Exception):
    """The peer didn't send the bytes; the message says why. An expected failure, which is retried later."""


class Fetched(msgspec.Struct, frozen=True):
    """The bytes received from the start of a range. `trouble`: why they are not the whole range, "" if they are."""

    raw: bytes
    trouble: str


async def fetch_range(
    address: str, begin: int, end: int, *, connect: Connect, options: HAOptions, segment_size: int
) -> Fetched:
    """Returns bytes [begin, end) of the log of the peer whose HA port is at `address`. They must lie in one segment.

    Returns fewer, but at least one, if the peer has no more, stops sending, or violates the protocol after some of
    them, or if the connection is lost. Raises HealFetchError if it sends none: it can't be reached, doesn't have them,
    they are damaged there, too, or the two sides don't know the same haSharedSecret. Always closes the connection.
    """
    assert 0 <= begin < end
    began = trio.current_time()
    try:
        with trio.fail_after(options.connect_timeout_s):
            stream = await connect(address)
    except (OSError, ConfigError, trio.TooSlowError, trio.BrokenResourceError) as error:
        raise HealFetchError(f"{address} can't be reached: {str(error) or 'no answer'}") from None
    answer_timeout_s = options.range_answer_timeout_s + trio.current_time() - began
    try:
        with _failures_of_peer(address):
            if options.handshake is not None:
                refused = await authenticate_to_master(stream, options.handshake)
                if refused:
                    raise HealFetchError(f"{address}: {refused}")
            return await _receive(stream, address, begin, end, answer_timeout_s, segment_size)
    finally:
        await trio.aclose_forcefully(stream)


@contextmanager
def _failures_of_peer(address: str) -> Iterator[None]:
    """Raises HealFetchError in place of the errors of a broken connection and of a peer that violates the protocol."""
    try:
        yield
    except (OSError, RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise HealFetchError(f"{address}: {str(error) or 'the connection broke'}") from None


async def _receive(
    stream: trio.abc.Stream, address: str, begin: int, end: int, answer_timeout_s: float, segment_size: int
) -> Fetched:
    first = max(begin, 1)
    trouble = ""
    got = bytearray(b"\0" * (first - begin))
    parser = TransferParser(body_size_max=segment_size)
    await stream.send_all(RANGE_QUESTION * 2)
    # RocketMQ does not answer; halog sends its range.
    held: list[int] = []
    with trio.move_on_after(answer_timeout_s):
        while len(held) < ANSWER_COUNT:
            for event in parser.feed(await _some(stream, address)):
                if not isinstance(event, TransferHeader) or not event.is_heartbeat:
                    raise RemoteProtocolError("it sends before the request")
                held.append(event.physical_offset)
    if held:
        if not held[0] <= begin < held[-1]:
            raise HealFetchError(f"{address} holds [{held[0]}, {held[-1]})")
        if end > held[-1]:
            trouble = f"{address} holds [{held[0]}, {held[-1]})"
            end = held[-1]
    try:
        with _failures_of_peer(address):
            await _receive_body(stream, address, parser, got, begin, end)
    except HealFetchError as error:
        if len(got) <= first - begin:
            raise
        trouble = str(error)
    return Fetched(bytes(got), trouble)


async def _receive_body(
    stream: trio.abc.Stream, address: str, parser: TransferParser, got: bytearray, begin: int, end: int
) -> None:
    """Requests the bytes and receives until `got` is [begin, end). Raises HealFetchError if the peer sends no more;
    `got` keeps what was received."""
    heartbeat_count = 0
    report_at, deadline = trio.current_time(), trio.current_time() + FETCH_S_MAX
    report = encode_report(begin + len(got))
    while len(got) < end - begin:
        if trio.current_time() >= report_at:
            await stream.send_all(report)
            report_at = trio.current_time() + REPORT_INTERVAL_S
        with trio.move_on_at(min(trio.current_time() + SILENCE_S_MAX, deadline)) as scope:
            received = await _some(stream, address)
        if scope.cancelled_caught:
            raise HealFetchError(f"{address} sent {len(got)} of {end - begin} bytes in time")
        for event in parser.feed(received):
            if isinstance(event, TransferHeader):
                if event.physical_offset != begin + len(got) and len(got) < end - begin:
                    raise RemoteProtocolError(f"it sends from {event.physical_offset}, not {begin + len(got)}")
                heartbeat_count += event.is_heartbeat
            else:
                got += event.chunk[: end - begin - len(got)]
        if heartbeat_count > 1 and len(got) < end - begin:  # the first may have been due when the request came
            raise HealFetchError(f"{address} has no bytes at {begin + len(got)} to send")


async def _some(stream: trio.abc.Stream, address: str) -> bytes | bytearray:
    received = await stream.receive_some(RECEIVE_SIZE)
    if not received:
        raise HealFetchError(
            f"{address} closed the connection: the bytes are damaged there, too, or it accepts no more connections"
        )
    return received

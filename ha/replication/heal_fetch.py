"""Reading a range of the log from a peer's HA port, to heal one's own with: a connection that is no slave's.

Any broker, halog's or RocketMQ's, master or slave, sends its log from wherever it is asked to. Two things are odd:

- A request of 0 means "your last segment", so 1 is asked for instead, and byte 0 made up: it is the first of a record's
  size, which is below 16 MiB (first_byte.py).
- A request is an acknowledgement, too. It is the begin of the damaged range, less than what is held here and than what
  any put waits for, and it is the only one. A halog peer is told beforehand that this is no slave
  (range_question.py), and doesn't count the connection at all.

What comes is not to be trusted: the caller proves it by checksums or records before it is written anywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import trio

from ha.errors import ConfigError, RemoteProtocolError
from ha.protocol.ha_frame import TransferHeader, TransferParser, encode_report
from ha.replication.handshake import recognise_master
from ha.replication.options import HAOptions
from ha.replication.range_question import RANGE_QUESTION

Connect = Callable[[str], Awaitable[trio.abc.Stream]]

RECEIVE_SIZE = 256 << 10
SILENCE_S_MAX = 5.0
"""So long without a byte: the peer doesn't have them, or can't send them now."""
ANSWER_COUNT = 2
"""Empty frames that a halog peer sends before the request, on the question."""


class HealFetchError(Exception):
    """The peer didn't send the bytes; the message says why. Not a fault of anybody's, and tried again later.

    `is_refusal`: it was reached, and doesn't have them or doesn't give them.
    """

    def __init__(self, reason: str, *, is_refusal: bool = True) -> None:
        super().__init__(reason)
        self.is_refusal = is_refusal


class Fetched(msgspec.Struct, frozen=True):
    """What came of a range, from its begin on, and why not more: "" if it is all of it."""

    raw: bytes
    trouble: str


async def fetch_range(
    address: str, begin: int, end: int, *, connect: Connect, options: HAOptions, segment_size: int
) -> Fetched:
    """Return bytes [begin, end) of the log of the peer whose HA port is at `address`; they lie within one segment.

    Fewer, but at least one, if it doesn't hold more or sends no more. HealFetchError if it sends none: it can't be
    reached, doesn't hold them, or they are damaged there. The connection is closed in any case.
    """
    assert 0 <= begin < end
    try:
        with trio.fail_after(options.connect_timeout_s):
            stream = await connect(address)
    except (OSError, ConfigError, trio.TooSlowError, trio.BrokenResourceError) as error:
        raise HealFetchError(f"{address} can't be reached: {error or 'no answer'}", is_refusal=False) from None
    try:
        if options.handshake is not None:
            refused = await recognise_master(stream, options.handshake)
            if refused:
                raise HealFetchError(f"{address}: {refused}")
        return await _receive(stream, address, begin, end, options, segment_size)
    except (OSError, RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise HealFetchError(f"{address}: {error or 'the connection broke'}", is_refusal=False) from None
    finally:
        await trio.aclose_forcefully(stream)


async def _receive(
    stream: trio.abc.Stream, address: str, begin: int, end: int, options: HAOptions, segment_size: int
) -> Fetched:
    first = max(begin, 1)
    trouble = ""
    got = bytearray(b"\0" * (first - begin))
    parser = TransferParser(body_size_max=segment_size)
    await stream.send_all(RANGE_QUESTION * 2)
    # RocketMQ says nothing to that; halog tells what it holds.
    held: list[int] = []
    with trio.move_on_after(options.range_answer_timeout_s):
        while len(held) < ANSWER_COUNT:
            for event in parser.feed(await _some(stream, address)):
                if not isinstance(event, TransferHeader) or not event.is_heartbeat:
                    raise RemoteProtocolError("it sends before it is asked")
                held.append(event.physical_offset)
    if held:
        if not held[0] <= begin < held[-1]:
            raise HealFetchError(f"{address} holds [{held[0]}, {held[-1]})")
        if end > held[-1]:
            trouble = f"{address} holds [{held[0]}, {held[-1]})"
            end = held[-1]
    await stream.send_all(encode_report(first))
    try:
        await _receive_body(stream, address, parser, got, begin, end)
    except HealFetchError as error:
        if len(got) <= first - begin:
            raise
        trouble = str(error)
    return Fetched(bytes(got), trouble)


async def _receive_body(
    stream: trio.abc.Stream, address: str, parser: TransferParser, got: bytearray, begin: int, end: int
) -> None:
    """Receive until `got` is [begin, end). HealFetchError if the peer sends no more; `got` then is what came."""
    heartbeat_count = 0
    while len(got) < end - begin:
        with trio.move_on_after(SILENCE_S_MAX) as scope:
            received = await _some(stream, address)
        if scope.cancelled_caught:
            raise HealFetchError(f"{address} sent {len(got)} of {end - begin} bytes and no more")
        for event in parser.feed(received):
            if isinstance(event, TransferHeader):
                if event.physical_offset != begin + len(got) and len(got) < end - begin:
                    raise RemoteProtocolError(f"it sends from {event.physical_offset}, not {begin + len(got)}")
                heartbeat_count += event.is_heartbeat
            else:
                got += event.chunk[: end - begin - len(got)]
        if heartbeat_count > 1 and len(got) < end - begin:  # the first may have been overdue when the request came
            raise HealFetchError(f"{address} has no bytes at {begin + len(got)} to send")


async def _some(stream: trio.abc.Stream, address: str) -> bytes | bytearray:
    received = await stream.receive_some(RECEIVE_SIZE)
    if not received:
        raise HealFetchError(f"{address} hung up: the bytes are damaged there too, or it takes no more connections")
    return received

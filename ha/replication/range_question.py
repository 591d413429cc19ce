"""The range question, with which a halog slave asks a master which physical offsets its log has. It is compatible with
RocketMQ's default HA protocol.

The protocol has one message from slave to master, an offset. It can neither request "everything" nor answer "deleted":
a request of 0 means the master's *last* segment, and a request for deleted bytes is answered by heartbeats for ever.

The question is a report of -1 (eight bytes 0xFF), sent alone and before any other report on a connection.

- A RocketMQ master (4.x, 5.x) ignores it: -1 is the initial value of both its `slaveRequestOffset` and
  `slaveAckOffset`, so to the master the slave has not requested anything yet, and before the first request the master
  sends nothing. The slave stops waiting after `range_answer_timeout_s` and the time that connecting took, and continues
  as a RocketMQ slave would.
- A halog master answers at once with two empty frames, (min offset, 0) and (max offset, 0), and remembers that this
  slave asked. On such a connection
  * a request of 0 means the first offset that the master has, not the start of its last segment;
  * once the slave's position is deleted, heartbeats carry the master's min offset instead of that position, the first
    one immediately. A RocketMQ slave, which never asks, gets heartbeats at its own position, as from RocketMQ.
- A RocketMQ slave never sends -1: its max offset is never negative.

Sent twice, 16 bytes, the question means: this is no slave, but a reader that heals its own log (heal_fetch.py). Such a
connection gets the same answer and the requested bytes, but doesn't count. RocketMQ ignores this form, too; there the
connection counts, as all do, with an offset below what any put waits for.

A slave asks only if the answer matters:
- it is empty and has haStartFrom=first;
- it is not empty and has haOutOfRange=resync;
- its last connection to this master ended before usable bytes came: the answer may show why;
- the master sent nothing from before the end of the slave's log.

A member of a failover group never asks.

Alternatives considered: configuring the master (both sides' files must agree, and all slaves must want the same);
reporting 1 for "first" to every master (works only if nothing was deleted; it is the fallback for RocketMQ masters, see
first_byte.py); a handshake before the protocol (a RocketMQ master would take its bytes for an offset).
"""

from __future__ import annotations

from ha.protocol.ha_frame import REPORT_SIZE, encode_transfer_header

RANGE_QUESTION = b"\xff" * REPORT_SIZE


def encode_range_answer(min_offset: int, max_offset: int) -> bytes:
    """Returns the two empty frames that say that the master has [min_offset, max_offset)."""
    return encode_transfer_header(min_offset, 0) + encode_transfer_header(max_offset, 0)


class OpeningParser:
    """Removes the range question from the start of the bytes that a slave sends on one connection."""

    __slots__ = ("_count", "_front")

    def __init__(self) -> None:
        self._front: bytes | None = b""
        self._count = 0

    @property
    def is_question(self) -> bool:
        """Whether the question was asked."""
        return self._count > 0

    @property
    def is_reader(self) -> bool:
        """Whether the question was asked twice, so that the peer is no slave but a reader."""
        return self._count > 1

    def feed(self, chunk: bytes | bytearray) -> bytes | bytearray:
        """Returns the bytes of `chunk` for the report parser, without the question.

        Up to 7 bytes are held back while they may still become the question, or its repetition.
        """
        if self._front is None:
            return chunk
        front = self._front + bytes(chunk)
        while self._count < 2 and front.startswith(RANGE_QUESTION):
            self._count += 1
            front = front[REPORT_SIZE:]
        if self._count < 2 and len(front) < REPORT_SIZE and RANGE_QUESTION.startswith(front):
            self._front = front
            return b""
        self._front = None
        return front

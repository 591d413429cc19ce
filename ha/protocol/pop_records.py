"""Records of the topic rmq_sys_halog_pop: the messages that POP consumers have received and acknowledged.

They are ordinary messages in queue 0, so that every RocketMQ broker replicates and keeps them. A record holds the
changes by all connections since the previous record. The body is JSON:

    version   1; records with another version can't be interpreted
    first     only in the last part of a snapshot, which has the tag `e`: queue offset of the snapshot's first part
    queues    an array of queues, each an array:
        group, topic, queue id    the topic that the messages are read from, which may be a retry topic
        kind                      0 changes, 1 the whole state, 2 removed
        next                      queue offset of the next message to pop
        taken                     messages in flight: arrays of pop time, due time, marks (1: the next delivery does not
                                  count as a retry), and runs
        done                      runs of messages that are no longer in flight
        order                     null, or the messages popped in order mode: an array of pop time, invisible time,
                                  attempt id, and an array per message: offset, times popped before, due time, 1 if it
                                  is acknowledged

A run is two numbers: a queue offset and a count. Times in ms since the epoch. Records hold absolute values, so applying
one twice changes nothing. `done` is applied before `taken`. Together, the records of a snapshot name every queue with
all of its messages in flight; one queue may be in several of them. Changes recorded between these are applied as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.properties import TAGS, encode_properties, tags_code

VERSION = 1
SNAPSHOT_END_TAG = "e"
SNAPSHOT_END_PROPERTIES = encode_properties({TAGS: SNAPSHOT_END_TAG})
SNAPSHOT_END_CODE = tags_code(SNAPSHOT_END_TAG)
"""Tags code of the last part of a snapshot in the consume queue"""

OFFSET_COUNT_MAX = 1 << 20
"""Maximum number of messages that one record names"""

CHANGED, WHOLE, REMOVED = 0, 1, 2
"""Kinds of a `QueueRecord`"""

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TakenRecord(msgspec.Struct, array_like=True, gc=False):
    """Messages in flight that were popped together, or whose due time was changed together."""

    pop_time_ms: _Number
    due_ms: _Number
    marks: int
    runs: list[_Number]


class OrderedRecord(msgspec.Struct, array_like=True, gc=False):
    """One message popped in order mode."""

    offset: _Number
    count: _Number
    due_ms: _Number
    is_acknowledged: int = 0


class OrderRecord(msgspec.Struct, array_like=True):
    """The messages of the last pop of a queue in order mode."""

    pop_time_ms: _Number
    invisible_ms: _Number
    attempt_id: str
    messages: list[OrderedRecord]


class QueueRecord(msgspec.Struct, array_like=True):
    """The changes, or the whole state, of one queue of one group."""

    group: str
    topic: str
    queue_id: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
    kind: int = CHANGED
    next_offset: _Number = 0
    taken: list[TakenRecord] = []
    done: list[_Number] = []
    order: OrderRecord | None = None


class PopRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The content of one record; the module's docstring describes the fields."""

    queues: list[QueueRecord] = []
    first: _Number | None = None


class _VersionAlone(msgspec.Struct):
    version: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(PopRecord).decode
_decode_version = msgspec.json.Decoder(_VersionAlone).decode


def encode_pop_record(record: PopRecord) -> bytes:
    """Returns the body of a record."""
    text = _encode(record)
    return b'{"version":%d%b%b' % (VERSION, b"," if len(text) > 2 else b"", text[1:])


def decode_pop_record(body: bytes) -> PopRecord:
    """Returns the record with this body. Raises RemoteProtocolError if it is invalid or has another version."""
    try:
        version = _decode_version(body).version
        if version != VERSION:
            raise RemoteProtocolError(f"POP record of version {version}; {VERSION} is supported")
        record = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"invalid POP record: {error}") from None
    count = sum(_count(queue.done) + sum(_count(taken.runs) for taken in queue.taken) for queue in record.queues)
    if count > OFFSET_COUNT_MAX:
        raise RemoteProtocolError(f"invalid POP record: it names {count} messages; at most {OFFSET_COUNT_MAX}")
    return record


def _count(runs: list[int]) -> int:
    if len(runs) % 2:
        raise RemoteProtocolError("invalid POP record: a run has no count")
    return sum(runs[1::2])


def to_runs(offsets: Sequence[int]) -> list[int]:
    """Returns the runs of ascending queue offsets: for each run, its first queue offset and its count."""
    if offsets and offsets[-1] - offsets[0] == len(offsets) - 1:
        return [offsets[0], len(offsets)]
    runs: list[int] = []
    end = -1
    for offset in offsets:
        if offset == end:
            runs[-1] += 1
        else:
            runs += (offset, 1)
        end = offset + 1
    return runs


def from_runs(runs: list[int]) -> Iterator[int]:
    """Yields the queue offsets in `runs`, as returned by `to_runs`."""
    for start, count in zip(runs[::2], runs[1::2], strict=True):
        yield from range(start, start + count)

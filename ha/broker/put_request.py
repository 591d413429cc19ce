"""Put requests of the broker's services, and put results for library users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ha.protocol.codes import PutStatus, ResponseCode
from ha.protocol.properties import find_property
from ha.protocol.record import Message


class PutRequest(msgspec.Struct, kw_only=True):
    """One put: its messages, and later its outcome. Callers that need more to answer a put subclass it.

    messages: one message, or the parts of a batch, which all go into one segment (`is_batch`); emptied when the put
    begins to wait for a flush or a slave.
    on_done: called when the put is answered, with a list of this put and others with the same `on_done` that are
    answered at the same time; None: not called.
    waits: whether the answer waits for a flush and slaves; False for messages with WAIT=false, which are answered once
    appended.
    frees_space: whether the put is accepted on a nearly full disk, because after it retention can delete a segment.
    status, remark: the answer; the remark states the cause of any status but PUT_OK.
    results: the log's AppendResult of each message, also if the append failed; empty if the put was refused before the
    append.
    next_offset: physical offset of the end of the last record, up to which the log must be flushed and acknowledged; -1
    if nothing was stored.
    """

    messages: Sequence[Message]
    on_done: Callable[[Sequence[Any]], None] | None = None
    is_batch: bool = False
    waits: bool = True
    frees_space: bool = False
    status: PutStatus = PutStatus.UNKNOWN_ERROR
    remark: str = ""
    results: Sequence[Any] = ()
    next_offset: int = -1

    @property
    def is_hopeless(self) -> bool:
        """Whether retrying is useless, as the messages are invalid."""
        return self.status.response_code is ResponseCode.MESSAGE_ILLEGAL


class PutResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a put of one message through the library. Both offsets are -1 if nothing was stored."""

    status: PutStatus
    remark: str
    physical_offset: int = -1
    queue_offset: int = -1


def message_waits(properties: bytes | memoryview) -> bool:
    """Returns whether a message with this property string waits for flush and replicas: all do except those with
    WAIT=false."""
    raw = bytes(properties)
    if b"WAIT\x01" not in raw:
        return True
    return find_property(raw, b"WAIT") != "false"

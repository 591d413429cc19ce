"""Encodes a master's messages in one term to slaves that use the protocol with epochs
(ha/protocol/auto_switch_frame.py).

A frame carries the epoch of its bytes, and ends at the latest where that epoch ends. RocketMQ's masters put the next
epoch into a frame that ends exactly there; slaves accept either. Bytes before the first epoch (of a log that is older
than its group) are sent with the number of the first epoch, in frames that end at the latest where that epoch starts;
RocketMQ never sends such bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter

from ha.protocol.auto_switch_frame import NOTHING_SENT, EpochFrameHeader, MasterHandshake
from ha.protocol.epoch_file import EpochEntry
from ha.replication.log import ReplicatedLog
from ha.replication.sync_state import SyncStateSet
from ha.store.epochs import EpochHistory

_START = attrgetter("start_offset")


class EpochFrames:
    """Encodes the answer to a handshake and the headers of frames."""

    def __init__(self, log: ReplicatedLog, epochs: EpochHistory, sync_state: SyncStateSet) -> None:
        assert epochs.entries, "a term without an epoch"
        self.sync_state = sync_state
        self._log = log
        self._epochs = epochs

    def answer(self) -> bytes:
        """Returns the answer to a slave's handshake: the history of the log here."""
        return MasterHandshake(self._log.max_offset.value, tuple(self._epochs.entries)).encode()

    def header(self, position: int, size: int) -> bytes:
        """Returns the header of a frame with `size` bytes at physical offset `position`, or of a heartbeat if `size` is
        0."""
        entry = self._epoch_at(position)[0]
        if not size and self._log.min_offset < 0:
            position = NOTHING_SENT
        confirm_offset = self.sync_state.confirm_offset
        return EpochFrameHeader(position, size, entry.epoch, entry.start_offset, confirm_offset).encode()

    def cut(self, position: int, size: int) -> int:
        """Returns how many of the `size` bytes at physical offset `position` belong to the same epoch as the first."""
        end = self._epoch_at(position)[1]
        return size if end is None else min(size, end - position)

    def _epoch_at(self, position: int) -> tuple[EpochEntry, int | None]:
        """Returns the epoch of the byte at `position`, and the physical offset at which that epoch ends, None if it is
        the last one. For a byte before the first epoch, returns the first epoch and its start."""
        entries = self._epochs.entries
        if position >= entries[-1].start_offset:
            return entries[-1], None
        following = bisect_right(entries, position, key=_START)
        return entries[max(following - 1, 0)], entries[following].start_offset

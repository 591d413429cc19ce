"""The handful of log operations that replication needs, and nothing else of the store.

Replication sees a log as bytes at physical offsets: [min_offset, max_offset), cut into segments of `segment_size` bytes
at its multiples. It knows no records, files or queues.
"""

from __future__ import annotations

from typing import Protocol

from ha.store.damage import FoundBy
from ha.store.epochs import EpochHistory
from ha.store.watched_offset import WatchedOffset


class ReplicatedLog(Protocol):
    """What `ha.store.commitlog.CommitLog` offers to replication, and what a test's small log must offer."""

    @property
    def min_offset(self) -> int:
        """First physical offset held; -1 while there is no segment."""

    @property
    def max_offset(self) -> WatchedOffset:
        """End of what is written (RocketMQ: maxPhyOffset); 0 while there is no segment."""

    @property
    def flushed_offset(self) -> WatchedOffset:
        """End of what is on the disk for sure; at most `max_offset`."""

    @property
    def segment_size(self) -> int:
        """Bytes of a full segment (mappedFileSizeCommitLog), the same on master and slave."""

    def read_hot(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Up to `size_max` bytes, not beyond the segment, if they are in memory for sure; else None."""

    async def read(self, physical_offset: int, size_max: int, found_by: FoundBy = "read") -> memoryview | bytes:
        """The same bytes, read off the event loop if they are cold, and verified then. At least one below max_offset.

        OffsetGone outside [min_offset, max_offset]. DamagedBytes if the first is not what was written: it must not
        leave this node.
        """

    async def wait_healed(self, begin: int, end: int) -> None:
        """Wait until no byte of [begin, end) is known to be damaged."""

    async def append_raw(self, physical_offset: int, chunk: memoryview) -> None:
        """Append a master's bytes at exactly `max_offset`, or anywhere if the log is empty; never past a segment's end.

        An empty chunk at offset X of an empty log creates the segment of X. DiskFull if a segment can't be created.
        """

    async def reset(self, first_offset: int) -> None:
        """Set all that the log holds aside and start it empty at `first_offset`, the begin of a segment."""


class ConfirmedLog(Protocol):
    """What the same CommitLog offers to a member of a failover group: how far it may be shown to consumers."""

    @property
    def dispatch_limit(self) -> WatchedOffset:
        """The confirm offset, or ha.store.commitlog.UNLIMITED if none is known."""

    def limit_dispatch(self, offset: int) -> None:
        """Show consumers nothing at or behind a physical offset; what they have been shown stays."""


class MemberStore(Protocol):
    """What `ha.store.message_store.MessageStore` offers to a member of a failover group."""

    @property
    def log(self) -> ConfirmedLog:
        """The log that is replicated."""

    @property
    def epochs(self) -> EpochHistory:
        """Whose terms its bytes are of."""

    async def truncate(self, offset: int) -> None:
        """Cut the log at a record's begin, and the history with it. Cancelled, it has not begun or is complete.

        ValueError if no record begins there, DiskFull if nothing could be begun, DiskFailed.
        """

"""The log operations that replication needs, and nothing else of the store.

Replication sees a log as the bytes at physical offsets [min_offset, max_offset), in segments of `segment_size` bytes
that start at multiples of this size. It knows no records, files or queues.
"""

from __future__ import annotations

from typing import Protocol

from ha.store.damage import FoundBy
from ha.store.epochs import EpochHistory
from ha.store.segmented_log import LogTail
from ha.store.watched_offset import WatchedOffset


class ReplicatedLog(Protocol):
    """The part of `ha.store.commitlog.CommitLog` that replication uses; tests have a small implementation."""

    @property
    def min_offset(self) -> int:
        """First physical offset held; -1 while there is no segment."""

    @property
    def max_offset(self) -> WatchedOffset:
        """End of the written bytes (RocketMQ: maxPhyOffset); 0 while there is no segment."""

    @property
    def flushed_offset(self) -> WatchedOffset:
        """End of the bytes that are durable on disk; at most `max_offset`."""

    @property
    def segment_size(self) -> int:
        """Size of a segment in bytes (mappedFileSizeCommitLog), the same on master and slave."""

    def read_hot(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Returns up to `size_max` bytes of one segment if they are certain to be in memory; else None."""

    async def read(self, physical_offset: int, size_max: int, found_by: FoundBy = "read") -> memoryview | bytes:
        """Returns up to `size_max` bytes of one segment: at least one, or none at `max_offset`. Bytes that may not be
        in memory are read by a worker and verified.

        Raises OffsetGone outside [min_offset, max_offset]. Raises DamagedBytes if the first byte is damaged: it must
        not leave this node. Raises OSError if the disk can't read.
        """

    async def wait_healed(self, begin: int, end: int) -> None:
        """Waits until no byte of [begin, end) is known to be damaged."""

    async def append_raw(self, physical_offset: int, chunk: memoryview) -> None:
        """Appends a master's bytes at exactly `max_offset`, within one segment.

        If the log is empty, `physical_offset` may be any: the segment that contains it is created, and `max_offset`
        becomes the start of that segment. A chunk that does not begin there is not written; an empty one only creates
        the segment. Raises DiskFull, OSError or TooSlowError if a segment can't be created or the bytes can't be
        written.
        """

    def tail(self) -> LogTail | None:
        """Returns the place in a file at which the caller may write the master's next bytes itself. The caller must
        call `note_appended` afterwards, without an await in between.

        None if only `append_raw` can append, for example because a new segment is needed.
        """

    def note_appended(self, size: int, began: float) -> None:
        """Publishes `size` bytes that the caller has written at the `tail`. `began`: Trio's time at which the write
        began."""

    async def reset(self, first_offset: int) -> None:
        """Moves the whole log aside and starts an empty one at `first_offset`, the start of a segment. Creates that
        segment, because a slave without a segment would start at the master's last one.

        After DiskFull or OSError nothing has changed; after DiskFailed the node must stop.
        """


class ConfirmedLog(Protocol):
    """The part of CommitLog that a member of a failover group uses: how far consumers may read."""

    @property
    def dispatch_limit(self) -> WatchedOffset:
        """The confirm offset, or ha.store.commitlog.UNLIMITED if dispatch has no limit."""

    def limit_dispatch(self, offset: int) -> None:
        """Keeps consumers from reading at or after a physical offset; messages that are already dispatched stay
        readable."""


class MemberStore(Protocol):
    """The part of `ha.store.message_store.MessageStore` that a member of a failover group uses."""

    @property
    def log(self) -> ConfirmedLog:
        """The log that is replicated."""

    @property
    def epochs(self) -> EpochHistory:
        """The terms of the log, and where each starts."""

    async def record_end(self, offset: int) -> int | None:
        """Returns the physical offset at which the record at a physical offset ends; None if no intact one starts
        there. Raises OSError if the disk can't read."""

    async def truncate(self, offset: int) -> None:
        """Truncates the log and its history at the start of a record. If cancelled, it is done completely or not at
        all.

        Raises ValueError if no record starts there, DiskFull or OSError if nothing has changed, DiskFailed if the node
        must stop.
        """

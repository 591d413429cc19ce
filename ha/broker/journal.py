"""Changes to a master's tables that are not in the log yet, and callbacks that receive their outcome.

Used only in a failover group. Tables add changes synchronously; `GroupLog` takes all of them at once, so that many
commits become one record, and several commits by a group for the same queue become one entry. If a record can't be
stored, `settle` adds some of its changes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec
import trio

from ha.broker.group_state import TablesView, pack
from ha.protocol.access_bodies import UserConfig
from ha.protocol.bodies import DataVersion, GroupConfig, TopicConfig
from ha.protocol.codes import PutStatus
from ha.protocol.group_records import TablesRecord

WAITING_COUNT_MAX = 65_536
"""Limit on requests that wait for changes which `take` has not returned yet. Once it is reached, further commits are
answered SYSTEM_BUSY; other requests may exceed it."""


class Logged(msgspec.Struct, frozen=True):
    """Outcome of changes: PUT_OK if they are acknowledged, otherwise why they may be lost.

    If `status.is_stored` is true, they are in the log. If it is false, they are not, with two exceptions: with
    NO_MASTER, a record of the ended term may contain them; and if only some of their records were stored, these changes
    are in the log until the next snapshot undoes them.
    """

    status: PutStatus = PutStatus.PUT_OK
    remark: str = ""

    @property
    def fault(self) -> str:
        """Why the changes may be lost, or ""."""
        return "" if self.status is PutStatus.PUT_OK else f"{self.status.name} {self.remark}".rstrip()


ACKNOWLEDGED = Logged()
NO_MASTER = Logged(PutStatus.SERVICE_NOT_AVAILABLE, "this broker is not, or no longer, the master of its group")

Waiter: TypeAlias = Callable[[Logged], None]


class Journal:
    """Collects changes to be written to the log. It is open while the broker is the master; while it is closed, the
    tables follow the log, and changes are ignored."""

    def __init__(self, still_acknowledges: Callable[[int], bool]) -> None:
        """`still_acknowledges`: see `Standing.still_acknowledges`."""
        self._still_acknowledges = still_acknowledges
        self.is_open = False
        self.epoch = -1
        """Epoch of the records"""
        self.config_size_max = 1 << 62
        """Maximum bytes of the configuration of one topic, group or user, so that it fits in a record"""
        self._topics: dict[str, TopicConfig | None] = {}
        self._deleted_topics: dict[str, int] = {}
        self._groups: dict[str, GroupConfig | None] = {}
        self._users: dict[str, UserConfig | None] = {}
        self._versions: list[DataVersion | None] = [None, None, None]
        self._removed: dict[str, None] = {}
        self._offsets: dict[str, dict[int, int]] = {}
        self._delays: dict[int, int] = {}
        self._waiters: list[Waiter] = []
        self._taken: list[Waiter] = []
        self._is_settled = False
        """Whether all changes that `take` has returned are acknowledged, those of earlier terms included"""
        self.some = trio.Event()
        """Set when there are changes to write, a request waits for an outcome, or a snapshot is due"""
        self.urgent = trio.Event()
        """Set when the writer must not wait for more changes: a request waits for an outcome, or a snapshot is due"""

    # ---- for the tables

    def open(self, epoch: int) -> None:
        """Starts collecting changes for records of `epoch`."""
        self.is_open, self.epoch = True, epoch
        self._is_settled = False  # the first acknowledgement of this term also covers records of earlier terms

    def close(self) -> None:
        """Stops collecting, drops the changes that `take` has not returned yet, and calls all waiters with NO_MASTER,
        including those of changes that are being written."""
        self.is_open = False
        self._forget()
        waiters, self._waiters = self._waiters + self._taken, []
        self._taken = []
        for waiter in waiters:
            waiter(NO_MASTER)

    def topic(self, name: str, config: TopicConfig | None, version: DataVersion) -> None:
        """Adds a new, changed or deleted (None) topic."""
        if self.is_open:
            self._topics[name] = config
            self._versions[0] = version
            self.some.set()

    def deleted_topics(self, before: Mapping[str, int], version: DataVersion) -> None:
        """Adds deletions of messages. `before`: topic -> physical offset before which its messages are deleted."""
        if self.is_open:
            self._deleted_topics.update(before)
            self._versions[0] = version
            self.some.set()

    def group(self, name: str, config: GroupConfig | None, version: DataVersion) -> None:
        """Adds a new, changed or deleted (None) consumer group."""
        if self.is_open:
            self._groups[name] = config
            self._versions[1] = version
            self.some.set()

    def user(self, name: str, config: UserConfig | None, version: DataVersion) -> None:
        """Adds a new, changed or deleted (None) user."""
        if self.is_open:
            self._users[name] = config
            self._versions[2] = version
            self.some.set()

    def offset(self, key: str, queue_id: int, offset: int) -> None:
        """Adds a committed offset. `key`: "topic@group"."""
        if self.is_open:
            by_queue = self._offsets.get(key)
            if by_queue is None:
                by_queue = self._offsets[key] = {}
            by_queue[queue_id] = offset
            self.some.set()

    def offsets_removed(self, key: str) -> None:
        """Adds the removal of all offsets of `key`: "topic@group"."""
        if self.is_open:
            self._offsets.pop(key, None)
            self._removed[key] = None
            self.some.set()

    def delay(self, level: int, queue_offset: int) -> None:
        """Adds the delivery progress of a delay level."""
        if self.is_open:
            self._delays[level] = queue_offset
            self.some.set()

    # ---- waiting

    def call_when_logged(self, waiter: Waiter) -> None:
        """Calls `waiter` once with the outcome of all earlier changes, possibly before returning. The outcome is
        NO_MASTER if the journal is closed."""
        if not self.is_open:
            waiter(NO_MASTER)
        elif self._is_empty and self._is_settled and not self._taken and not self._waiters:
            waiter(self.acknowledged)
        else:
            self._waiters.append(waiter)
            self.some.set()
            self.urgent.set()

    async def logged(self, on_logged: Waiter | None = None) -> Logged:
        """Waits for the outcome of all earlier changes, and returns it. `on_logged` is called with it before the next
        record is written, even if this call has been cancelled by then."""
        done = trio.Event()
        found = NO_MASTER

        def waiter(logged: Logged) -> None:
            nonlocal found
            found = logged
            if on_logged is not None:
                on_logged(logged)
            done.set()

        self.call_when_logged(waiter)
        await done.wait()
        return found

    # ---- for the writer

    @property
    def acknowledged(self) -> Logged:
        """The outcome of acknowledged changes at this moment: ACKNOWLEDGED, or NO_MASTER if the term or its lease
        has ended."""
        return ACKNOWLEDGED if self._still_acknowledges(self.epoch) else NO_MASTER

    @property
    def is_crowded(self) -> bool:
        """Whether further commits should be refused."""
        return len(self._waiters) >= WAITING_COUNT_MAX

    @property
    def _is_empty(self) -> bool:
        configs = self._topics or self._deleted_topics or self._groups or self._users
        return not (configs or self._offsets or self._delays or self._removed)

    @property
    def has_waiters(self) -> bool:
        """Whether a request waits for changes that `take` has not returned yet."""
        return bool(self._waiters)

    def take(self, size_max: int) -> list[TablesRecord]:
        """Removes all changes and returns them as records of about `size_max` bytes at most, unless a single entry is
        larger. Call `settle` with their outcome.

        Without changes, returns one empty record if a request waits for earlier changes that are not acknowledged yet,
        otherwise no record. Requests may wait in that case, too: `settle` answers them.
        """
        configs = self._topics, self._deleted_topics, self._groups
        view = TablesView(*configs, self._offsets, self._delays, self._users, *self._versions)
        is_needed = not self._is_empty or (self._waiters and not self._is_settled)
        records = list(pack(view, self.epoch, size_max, removed=self._removed)) if is_needed else []
        self._forget()
        self._taken, self._waiters = self._waiters, []
        self._is_settled &= not records
        self.some, self.urgent = trio.Event(), trio.Event()
        return records

    def settle(self, epoch: int, logged: Logged, repeated: Iterable[TablesRecord] = ()) -> None:
        """Reports the outcome of the changes taken in `epoch` to their waiters, unless `close` already did.

        `repeated`: the first record that was not stored, and all that follow it. Their offsets, removals of offsets and
        delay progress are added again, since the tables still have them, unless newer changes have replaced them.
        Topics, groups and users are not added again, since the requests that changed them fail.
        """
        if not self.is_open or epoch != self.epoch:
            return  # `close` has called the waiters
        self._is_settled = logged.status is PutStatus.PUT_OK
        removed_since = self._removed
        self._removed = dict(removed_since)
        for record in repeated:
            self._add_again(record, removed_since)
        taken, self._taken = self._taken, []
        for waiter in taken:
            waiter(logged)

    def _add_again(self, record: TablesRecord, removed_since: Mapping[str, None]) -> None:
        for key, by_queue in record.offsets.items():
            if key not in removed_since:
                self._offsets[key] = {**by_queue, **self._offsets.get(key, {})}
        self._removed.update(dict.fromkeys(record.removed_offsets))
        for level, queue_offset in record.delays.items():
            self._delays.setdefault(level, queue_offset)
        self.some.set()

    def _forget(self) -> None:
        self._topics, self._groups, self._users, self._versions = {}, {}, {}, [None, None, None]
        self._deleted_topics, self._removed, self._offsets, self._delays = {}, {}, {}, {}

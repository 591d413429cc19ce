"""Changes of a master's tables that are not in the log yet, and who waits until they are acknowledged there.

The tables tell it what changed, at once; `GroupLog` takes all of it at a time, so that many commits are one record, and
several of one queue are one entry. What could not be stored comes back, unless something newer was said meanwhile.
Outside a failover group there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec
import trio

from ha.broker.group_state import TablesView, pack
from ha.protocol.bodies import DataVersion, GroupConfig, TopicConfig
from ha.protocol.codes import PutStatus
from ha.protocol.group_records import TablesRecord

WAITING_COUNT_MAX = 65_536
"""So many answers wait for a record; further commits are answered SYSTEM_BUSY."""


class Logged(msgspec.Struct, frozen=True):
    """What became of changes: PUT_OK, or why they may be lost; `is_stored` False: they are nowhere in the log."""

    status: PutStatus = PutStatus.PUT_OK
    remark: str = ""

    @property
    def fault(self) -> str:
        """Why nobody may rely on it, or ""."""
        return "" if self.status is PutStatus.PUT_OK else f"{self.status.name} {self.remark}".rstrip()


ACKNOWLEDGED = Logged()
NO_MASTER = Logged(PutStatus.SERVICE_NOT_AVAILABLE, "this broker is not, or no longer, the master of its group")

Waiter: TypeAlias = Callable[[Logged], None]


class Journal:
    """What is to be written. Closed while the broker is no master: then nothing is noted, the log is followed."""

    def __init__(self, still_acknowledges: Callable[[int], bool]) -> None:
        """`still_acknowledges`: whether this broker may at this moment acknowledge what it wrote in an epoch."""
        self._still_acknowledges = still_acknowledges
        self.is_open = False
        self.epoch = -1
        """Of the records that are written, or were last"""
        self.config_size_max = 1 << 62
        """Bytes that the configuration of one topic or group may take, to fit a record"""
        self._topics: dict[str, TopicConfig | None] = {}
        self._groups: dict[str, GroupConfig | None] = {}
        self._versions: list[DataVersion | None] = [None, None]
        self._removed: dict[str, None] = {}
        self._offsets: dict[str, dict[int, int]] = {}
        self._delays: dict[int, int] = {}
        self._waiters: list[Waiter] = []
        self._taken: list[Waiter] = []
        self._is_settled = True
        """Whether all that was taken is acknowledged"""
        self.some = trio.Event()
        """There is something to be written"""
        self.urgent = trio.Event()
        """Somebody waits for it"""

    # ---- what tables say

    def open(self, epoch: int) -> None:
        """From now on changes are noted, for records of `epoch`."""
        self.is_open, self.epoch = True, epoch
        self._is_settled = True

    def close(self) -> None:
        """Note nothing more, forget what is not written; whoever waits is told that this is no master."""
        self.is_open = False
        self._forget()
        waiters, self._waiters = self._waiters + self._taken, []
        self._taken = []
        for waiter in waiters:
            waiter(NO_MASTER)

    def topic(self, name: str, config: TopicConfig | None, version: DataVersion) -> None:
        """A topic is new, another one, or (None) deleted."""
        if self.is_open:
            self._topics[name] = config
            self._versions[0] = version
            self.some.set()

    def group(self, name: str, config: GroupConfig | None, version: DataVersion) -> None:
        """The same of a consumer group."""
        if self.is_open:
            self._groups[name] = config
            self._versions[1] = version
            self.some.set()

    def offset(self, key: str, queue_id: int, offset: int) -> None:
        """The group of `key`, "topic@group", goes on at `offset`."""
        if self.is_open:
            by_queue = self._offsets.get(key)
            if by_queue is None:
                by_queue = self._offsets[key] = {}
            by_queue[queue_id] = offset
            self.some.set()

    def offsets_removed(self, key: str) -> None:
        """The offsets of `key` are forgotten."""
        if self.is_open:
            self._offsets.pop(key, None)
            self._removed[key] = None
            self.some.set()

    def delay(self, level: int, queue_offset: int) -> None:
        """Of a delay level everything before `queue_offset` is in the log under its own topic."""
        if self.is_open:
            self._delays[level] = queue_offset
            self.some.set()

    # ---- who waits

    def tell(self, waiter: Waiter) -> None:
        """Tell `waiter` once all that was noted so far is acknowledged, or is not; perhaps at once."""
        if not self.is_open:
            waiter(NO_MASTER)
        elif self._is_empty and self._is_settled and not self._taken and not self._waiters:
            waiter(ACKNOWLEDGED if self._still_acknowledges(self.epoch) else NO_MASTER)
        else:
            self._waiters.append(waiter)
            self.some.set()
            self.urgent.set()

    async def logged(self, told: Waiter | None = None) -> Logged:
        """Wait for the same; `told` is called before anything else is written."""
        done = trio.Event()
        found = NO_MASTER

        def waiter(logged: Logged) -> None:
            nonlocal found
            found = logged
            if told is not None:
                told(logged)
            done.set()

        self.tell(waiter)
        await done.wait()
        return found

    # ---- what the writer does

    @property
    def is_crowded(self) -> bool:
        """Whether so many wait that no further commit should."""
        return len(self._waiters) >= WAITING_COUNT_MAX

    @property
    def _is_empty(self) -> bool:
        return not (self._topics or self._groups or self._offsets or self._delays or self._removed)

    @property
    def has_waiters(self) -> bool:
        """Whether anybody waits for what is not taken yet."""
        return bool(self._waiters)

    def take(self, size_max: int) -> list[TablesRecord]:
        """All that is noted, as records of about `size_max` bytes; whoever waits for it is told by `settle`."""
        view = TablesView(self._topics, self._groups, self._offsets, self._delays, *self._versions)
        records = (
            [] if self._is_empty and self._is_settled else list(pack(view, self.epoch, size_max, removed=self._removed))
        )
        self._forget()
        self._taken, self._waiters = self._waiters, []
        self.some, self.urgent = trio.Event(), trio.Event()
        return records

    def settle(self, epoch: int, logged: Logged, unstored: Iterable[TablesRecord] = ()) -> None:
        """Say what became of what was taken in `epoch`. Offsets in `unstored`, which the tables have, are noted again;
        topics and groups are not: whoever wanted them is told."""
        if not self.is_open or epoch != self.epoch:
            return  # who waited has been told
        self._is_settled = logged.status is PutStatus.PUT_OK
        removed_since = self._removed
        self._removed = dict(removed_since)
        for record in unstored:
            self._note_again(record, removed_since)
        taken, self._taken = self._taken, []
        for waiter in taken:
            waiter(logged)

    def _note_again(self, record: TablesRecord, removed_since: Mapping[str, None]) -> None:
        for key, by_queue in record.offsets.items():
            if key not in removed_since:
                self._offsets[key] = {**by_queue, **self._offsets.get(key, {})}
        self._removed.update(dict.fromkeys(record.removed_offsets))
        for level, queue_offset in record.delays.items():
            self._delays.setdefault(level, queue_offset)
        self.some.set()

    def _forget(self) -> None:
        self._topics, self._groups, self._versions = {}, {}, [None, None]
        self._removed, self._offsets, self._delays = {}, {}, {}

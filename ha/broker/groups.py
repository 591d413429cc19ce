"""Consumer groups' configurations, kept in config/subscriptionGroup.json, and their creation on first use.

Source: SubscriptionGroupManager. On a full disk a new group is known at once and written later. A slave takes over its
master's whole table when the data version differs. In a failover group a change is made when its record is in the
group's log (journal.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import trio

from ha.broker.config_file import ConfigFile
from ha.broker.options import BrokerOptions
from ha.broker.standing import Standing, fixed_standing
from ha.broker.topics import topic_fault
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, GroupConfig, GroupTable, LogPosition
from ha.protocol.group_records import config_size

if TYPE_CHECKING:
    from ha.broker.journal import Journal, Logged

logger = logging.getLogger(__name__)


class SubscriptionGroups:
    """The group table. `load` before use."""

    def __init__(
        self,
        file: ConfigFile,
        options: BrokerOptions,
        *,
        wall_clock_ms: Callable[[], int],
        standing: Standing | None = None,
    ) -> None:
        self._file = file
        self._options = options
        self._standing = fixed_standing(options) if standing is None else standing
        self._wall_clock_ms = wall_clock_ms
        self._table: dict[str, GroupConfig] = {}
        self._data_version = DataVersion()
        self._change_number = 0
        self._saved_number = 0
        self._saving = trio.Lock()
        self.journal: Journal | None = None
        """In a failover group, what writes changes into its log"""
        self._unlogged: dict[str, int] = {}
        """Groups of which a record is being written, and how many"""
        self.file_position: LogPosition | None = None
        """Where in the group's log the file that was loaded stands, if it says so"""

    async def load(self) -> None:
        """Read the file. Raises CorruptLog if it and its `.bak` are damaged."""
        loaded = await self._file.load(partial(java_json.read_as, GroupTable))
        if loaded is not None:
            self._table = loaded.subscription_group_table
            self._data_version = loaded.data_version
        self.file_position = loaded.log_position if loaded is not None else None

    def __len__(self) -> int:
        return len(self._table)

    def names(self) -> list[str]:
        """Every group."""
        return list(self._table)

    def get(self, group: str) -> GroupConfig | None:
        """The group's configuration, or None."""
        return self._table.get(group)

    @property
    def table(self) -> Mapping[str, GroupConfig]:
        """All of them, by name; not to be changed."""
        return self._table

    @property
    def data_version(self) -> DataVersion:
        """Version of the table."""
        return self._data_version

    async def find_or_create(self, group: str) -> GroupConfig | None:
        """The group, created with the defaults if that is allowed; None if it isn't or the name can't be one."""
        found = self._table.get(group)
        if found is not None or not self._options.auto_create_group:
            return found
        if topic_fault(group) or len(self._table) >= self._options.group_count_max:
            return None
        if self.journal is not None and self.journal.is_open:
            if group in self._unlogged:
                await self.journal.logged()
            else:
                await self._log(self.journal, {group: GroupConfig(group_name=group)})
            return self._table.get(group)
        found = self._table[group] = GroupConfig(group_name=group)
        if self.journal is not None or self._standing.is_slave:
            # For consumers of this slave, until its master's table has the group. The version stays the master's: with
            # a version of its own the slave would copy and write the whole table at every turn.
            return found
        self._data_version = self._data_version.next(self._wall_clock_ms())
        await self._changed()
        return found

    async def update(self, groups: Iterable[GroupConfig]) -> str:
        """Make groups as they are given, or change them into that. Returns why that can't be done, or ""."""
        changed = {group.group_name: group for group in groups if self._table.get(group.group_name) != group}
        if not changed:
            return ""
        if len(self._table.keys() | changed.keys()) > max(self._options.group_count_max, len(self._table)):
            return f"this broker holds its maximum of {self._options.group_count_max} consumer groups"
        if self.journal is not None:
            return await self._log(self.journal, changed)
        self._table.update(changed)
        self._data_version = self._data_version.next(self._wall_clock_ms())
        await self._changed()
        for name in changed:
            logger.info("group.changed group=%s", name)
        return ""

    async def delete(self, group: str) -> str:
        """Forget a group, if it is there. Returns why that can't be done, or ""."""
        if self.journal is not None:
            return await self._log(self.journal, {group: None}) if group in self._table else ""
        if self._table.pop(group, None) is None:
            return ""
        self._data_version = self._data_version.next(self._wall_clock_ms())
        await self._changed()
        logger.info("group.deleted group=%s", group)
        return ""

    async def replace(self, table: GroupTable) -> bool:
        """Take over a master's whole table if its data version differs; tell whether it did."""
        if table.data_version == self._data_version:
            return False
        self.adopt(table.subscription_group_table, table.data_version)
        if self.journal is None:
            await self._changed()
        return True

    # ---- in a failover group

    def adopt(self, table: Mapping[str, GroupConfig], version: DataVersion) -> None:
        """Be what the group's log says."""
        self._table = dict(table)
        self._data_version = version

    def follow(self, changes: Mapping[str, GroupConfig | None], version: DataVersion | None) -> None:
        """Make the changes that the next record of the group's log tells."""
        for name, config in changes.items():
            if config is None:
                self._table.pop(name, None)
            else:
                self._table[name] = config
        if version is not None:
            self._data_version = version

    async def _log(self, journal: Journal, changes: Mapping[str, GroupConfig | None]) -> str:
        """Have changes written to the group's log, and make them when they are there. Returns why they may be lost,
        or ""."""
        for name, config in changes.items():
            if config is not None and config_size(name, config) > journal.config_size_max:
                return f"a group's configuration may take {journal.config_size_max} bytes"
        for name, config in changes.items():
            self._unlogged[name] = self._unlogged.get(name, 0) + 1
            if journal.is_open:
                self._data_version = self._data_version.next(self._wall_clock_ms())
                journal.group(name, config, self._data_version)

        def done(logged: Logged) -> None:
            # At once, before anything else is written: a snapshot that comes next has to say it, too.
            for name in changes:
                count = self._unlogged.pop(name) - 1
                if count:
                    self._unlogged[name] = count
            if logged.status.is_stored:
                self.follow(changes, None)

        logged = await journal.logged(done)
        for name, config in changes.items() if logged.status.is_stored else ():
            logger.info("group.logged group=%s config=%s", name, config)
        return logged.fault

    # ---- the file

    def snapshot(self) -> GroupTable:
        """The table as it is now."""
        return GroupTable(data_version=self._data_version, subscription_group_table=dict(self._table))

    async def _changed(self) -> None:
        self._change_number += 1
        wanted = self._change_number
        async with self._saving:
            if self._saved_number < wanted:
                number = self._change_number
                await self._file.save_when_possible(lambda: java_json.dumps_pretty(self.snapshot()))
                self._saved_number = number

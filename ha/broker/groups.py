"""Consumer groups' configurations, kept in config/subscriptionGroup.json, and their creation on first use.

Source: SubscriptionGroupManager. On a full disk a new group is known at once and written later. A slave takes over its
master's whole table when the data version differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import trio

from ha.broker.config_file import ConfigFile
from ha.broker.options import BrokerOptions
from ha.broker.topics import topic_fault
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, GroupConfig, GroupTable

logger = logging.getLogger(__name__)


class SubscriptionGroups:
    """The group table. `load` before use."""

    def __init__(self, file: ConfigFile, options: BrokerOptions, *, wall_clock_ms: Callable[[], int]) -> None:
        self._file = file
        self._options = options
        self._wall_clock_ms = wall_clock_ms
        self._table: dict[str, GroupConfig] = {}
        self._data_version = DataVersion()
        self._change_number = 0
        self._saved_number = 0
        self._saving = trio.Lock()

    async def load(self) -> None:
        """Read the file. Raises CorruptLog if it and its `.bak` are damaged."""
        loaded = await self._file.load(partial(java_json.read_as, GroupTable))
        if loaded is not None:
            self._table = loaded.subscription_group_table
            self._data_version = loaded.data_version

    def __len__(self) -> int:
        return len(self._table)

    def names(self) -> list[str]:
        """Every group."""
        return list(self._table)

    def get(self, group: str) -> GroupConfig | None:
        """The group's configuration, or None."""
        return self._table.get(group)

    async def find_or_create(self, group: str) -> GroupConfig | None:
        """The group, created with the defaults if that is allowed; None if it isn't or the name can't be one."""
        found = self._table.get(group)
        if found is not None or not self._options.auto_create_group:
            return found
        if topic_fault(group) or len(self._table) >= self._options.group_count_max:
            return None
        found = self._table[group] = GroupConfig(group_name=group)
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
        self._table.update(changed)
        self._data_version = self._data_version.next(self._wall_clock_ms())
        await self._changed()
        for name in changed:
            logger.info("group.changed group=%s", name)
        return ""

    async def delete(self, group: str) -> bool:
        """Forget a group; tell whether it was there."""
        if self._table.pop(group, None) is None:
            return False
        self._data_version = self._data_version.next(self._wall_clock_ms())
        await self._changed()
        logger.info("group.deleted group=%s", group)
        return True

    async def replace(self, table: GroupTable) -> bool:
        """Take over a master's whole table if its data version differs; tell whether it did."""
        if table.data_version == self._data_version:
            return False
        self._table = dict(table.subscription_group_table)
        self._data_version = table.data_version
        await self._changed()
        return True

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

"""Configurations of consumer groups, kept in config/subscriptionGroup.json, and their creation on first use.

If the disk is full, a new group is known at once and written later. A slave copies its master's table when the data
version differs. Source: SubscriptionGroupManager.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec

from ha.broker.config_table import ConfigTable, check_names
from ha.broker.journal import Journal
from ha.broker.topics import topic_fault
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, GroupConfig, GroupTable
from ha.protocol.topic_names import RETRY_PREFIX

logger = logging.getLogger(__name__)


REQUEST_MODE_PREFIX = "halog.request.mode."
"""Prefix of the group attributes that contain request modes; the topic's name follows (pop/assignments.py)"""


def _read_table(content: bytes) -> GroupTable:
    table = java_json.read_as(GroupTable, content)
    groups = table.subscription_group_table
    check_names(SubscriptionGroups.kind, ((key, config.group_name) for key, config in groups.items()))
    return table


class SubscriptionGroups(ConfigTable[GroupConfig]):
    """The table of consumer groups. Call `load` before use."""

    kind = "group"

    async def load(self) -> None:
        """Reads the file. Raises CorruptLog and OSError as `ConfigFile.load` does."""
        loaded = await self._file.load(_read_table)
        if loaded is not None:
            self._table = loaded.subscription_group_table
            self._data_version = loaded.data_version
        self.file_position = loaded.log_position if loaded is not None else None

    async def find_or_create(self, group: str) -> GroupConfig | None:
        """Returns the group, created with defaults if it does not exist and auto-creation is on.

        Returns None if it can't be created: auto-creation is off, `group_count_max` is reached, its name or that of its
        retry topic is invalid, or the group's log could not store it. On a slave a new group exists only in memory.
        """
        found = self._table.get(group)
        if found is not None or not self._options.auto_create_group:
            return found
        is_invalid = topic_fault(group) or topic_fault(RETRY_PREFIX + group)
        if is_invalid or len(self._table) >= self._options.group_count_max:
            return None
        if self.journal is not None and self.journal.is_open:
            if group in self._unlogged:
                await self.journal.logged()
            elif self._count < self._options.group_count_max:
                await self._log(self.journal, {group: GroupConfig(group_name=group)})
            return self._table.get(group)
        found = self._table[group] = GroupConfig(group_name=group)
        if self.journal is not None or self._standing.is_slave:
            # Serves consumers of this slave until its master's table contains the group. The version stays the
            # master's; otherwise the slave would copy and write the whole table at every sync.
            return found
        await self._changed()
        return found

    async def update(self, groups: Iterable[GroupConfig]) -> str:
        """Creates or changes groups, all or none. Returns why it is not possible, or "".

        Keeps the request modes of a group (attributes with REQUEST_MODE_PREFIX), unless `groups` states them.
        """
        groups = list(groups)
        await self.wait_written(*(group.group_name for group in groups))
        updated = [_with_modes(group, self._table.get(group.group_name)) for group in groups]
        changed = {group.group_name: group for group in updated if self._table.get(group.group_name) != group}
        if not changed:
            return await self._unchanged()
        names = self._table.keys() | self._unlogged.keys() | changed.keys()
        if len(names) > max(self._options.group_count_max, len(self._table)):
            return f"this broker holds its maximum of {self._options.group_count_max} consumer groups"
        if self.journal is not None:
            return await self._log(self.journal, changed)
        self._table.update(changed)
        await self._changed()
        for name in changed:
            logger.info("group.changed group=%s", name)
        return ""

    async def delete(self, group: str) -> str:
        """Deletes a group if it exists. Returns why it is not possible, or ""."""
        if group not in self._table:
            return await self._unchanged()
        if self.journal is not None:
            return await self._log(self.journal, {group: None})
        del self._table[group]
        await self._changed()
        logger.info("group.deleted group=%s", group)
        return ""

    async def replace(self, table: GroupTable) -> bool:
        """Copies a master's whole table if its data version differs; returns whether it did."""
        if table.data_version == self._data_version:
            return False
        self.adopt(table.subscription_group_table, table.data_version)
        if self.journal is None:
            await self._save(self._file.save_when_possible)
        return True

    def adopt(self, table: Mapping[str, GroupConfig], version: DataVersion) -> None:
        """Replaces the table with the content of a master's table or of the group's log."""
        self._table = dict(table)
        self._data_version = version

    def snapshot(self) -> GroupTable:
        """Returns a copy of the table: the body of the answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201), and the
        content of subscriptionGroup.json."""
        return GroupTable(data_version=self._data_version, subscription_group_table=dict(self._table))

    def _add_to(self, journal: Journal, name: str, config: GroupConfig | None) -> None:
        journal.group(name, config, self._data_version)

    async def _changed(self) -> None:
        self._bump_version()
        await self._save(self._file.save_when_possible)


def _with_modes(group: GroupConfig, before: GroupConfig | None) -> GroupConfig:
    """Returns `group` with the request modes of `before` added, except those that `group` states itself."""
    attributes = {} if before is None else before.attributes
    modes = {key: value for key, value in attributes.items() if key.startswith(REQUEST_MODE_PREFIX)}
    return msgspec.structs.replace(group, attributes={**modes, **group.attributes}) if modes else group

"""The users of ACL 2.0 with their policies, kept in config/users.json.

RocketMQ keeps them in RocksDB (config/auth), separately on each broker. Here a slave copies its master's users, and in
a failover group they are part of the group's log, like topics. The file and the log contain the passwords, because
signatures can't be verified without them: anyone who can read the store can sign as any user.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import trio

from ha.broker.config_table import ConfigTable, check_names
from ha.broker.journal import Journal
from ha.protocol import java_json
from ha.protocol.access_bodies import UserConfig, UserTable
from ha.protocol.bodies import DataVersion

logger = logging.getLogger(__name__)

USER_COUNT_MAX = 10_000
"""Maximum number of users of a broker."""
RETRY_S = 1.0
"""Time before the next attempt to create a configured user."""


def _read_table(content: bytes) -> UserTable:
    table = java_json.read_as(UserTable, content)
    check_names(Users.kind, ((key, config.username) for key, config in table.user_table.items()))
    return table


class Users(ConfigTable[UserConfig]):
    """The users by name. Call `load` before use. A user is replaced as a whole, never changed in place."""

    kind = "user"

    async def load(self) -> None:
        """Reads the file. Raises CorruptLog and OSError as `ConfigFile.load` does."""
        loaded = await self._file.load(_read_table)
        if loaded is not None:
            self._table = loaded.user_table
            self._data_version = loaded.data_version
        self.file_position = loaded.log_position if loaded is not None else None

    async def put(self, user: UserConfig) -> str:
        """Creates or replaces a user. Returns "", or why the user was not stored or, in a failover group, may be lost.
        Raises DiskFailed."""
        name = user.username
        if self._table.get(name) == user:
            return await self._unchanged()
        if name not in self._table and self._count >= USER_COUNT_MAX:
            return f"this broker holds its maximum of {USER_COUNT_MAX} users"
        if self.journal is not None:
            return await self._log(self.journal, {name: user})
        self._table[name] = user
        await self._changed()
        logger.info("user.changed user=%r", user)
        return ""

    async def delete(self, name: str) -> str:
        """Deletes a user with its policies, if it exists. Returns "", or why this was not done or, in a failover group,
        may be lost. Raises DiskFailed."""
        if name not in self._table:
            return await self._unchanged()
        if self.journal is not None:
            return await self._log(self.journal, {name: None})
        del self._table[name]
        await self._changed()
        logger.info("user.deleted user=%r", name)
        return ""

    async def replace(self, table: Mapping[str, UserConfig]) -> bool:
        """Copies a master's users, which have no data version, if they differ; returns whether they did."""
        if table == self._table:
            return False
        self.adopt(table, self._data_version.next(self._wall_clock_ms()))
        if self.journal is None:
            await self._save(self._file.save_when_possible)
        return True

    def adopt(self, table: Mapping[str, UserConfig], version: DataVersion) -> None:
        """Replaces the table with the content of a master's table or of the group's log."""
        self._table = dict(table)
        self._data_version = version

    def snapshot(self) -> UserTable:
        """Returns a copy of the table: the content of users.json."""
        return UserTable(data_version=self._data_version, user_table=dict(self._table))

    async def create_missing(
        self, users: Sequence[UserConfig], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Creates those of `users`, from the configuration, that don't exist, then calls `task_status.started`.

        In a failover group it calls `task_status.started` first, as creating a user waits for the other members, and
        retries every `RETRY_S`. Otherwise creation fails only at USER_COUNT_MAX, and is not retried: users can be
        deleted once the broker has started.
        """
        if self.journal is not None:
            task_status.started()
        for user in users:
            while True:
                await self.wait_written(user.username)  # an administrator may be creating it
                if self.get(user.username) is not None:
                    break
                fault = await self.put(user)
                if not fault:
                    break
                logger.warning("user.create_failed user=%r reason=%r", user.username, fault)
                if self.journal is None:
                    break
                await trio.sleep(RETRY_S)
        if self.journal is None:
            task_status.started()

    def _add_to(self, journal: Journal, name: str, config: UserConfig | None) -> None:
        journal.user(name, config, self._data_version)

    async def _changed(self) -> None:
        self._bump_version()
        await self._save(self._file.save_when_possible)

"""Configurations by name, with a data version: the common part of topics (topics.py), consumer groups (groups.py)
and users (users.py).

They are kept in a file under config/. In a failover group the group's log defines them (journal.py): a change takes
effect when its record is in the log, and the file is written from the log's records (group_log.py).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, TypeVar

import trio

from ha.broker.config_file import ConfigFile
from ha.broker.journal import Journal, Logged
from ha.broker.options import BrokerOptions
from ha.broker.standing import Standing, fixed_standing
from ha.errors import RemoteProtocolError
from ha.protocol.access_bodies import UserConfig, UserTable
from ha.protocol.bodies import DataVersion, GroupConfig, GroupTable, LogPosition, TopicConfig, TopicConfigTable
from ha.protocol.group_records import config_size

logger = logging.getLogger(__name__)

Config = TypeVar("Config", TopicConfig, GroupConfig, UserConfig)

Save = Callable[[Callable[[], object]], Awaitable[None]]


def check_names(kind: str, names: Iterable[tuple[str, str]]) -> None:
    """Checks the keys of a file's entries against the names that the entries state: (key, name) pairs.

    Raises RemoteProtocolError if a key differs from its name, which means that the file is damaged.
    """
    for key, name in names:
        if key != name:
            raise RemoteProtocolError(f"the entry of {kind} {key!r} has the name {name!r}")


class ConfigTable(ABC, Generic[Config]):
    """Configurations by name. Each subclass has a `load`, to be called before use."""

    kind: str
    """Kind of configuration, as log events and remarks name it: topic, group or user"""

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
        self._table: dict[str, Config] = {}
        self._data_version = DataVersion()
        self._change_number = 0
        self._saved_number = 0
        self._saving = trio.Lock()
        self.journal: Journal | None = None
        """Collects changes for the log of a failover group; None outside a group"""
        self._unlogged: dict[str, int] = {}
        """Name -> number of its changes that are being written to the group's log"""
        self.file_position: LogPosition | None = None
        """Position of the loaded file in the group's log, if the file states it"""

    def __len__(self) -> int:
        return len(self._table)

    @property
    def _count(self) -> int:
        """Number of configurations, including those that are being created."""
        return len(self._table) + sum(name not in self._table for name in self._unlogged)

    def get(self, name: str) -> Config | None:
        """Returns the configuration of `name`, or None."""
        return self._table.get(name)

    @property
    def table(self) -> Mapping[str, Config]:
        """All configurations by name; read-only."""
        return self._table

    @property
    def data_version(self) -> DataVersion:
        """Version of the table; name servers and slaves compare it."""
        return self._data_version

    @abstractmethod
    def snapshot(self) -> TopicConfigTable | GroupTable | UserTable:
        """Returns a copy of the table, for answers to slaves and as the content of the file."""

    @abstractmethod
    def _add_to(self, journal: Journal, name: str, config: Config | None) -> None:
        """Adds one change to the journal."""

    def _set(self, name: str, config: Config | None) -> None:
        """Changes one configuration in memory; None deletes it."""
        if config is None:
            self._table.pop(name, None)
        else:
            self._table[name] = config

    def follow(self, changes: Mapping[str, Config | None], version: DataVersion | None) -> None:
        """Applies the next record of the group's log: changes (None: deleted), and a new data version if given."""
        for name, config in changes.items():
            self._set(name, config)
        if version is not None:
            self._data_version = version
        if changes or version is not None:
            self._notify()

    def _notify(self) -> None:
        """Called after the table has changed. A subclass overrides this to tell its subscribers."""

    def _bump_version(self) -> None:
        self._data_version = self._data_version.next(self._wall_clock_ms())

    async def _save(self, save: Save) -> None:
        """Writes the file, unless another caller writes this state of the table while this one waits for its turn.

        Cancellation, for example of a request whose connection closes, does not interrupt it: the change is already in
        the table, and nothing else would write it.
        """
        self._change_number += 1
        wanted = self._change_number
        with trio.CancelScope(shield=True):
            async with self._saving:
                if self._saved_number >= wanted:
                    return
                number = self._change_number
                await save(self.snapshot)
                self._saved_number = number

    async def wait_written(self, *names: str) -> None:
        """Waits until no change of `names` is being written.

        If a request then reads and changes them without a checkpoint in between, it can't overwrite another request's
        change that it has not seen.
        """
        while self.journal is not None and not self._unlogged.keys().isdisjoint(names):
            await self.journal.logged()

    async def _unchanged(self) -> str:
        """Waits until all earlier changes are acknowledged by the group; returns why they may be lost, or "".

        For requests whose configuration is the same as the present one. Returns "" at once outside a failover group.
        """
        return "" if self.journal is None else (await self.journal.logged()).fault

    async def _log(self, journal: Journal, changes: Mapping[str, Config | None]) -> str:
        """Writes changes to the group's log, and applies them once they are there. None deletes a configuration.

        Returns "" once they are acknowledged; otherwise why they may be lost, or were not made: one is too large, or
        this broker is not the master.
        """
        for name, config in changes.items():
            if config is not None and config_size(name, config) > journal.config_size_max:
                return f"a {self.kind}'s configuration may take {journal.config_size_max} bytes"
        for name, config in changes.items():
            self._unlogged[name] = self._unlogged.get(name, 0) + 1
            if journal.is_open:
                self._bump_version()
                self._add_to(journal, name, config)

        def done(logged: Logged) -> None:
            # Called before anything else is written to the log: a snapshot that follows has to contain the changes.
            for name in changes:
                count = self._unlogged.pop(name) - 1
                if count:
                    self._unlogged[name] = count
            if logged.status.is_stored:
                for name, config in changes.items():
                    self._set(name, config)
                    logger.info(f"{self.kind}.logged {self.kind}=%s config=%s", name, config)
                self._notify()

        return (await journal.logged(done)).fault

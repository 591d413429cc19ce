"""The tables of a broker: topics, groups, consumer offsets, delay offsets and users, each with its file under config/;
also the connected clients, and counters of reads.

In a failover group, the group's log defines the tables that have files (group_log.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from ha.broker.clients import ClientRegistry
from ha.broker.config_file import ConfigFile
from ha.broker.delay_offsets import DelayOffsetTable
from ha.broker.group_replay import LoadedTables, cut_offsets
from ha.broker.group_state import DELAYS, GROUPS, OFFSETS, TOPICS, USERS, Replica, TablesState, TablesView
from ha.broker.groups import SubscriptionGroups
from ha.broker.journal import Journal
from ha.broker.offsets import ConsumerOffsetTable
from ha.broker.options import BrokerOptions
from ha.broker.standing import Standing, fixed_standing
from ha.broker.throughput import GroupReads
from ha.broker.topics import Topics
from ha.broker.users import Users
from ha.broker.world import World
from ha.errors import DiskFull
from ha.protocol import java_json
from ha.protocol.access_bodies import UserTable
from ha.protocol.bodies import ConsumerOffsets, DelayOffsets, GroupTable, LogPosition, TopicConfigTable
from ha.protocol.group_records import TablesRecord
from ha.protocol.store_files import BROKER_FILE, BrokerFile
from ha.protocol.topic_names import TIMER_TOPIC
from ha.store.message_store import MessageStore

FILES = {
    TOPICS: "topics.json",
    GROUPS: "subscriptionGroup.json",
    OFFSETS: "consumerOffset.json",
    DELAYS: "delayOffset.json",
    USERS: "users.json",
}
"""File names by table."""


class TablesLog(Protocol):
    """The log of a failover group (`GroupLog`), as far as `Tables` uses it."""

    is_copy: bool

    @property
    def journal(self) -> Journal:
        """Collects changes that are to be written to the log."""
        ...

    @property
    def position(self) -> LogPosition:
        """Position of the last record applied to all tables."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the tables come from the log alone."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether the tables lack a record that they had when this broker was master, and that may be acknowledged."""
        ...

    async def load(self) -> None:
        """Applies the log to the tables read from files."""
        ...

    async def save(self) -> None:
        """Writes the files of changed tables."""
        ...

    def copied(self) -> None:
        """Records that a slave copied its master's tables."""
        ...


class Tables:
    """All tables, and the broker's standing. Call `load` before use."""

    def __init__(
        self, store: MessageStore, options: BrokerOptions, world: World, standing: Standing | None = None
    ) -> None:
        self.standing = fixed_standing(options) if standing is None else standing
        self._store = store
        self._options = options
        self._world = world
        self._files: dict[str, ConfigFile] = {}
        self.group_log: TablesLog | None = None
        """Set in a failover group, whose log defines the tables"""
        clock = world.wall_clock_ms
        self.topics = Topics(
            self._file(FILES[TOPICS]), options, standing=self.standing, wall_clock_ms=clock, queues=store.queues
        )
        self.groups = SubscriptionGroups(
            self._file(FILES[GROUPS]), options, wall_clock_ms=clock, standing=self.standing
        )
        self.offsets = ConsumerOffsetTable(
            self._file(FILES[OFFSETS]),
            options,
            standing=self.standing,
            taken_file=self._file("takenOffsets.json"),
            flush_log=self._flush_log,
        )
        self.delay_offsets = DelayOffsetTable(self._file(FILES[DELAYS]), wall_clock_ms=clock)
        self.users = Users(self._file(FILES[USERS]), options, wall_clock_ms=clock, standing=self.standing)
        self.clients = ClientRegistry(options)
        self.reads = GroupReads(key_count_max=options.offset_key_count_max)

    def _file(self, name: str, encode: Callable[[Any], bytes] = java_json.dumps_pretty) -> ConfigFile:
        world, path = self._world, self._options.config_dir / name
        made = ConfigFile(path, disk=world.disk, run_blocking=world.run_blocking, encode=encode)
        self._files[name] = made
        return made

    def keep_in_log(self, group_log: TablesLog) -> None:
        """Makes the log of a failover group define the tables: changes are written to it from now on. Call before
        `load`."""
        self.group_log = group_log
        for table in (self.topics, self.groups, self.offsets, self.delay_offsets, self.users):
            table.journal = group_log.journal

    async def load(self) -> None:
        """Reads the files and the group's log, and writes the broker's name to BROKER_FILE.

        Raises CorruptLog, naming the file, if a file and its `.bak` are damaged.
        """
        log = self._store.log
        await self.load_files()
        name = BrokerFile(self._options.broker_name)
        await self._file(BROKER_FILE, msgspec.json.encode).save_when_possible(lambda: name)
        if self.group_log is not None:
            await self.group_log.load()
        elif not self.standing.is_slave and log.dispatched_offset.value >= log.max_offset.value:
            # Otherwise damage keeps the queues from their ends, and nothing is stored until it is healed.
            self.offsets.start_as_master(partial(cut_offsets, self._store))

    async def load_files(self) -> None:
        """Reads only the files."""
        await self.topics.load(self._store.log.max_offset.value)
        await self.groups.load()
        await self.offsets.load()
        await self.users.load()
        await self.delay_offsets.load(self._store.log.max_offset.value)

    async def save(self) -> None:
        """Writes changed offsets, and tables that could not be written because the disk was full. Raises DiskFailed.

        The other tables are written when they change; in a failover group, all are written here.
        """
        await self.offsets.save()
        if self.group_log is not None:
            await self.group_log.save()
        for file in self._files.values():
            await file.catch_up()

    async def _flush_log(self) -> None:
        if not self.standing.is_slave:  # a slave keeps no state of POP
            await self._store.flusher.flush()

    @property
    def have_timer_messages(self) -> bool:
        """Whether the timer topic has messages in this broker's log."""
        return bool(self._store.queues.not_empty((TIMER_TOPIC,)))

    async def clear_deleted_topics(self) -> str:
        """Removes the dispatched messages of deleted topics from the queues. Returns "", or why that failed if the disk
        is full. Raises DiskFailed.

        Has to be called again later, for messages that are dispatched after this call. The offsets of the deletions
        must refer to this broker's log. So it may be called on a master, on a slave that has just copied them from its
        master, and in a failover group once the group's log is applied.
        """
        try:
            await self._store.clear_topics(self.topics.deleted)
        except DiskFull as error:
            return str(error)
        return ""

    # ---- in a failover group

    @property
    def log_position(self) -> LogPosition | None:
        """Position of the last record of the group's log that is applied to all tables; None outside a
        failover group."""
        return None if self.group_log is None else self.group_log.position

    @property
    def are_complete(self) -> bool:
        """Whether the tables are complete, except for the latest changes.

        False on a slave of a failover group that has neither read a snapshot of the log nor copied its master's tables:
        after a start it reads the log's records only once a master has confirmed them. Also false if `are_behind`.
        """
        log = self.group_log
        return log is None or not self.standing.is_slave or ((log.is_whole or log.is_copy) and not self.are_behind)

    @property
    def are_behind(self) -> bool:
        """Whether a former master lacks changes that it had as master, and that may be acknowledged."""
        return self.group_log is not None and self.standing.is_slave and self.group_log.is_behind

    def accepts_copy(self, position: LogPosition | None) -> bool:
        """Returns whether a slave copies its master's tables, which contain the group's log up to `position`.

        False if this slave's tables come from the log alone, or contain a later record. A master without a position
        keeps its tables in files, as RocketMQ does; they are always copied.
        """
        log = self.group_log
        if log is None or position is None:
            return True
        return not log.is_whole and position.queue_offset >= log.position.queue_offset

    def copied(self) -> None:
        """Tells the group's log, if there is one, that a slave has copied all of its master's tables."""
        if self.group_log is not None:
            self.group_log.copied()

    def view(self) -> TablesView:
        """Returns a view of the current tables, without copying them."""
        return TablesView(
            self.topics.table,
            self.topics.deleted,
            self.groups.table,
            self.offsets.table,
            self.delay_offsets.table,
            self.users.table,
            self.topics.data_version,
            self.groups.data_version,
            self.users.data_version,
        )

    def state(self) -> TablesState:
        """Returns a copy of the current tables."""
        view = self.view()
        return TablesState(
            topics=dict(self.topics.table),
            deleted_topics=dict(self.topics.deleted),
            groups=dict(self.groups.table),
            offsets={key: dict(by_queue) for key, by_queue in view.offsets.items()},
            delays=dict(view.delays),
            users=dict(self.users.table),
            topics_version=self.topics.data_version,
            groups_version=self.groups.data_version,
            users_version=self.users.data_version,
        )

    def as_loaded(self) -> LoadedTables:
        """Returns the content of the files read by `load_files`."""
        loaded = LoadedTables(state=self.state(), positions={}, foreign=set())
        for section, position in (
            (TOPICS, self.topics.file_position),
            (GROUPS, self.groups.file_position),
            (OFFSETS, self.offsets.file_position),
            (DELAYS, self.delay_offsets.file_position),
            (USERS, self.users.file_position),
        ):
            file = self._files[FILES[section]]
            if position is not None:
                loaded.positions[section] = position
            elif file.is_found and not file.is_backup:
                loaded.foreign.add(section)
        return loaded

    def adopt(self, state: TablesState) -> None:
        """Replaces the tables with the content of the group's log."""
        self.topics.adopt(state.topics, state.topics_version, state.deleted_topics)
        self.groups.adopt(state.groups, state.groups_version)
        self.users.adopt(state.users, state.users_version)
        self.offsets.adopt(state.offsets)
        self.delay_offsets.adopt(state.delays, self._store.log.max_offset.value)

    def follow(self, record: TablesRecord) -> None:
        """Applies the next record of the group's log."""
        if record.topics or record.deleted_topics or record.topics_version is not None:
            self.topics.follow_deleted(record.deleted_topics)
            self.topics.follow(record.topics, record.topics_version)
        self.groups.follow(record.groups, record.groups_version)
        self.users.follow(record.users, record.users_version)
        self.offsets.follow(record.removed_offsets, record.offsets)
        if record.delays:
            self.delay_offsets.adopt({**self.delay_offsets.table, **record.delays}, self._store.log.max_offset.value)

    def begin_epoch(self) -> None:
        """Prepares the offsets for an epoch of this broker as master: see `ConsumerOffsetTable.begin_epoch`."""
        self.offsets.begin_epoch(partial(cut_offsets, self._store))

    async def save_section(self, section: str, replica: Callable[[], Replica]) -> None:
        """Writes the file of table `section` with the content that `replica()` has when the file is written."""
        await self._files[FILES[section]].save_when_possible(lambda: _file_content(section, replica()))


def _file_content(
    section: str, replica: Replica
) -> TopicConfigTable | GroupTable | ConsumerOffsets | DelayOffsets | UserTable:
    """Returns a copy of table `section` of a replica, as its file stores it."""
    state, position = replica.state, replica.reported_position
    if section == TOPICS:
        version = state.topics_version
        return TopicConfigTable(
            data_version=version,
            deleted_topics=dict(state.deleted_topics) or None,
            log_position=position,
            topic_config_table=dict(state.topics),
        )
    if section == GROUPS:
        version = state.groups_version
        return GroupTable(data_version=version, log_position=position, subscription_group_table=dict(state.groups))
    if section == OFFSETS:
        offsets = {key: dict(by_queue) for key, by_queue in state.offsets.items()}
        return ConsumerOffsets(log_position=position, offset_table=offsets)
    if section == USERS:
        return UserTable(data_version=state.users_version, log_position=position, user_table=dict(state.users))
    return DelayOffsets(log_position=position, offset_table=dict(state.delays))

"""The topics of this broker: their queues and permissions, kept in config/topics.json, and their creation on first use.

Reads are synchronous. A change is written to the file, or in a failover group to the group's log, before it takes
effect, so that no message is ever in a topic that would be unknown after a restart. Then the subscribers are notified
(registration at the name servers). If the disk is full, no topic is created; a slave still copies its master's table,
and writes it to the file when there is space. Source: TopicConfigManager.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping

import trio

from ha.broker.config_file import ConfigFile
from ha.broker.config_table import ConfigTable, Save, check_names
from ha.broker.journal import Journal, Logged
from ha.broker.options import BrokerOptions
from ha.broker.standing import Standing
from ha.errors import DiskFull
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, TopicConfig, TopicConfigTable
from ha.protocol.codes import Permission
from ha.protocol.group_records import remember_deleted
from ha.protocol.topic_names import (
    AUTO_CREATE_TOPIC,
    DLQ_PREFIX,
    GIVEN_UP_TOPIC,
    HALF_TOPIC,
    NAME_SIZE_MAX,
    OP_TOPIC,
    POP_TOPIC,
    REPLY_SUFFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TABLES_TOPIC,
    TIMER_TOPIC,
)
from ha.store.consume_queues import ConsumeQueues

logger = logging.getLogger(__name__)

TOPIC_LENGTH_MAX = 127
RETRY_TOPIC_LENGTH_MAX = 255

ANNOUNCE_TIMEOUT_S = 2.0
"""Maximum wait for the name servers; below the 3 s that clients wait for an answer."""

NO_SEND_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        GIVEN_UP_TOPIC,
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        TABLES_TOPIC,
        TIMER_TOPIC,
        POP_TOPIC,
    }
)
"""Topics that only the broker itself may write to (TopicValidator.NOT_ALLOWED_SEND_TOPIC_SET)."""

_TOPIC_PATTERN = re.compile(r"[%|a-zA-Z0-9_-]+")
_READ_WRITE = Permission.READ | Permission.WRITE
_INHERITED = _READ_WRITE | Permission.INHERIT


def topic_fault(topic: str) -> str:
    """Returns why `topic` is not a valid topic name, in RocketMQ's words; "" if it is valid."""
    if not topic.strip():
        return "The specified topic is blank."
    if _TOPIC_PATTERN.fullmatch(topic) is None:
        return "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    is_long = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    length_max = RETRY_TOPIC_LENGTH_MAX if is_long else TOPIC_LENGTH_MAX
    if len(topic) > length_max:
        return f"The specified topic is longer than topic max length {length_max}."
    return ""


def system_topics(options: BrokerOptions) -> list[TopicConfig]:
    """Returns the topics that every broker with these options has."""
    broker_perm = _INHERITED
    topics = [
        _topic("SELF_TEST_TOPIC", 1),
        _topic("BenchmarkTest", 1024),
        _topic(options.cluster_name, 16, broker_perm),
        _topic(options.broker_name, 1, broker_perm),
        _topic("OFFSET_MOVED_EVENT", 1),
        _topic(SCHEDULE_TOPIC, 18),
        _topic(options.cluster_name + REPLY_SUFFIX, 1),
        _topic(HALF_TOPIC, 1),
        _topic(OP_TOPIC, 1),
        _topic(POP_TOPIC, 1, Permission.READ),
    ]
    if options.timer_enable:
        topics.append(_topic(TIMER_TOPIC, 1))
    if options.keeps_tables_in_log:
        topics.append(_topic(TABLES_TOPIC, 1, Permission.READ))
    if options.auto_create_topic:
        topics.append(_topic(AUTO_CREATE_TOPIC, options.default_topic_queue_nums, _INHERITED))
    return topics


def _read_table(content: bytes) -> TopicConfigTable:
    table = java_json.read_as(TopicConfigTable, content)
    check_names(Topics.kind, ((key, config.topic_name) for key, config in table.topic_config_table.items()))
    return table


def _topic(topic: str, queue_count: int, perm: int = _READ_WRITE) -> TopicConfig:
    return TopicConfig(topic_name=topic, read_queue_nums=queue_count, write_queue_nums=queue_count, perm=perm)


def _apply(changes: Mapping[str, TopicConfig | None], table: dict[str, TopicConfig]) -> None:
    for name, config in changes.items():
        if config is None:
            table.pop(name, None)
        else:
            table[name] = config


class Topics(ConfigTable[TopicConfig]):
    """The topics by name. Call `load` before use."""

    kind = "topic"

    def __init__(
        self,
        file: ConfigFile,
        options: BrokerOptions,
        *,
        wall_clock_ms: Callable[[], int],
        standing: Standing | None = None,
        queues: ConsumeQueues | None = None,
    ) -> None:
        super().__init__(file, options, wall_clock_ms=wall_clock_ms, standing=standing)
        self._queues = queues
        self._deleted: dict[str, int] = {}
        self._deleting = trio.Lock()
        """Serializes `delete_messages` without a journal, so that undoing a failed call does not undo another one"""
        self._deleted_by_master: set[str] = set()
        """Topics that the master of this slave deleted, and that still have queues here"""
        self._unsaved: dict[str, TopicConfig | None] = {}
        """Changes being written to the file, None for a deletion; they are in the table once the file has them"""
        self._subscribers: list[Callable[[], None]] = []
        self.wait_told: Callable[[], Awaitable[None]] | None = None
        """Waits until the current table was sent to the name servers; None if there are none. Set by the node"""

    async def load(self, log_end: int = 0) -> None:
        """Reads the file and adds missing system topics. Raises CorruptLog if both file and `.bak` are damaged.

        A master without failover lowers the physical offsets of deletions to `log_end`: if its store was emptied, new
        messages get offsets below the old ones, and must not count as deleted.
        """
        loaded = await self._file.load(_read_table)
        if loaded is not None:
            self._table = dict(loaded.topic_config_table)
            self._data_version = loaded.data_version
            deleted = loaded.deleted_topics or {}
            end = 1 << 63 if self._standing.is_slave or self.journal is not None else log_end
            self._deleted = {topic: min(before, end) for topic, before in deleted.items()}
        self.file_position = loaded.log_position if loaded is not None else None
        self._add_system_topics()
        if self.journal is None:
            await self._save_and_notify(self._file.save_when_possible)

    def _add_system_topics(self) -> None:
        for config in system_topics(self._options):
            self._table.setdefault(config.topic_name, config)

    def snapshot(self) -> TopicConfigTable:
        """Returns a copy of the table, as sent in answers to GET_ALL_TOPIC_CONFIG (21) and in registrations, and as
        stored in topics.json."""
        return TopicConfigTable(
            topic_config_table=dict(self._table),
            data_version=self._data_version,
            deleted_topics=dict(self._deleted) or None,
        )

    @property
    def deleted(self) -> Mapping[str, int]:
        """Topic -> physical offset before which its messages are deleted; at most DELETED_TOPICS_MAX topics, those
        deleted last."""
        return self._deleted

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Registers `callback`, called after every change once it is saved."""
        self._subscribers.append(callback)

    def get_readable(self, topic: str) -> TopicConfig | None:
        """As `get`, for readers: a slave knows a topic as soon as messages of it have been replicated.

        A slave copies topics from its master every few seconds, but receives messages much faster.
        """
        config = self._table.get(topic)
        if config is not None or not self._standing.is_slave or topic in self._deleted_by_master:
            return config
        found = self._queues.not_empty((topic,)) if self._queues is not None else None
        return _topic(topic, max(queue.queue_id for queue in found) + 1, Permission.READ) if found else None

    async def create_on_send(self, topic: str, default_topic: str, queue_count: int) -> TopicConfig | str:
        """Returns the configuration of `topic`, created from the template `default_topic` if it doesn't exist; or the
        reason why it can't be created.

        Source: TopicConfigManager.createTopicInSendMessageMethod. The template must have the inherit permission, which
        is not passed on; the new topic gets the smaller of `queue_count` and the template's write queues.
        """
        config = self._table.get(topic) or await self._settled(topic)
        if config is not None:
            return config
        pattern = self._table.get(default_topic)
        if pattern is None:
            return f"the default topic {default_topic} does not exist"
        perm = pattern.perm
        if default_topic == AUTO_CREATE_TOPIC and not self._options.auto_create_topic:
            perm = _READ_WRITE
        if not perm & Permission.INHERIT:
            return f"the default topic {default_topic} may not be inherited (autoCreateTopicEnable)"
        count = max(0, min(queue_count, pattern.write_queue_nums))
        return await self._create(_topic(topic, count, perm & ~Permission.INHERIT))

    async def ensure(self, topic: str, queue_count: int) -> TopicConfig | str:
        """Returns the configuration of `topic`, created with `queue_count` queues if it doesn't exist; or the reason
        why it can't be created."""
        config = self._table.get(topic) or await self._settled(topic)
        return config or await self._create(_topic(topic, queue_count, _READ_WRITE))

    async def update(self, config: TopicConfig) -> str:
        """Creates or changes a topic. Returns why it is not possible, or ""."""
        name = config.topic_name
        before = await self._settled(name)
        if before is None:
            made = await self._create(config)
            return made if isinstance(made, str) else ""
        if before == config:
            return await self._unchanged()
        fault = await self._change(name, config)
        if fault:
            return fault
        if self.journal is None:
            logger.info(
                "topic.changed topic=%s read_queues=%d write_queues=%d perm=%d",
                name,
                config.read_queue_nums,
                config.write_queue_nums,
                config.perm,
            )
        await self.announce()
        return ""

    async def delete(self, topic: str) -> str:
        """Deletes a topic if it exists. Returns why it is not possible, or ""."""
        if await self._settled(topic) is None:
            return await self._unchanged()
        fault = await self._change(topic, None)
        if not fault and self.journal is None:
            logger.info("topic.deleted topic=%s", topic)
        return fault

    async def delete_messages(self, topics: Iterable[str], before: int) -> str:
        """Records that the messages of `topics` before a physical offset are deleted, for restarts and for slaves.

        Returns why it is not possible, or "". The messages stay in the queues until `Tables.clear_deleted_topics`.
        """
        deleted = dict.fromkeys(topics, before)
        if not deleted:
            return ""
        if self.journal is not None:
            self._bump_version()
            self.journal.deleted_topics(deleted, self._data_version)

            def done(logged: Logged) -> None:
                if logged.status.is_stored:
                    self.follow_deleted(deleted)

            return (await self.journal.logged(done)).fault
        async with self._deleting:
            before_it = self._deleted
            self._deleted = dict(before_it)
            self.follow_deleted(deleted)
            self._bump_version()
            try:
                await self._save_and_notify(self._file.save)
            except DiskFull as error:
                self._deleted = before_it
                return str(error)
        return ""

    def follow_deleted(self, deleted: Mapping[str, int]) -> None:
        """Adds topics whose messages before a physical offset are deleted."""
        remember_deleted(self._deleted, deleted)

    async def _change(self, name: str, config: TopicConfig | None) -> str:
        """Writes a change to the group's log or the file; None deletes the topic. Returns why it failed, or ""."""
        if self.journal is not None:
            return await self._log(self.journal, {name: config})
        self._unsaved[name] = config
        try:
            await self._save_and_notify(self._file.save)
        except DiskFull as error:
            if name in self._unsaved and self._unsaved[name] is config:
                del self._unsaved[name]
                return str(error)
            # Otherwise the write of another change, before this one, has included it.
        return ""

    async def wait_written(self, *names: str) -> None:
        """Waits until no change of `names` is being written, like `ConfigTable.wait_written`."""
        for name in names:
            await self._settled(name)
        await super().wait_written(*names)

    async def _settled(self, name: str) -> TopicConfig | None:
        """Waits until no change of the topic is being written; returns the topic, or None if it does not exist."""
        while name in self._unsaved:
            async with self._saving:
                pass
        return self._table.get(name)

    async def replace(self, table: TopicConfigTable) -> bool:
        """Copies a master's whole table if its data version differs; returns whether it did."""
        if table.data_version == self._data_version:
            return False
        self._take_over(table.topic_config_table, table.data_version, table.deleted_topics or {})
        if self.journal is None:
            await self._save_and_notify(self._file.save_when_possible)
        else:
            self._notify()
        return True

    def _take_over(self, table: Mapping[str, TopicConfig], version: DataVersion, deleted: Mapping[str, int]) -> None:
        if self._queues is not None:
            gone = (self._table.keys() | self._deleted_by_master) - table.keys()
            self._deleted_by_master = gone & self._queues.topics().keys() if gone else set()
        self._table = dict(table)
        self._deleted = {}
        self.follow_deleted(deleted)
        self._data_version = version

    # ---- in a failover group

    def adopt(
        self, table: Mapping[str, TopicConfig], version: DataVersion, deleted: Mapping[str, int] | None = None
    ) -> None:
        """Replaces the table with the content of the group's log, plus this broker's system topics."""
        if (table, version, deleted or {}) == (self._table, self._data_version, self._deleted):
            return
        self._take_over(table, version, deleted or {})
        self._add_system_topics()
        self._notify()

    def _set(self, name: str, config: TopicConfig | None) -> None:
        if config is not None:
            self._deleted_by_master.discard(name)
        elif name in self._table and self._queues is not None and name in self._queues.topics():
            self._deleted_by_master.add(name)
        super()._set(name, config)

    def _add_to(self, journal: Journal, name: str, config: TopicConfig | None) -> None:
        journal.topic(name, config, self._data_version)

    # ---- changes

    @property
    def _count(self) -> int:
        return super()._count + sum(name not in self._table for name in self._unsaved)

    async def _create(self, config: TopicConfig) -> TopicConfig | str:
        name = config.topic_name
        if self.journal is not None and name in self._unlogged:
            fault = (await self.journal.logged()).fault
        elif self._count >= self._options.topic_count_max:
            return f"this broker holds its maximum of {self._options.topic_count_max} topics"
        elif len(name.encode(errors="surrogatepass")) > NAME_SIZE_MAX:
            return f"the name of topic {name} is longer than {NAME_SIZE_MAX} bytes"
        else:
            fault = await self._change(name, config)
        if fault:
            return fault
        if self.journal is None:
            logger.info("topic.created topic=%s queues=%d perm=%d", name, config.write_queue_nums, config.perm)
        await self.announce()
        return self._table.get(name) or f"the topic {name} is deleted"

    async def announce(self) -> None:
        """Waits at most ANNOUNCE_TIMEOUT_S until the current table was sent to the name servers.

        A client that has just created a topic may look up its route at once. (RocketMQ: registerBrokerAll.)
        """
        if self.wait_told is not None:
            with trio.move_on_after(ANNOUNCE_TIMEOUT_S):
                await self.wait_told()

    async def _save_and_notify(self, save: Save) -> None:
        """Writes the file with the changes in `_unsaved`, applies these, and notifies the subscribers."""
        changes: dict[str, TopicConfig | None] = {}
        before = after = self._data_version

        def copy() -> TopicConfigTable:
            nonlocal before, after
            content = self.snapshot()
            before = after = self._data_version
            if self._unsaved:  # new version: slaves may have copied the table without these changes under this one
                changes.update(self._unsaved)
                _apply(changes, content.topic_config_table)
                after = content.data_version = before.next(self._wall_clock_ms())
            return content

        async def save_changes(_: Callable[[], object]) -> None:
            await save(copy)
            if changes:
                _apply(changes, self._table)
                for name in changes:
                    del self._unsaved[name]
                is_latest = self._data_version is before
                self._data_version = after if is_latest else self._data_version.next(self._wall_clock_ms())
            self._notify()

        await self._save(save_changes)

    def _notify(self) -> None:
        for callback in self._subscribers:
            callback()

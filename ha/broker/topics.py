"""The topics of this broker: their queues and permissions, kept in config/topics.json, and their creation on first use.

Reading is synchronous. Whatever changes the table writes the file before it returns, so a message is never in a topic
that a restart would not know, then tells the subscribers (registration at the name servers). On a full disk no topic is
created; a master's table is taken over all the same and written when there is room. In a failover group a change is
made when its record is in the group's log (journal.py). Source: TopicConfigManager.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import trio

from ha.broker.config_file import ConfigFile
from ha.broker.options import BrokerOptions
from ha.broker.standing import Standing, fixed_standing
from ha.errors import DiskFull
from ha.protocol import java_json
from ha.protocol.bodies import DataVersion, LogPosition, TopicConfig, TopicConfigTable
from ha.protocol.codes import Permission
from ha.protocol.group_records import config_size
from ha.protocol.topic_names import (
    AUTO_CREATE_TOPIC,
    DLQ_PREFIX,
    GIVEN_UP_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    REPLY_SUFFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TABLES_TOPIC,
)

if TYPE_CHECKING:
    from ha.broker.journal import Journal, Logged
    from ha.store.consume_queue import ConsumeQueues

logger = logging.getLogger(__name__)

TOPIC_LENGTH_MAX = 127
RETRY_TOPIC_LENGTH_MAX = 255

ANNOUNCE_TIMEOUT_S = 2.0
"""Less than the 3 s that clients wait for an answer."""

NO_SEND_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        GIVEN_UP_TOPIC,
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        TABLES_TOPIC,
    }
)
"""Topics that only the broker itself may write to (TopicValidator.NOT_ALLOWED_SEND_TOPIC_SET)."""

_TOPIC_PATTERN = re.compile(r"[%|a-zA-Z0-9_-]+")
_READ_WRITE = Permission.READ | Permission.WRITE
_INHERITED = _READ_WRITE | Permission.INHERIT


def topic_fault(topic: str) -> str:
    """Why `topic` can't be a topic's name, in RocketMQ's words; "" if it can."""
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
    """The topics that a broker has from the start."""
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
    ]
    if options.keeps_tables_in_log:
        topics.append(_topic(TABLES_TOPIC, 1, Permission.READ))
    if options.auto_create_topic:
        topics.append(_topic(AUTO_CREATE_TOPIC, options.default_topic_queue_nums, _INHERITED))
    return topics


def _topic(topic: str, queue_count: int, perm: int = _READ_WRITE) -> TopicConfig:
    return TopicConfig(topic_name=topic, read_queue_nums=queue_count, write_queue_nums=queue_count, perm=perm)


class Topics:
    """The topic table. `load` before use."""

    def __init__(
        self,
        file: ConfigFile,
        options: BrokerOptions,
        *,
        wall_clock_ms: Callable[[], int],
        standing: Standing | None = None,
        queues: ConsumeQueues | None = None,
    ) -> None:
        self._file = file
        self._options = options
        self._standing = fixed_standing(options) if standing is None else standing
        self._wall_clock_ms = wall_clock_ms
        self._queues = queues
        self._table: dict[str, TopicConfig] = {}
        self._data_version = DataVersion()
        self._dropped: set[str] = set()
        """On a slave: what its master has deleted, although messages of it are still in the log"""
        self._subscribers: list[Callable[[], None]] = []
        self._change_number = 0
        self._saved_number = 0
        self._saving = trio.Lock()
        self.wait_told: Callable[[], Awaitable[None]] | None = None
        """Waits until the name servers know the table as it is"""
        self.journal: Journal | None = None
        """In a failover group, what writes changes into its log"""
        self._unlogged: dict[str, int] = {}
        """Topics of which a record is being written, and how many"""
        self.file_position: LogPosition | None = None
        """Where in the group's log the file that was loaded stands, if it says so"""

    async def load(self) -> None:
        """Read the file, then add the system topics that it lacks. Raises CorruptLog if file and `.bak` are damaged."""
        loaded = await self._file.load(partial(java_json.read_as, TopicConfigTable))
        if loaded is not None:
            self._table = dict(loaded.topic_config_table)
            self._data_version = loaded.data_version
        self.file_position = loaded.log_position if loaded is not None else None
        self._add_system_topics()
        if self.journal is None:
            await self._changed(self._file.save_when_possible)

    def _add_system_topics(self) -> None:
        for config in system_topics(self._options):
            self._table.setdefault(config.topic_name, config)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def data_version(self) -> DataVersion:
        """Version of the table; the name server and slaves compare it."""
        return self._data_version

    def snapshot(self) -> TopicConfigTable:
        """The table as it is now: body of 21 and of broker registration, content of topics.json."""
        return TopicConfigTable(topic_config_table=dict(self._table), data_version=self._data_version)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change, once it is saved."""
        self._subscribers.append(callback)

    def get(self, topic: str) -> TopicConfig | None:
        """The topic's configuration, or None."""
        return self._table.get(topic)

    @property
    def table(self) -> Mapping[str, TopicConfig]:
        """All of them, by name; not to be changed."""
        return self._table

    def get_readable(self, topic: str) -> TopicConfig | None:
        """The same for readers: on a slave a topic counts as known as soon as messages of it have been replicated.

        A slave learns topics from its master every few seconds, and messages much faster.
        """
        config = self._table.get(topic)
        if config is None and self._standing.is_slave and self._queues is not None and topic not in self._dropped:
            queue_ids = self._queues.topics().get(topic)
            if queue_ids:
                return _topic(topic, max(queue_ids) + 1, Permission.READ)
        return config

    async def create_on_send(self, topic: str, default_topic: str, queue_count: int) -> TopicConfig | str:
        """Create `topic` after the pattern of `default_topic`, or say why not.

        As TopicConfigManager.createTopicInSendMessageMethod: the pattern must have the inherit permission, which is not
        passed on; the new topic gets the smaller of `queue_count` and the pattern's write queues.
        """
        config = self._table.get(topic)
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

    async def ensure(self, topic: str, queue_count: int, perm: int = _READ_WRITE) -> TopicConfig | str:
        """The topic, created with `queue_count` queues if it doesn't exist, or why it can't be created."""
        return self._table.get(topic) or await self._create(_topic(topic, queue_count, perm))

    async def update(self, config: TopicConfig) -> str:
        """Make a topic as `config` says, or change it into that. Returns why it can't be done, or ""."""
        name = config.topic_name
        before = self._table.get(name)
        if before is None:
            made = await self._create(config)
            return made if isinstance(made, str) else ""
        if before == config:
            return ""
        if self.journal is not None:
            fault = await self._log(self.journal, name, config)
            if not fault:
                await self.announce()
            return fault
        self._table[name] = config
        self._data_version = self._data_version.next(self._wall_clock_ms())
        try:
            await self._changed(self._file.save)
        except DiskFull as error:
            self._table[name] = before
            return str(error)
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
        """Forget a topic, if it is there. Returns why that can't be done, or ""."""
        if self.journal is not None:
            return await self._log(self.journal, topic, None) if topic in self._table else ""
        before = self._table.pop(topic, None)
        if before is None:
            return ""
        self._data_version = self._data_version.next(self._wall_clock_ms())
        try:
            await self._changed(self._file.save)
        except DiskFull as error:
            self._table.setdefault(topic, before)
            return str(error)
        logger.info("topic.deleted topic=%s", topic)
        return ""

    async def replace(self, table: TopicConfigTable) -> bool:
        """Take over a master's whole table if its data version differs; tell whether it did."""
        if table.data_version == self._data_version:
            return False
        self._take_over(table.topic_config_table, table.data_version)
        if self.journal is None:
            await self._changed(self._file.save_when_possible)
        else:
            self._tell()
        return True

    def _take_over(self, table: Mapping[str, TopicConfig], version: DataVersion) -> None:
        if self._queues is not None:
            known = self._table.keys() | self._dropped
            self._dropped = (known - table.keys()) & self._queues.topics().keys()
        self._table = dict(table)
        self._data_version = version

    # ---- in a failover group

    def adopt(self, table: Mapping[str, TopicConfig], version: DataVersion) -> None:
        """Be what the group's log says, with this broker's system topics."""
        if table == self._table and version == self._data_version:
            return
        self._take_over(table, version)
        self._add_system_topics()
        self._tell()

    def follow(self, changes: Mapping[str, TopicConfig | None], version: DataVersion | None) -> None:
        """Make the changes that the next record of the group's log tells."""
        for name, config in changes.items():
            self._set(name, config)
        if version is not None:
            self._data_version = version
        if changes or version is not None:
            self._tell()

    def _set(self, name: str, config: TopicConfig | None) -> None:
        if config is not None:
            self._table[name] = config
            self._dropped.discard(name)
        elif self._table.pop(name, None) is not None and self._queues is not None and name in self._queues.topics():
            self._dropped.add(name)

    async def _log(self, journal: Journal, name: str, config: TopicConfig | None) -> str:
        """Have a change written to the group's log, and make it when it is there. Returns why it may be lost, or ""."""
        if config is not None and config_size(name, config) > journal.config_size_max:
            return f"a topic's configuration may take {journal.config_size_max} bytes"
        if journal.is_open:
            self._data_version = self._data_version.next(self._wall_clock_ms())
            journal.topic(name, config, self._data_version)

        def done(logged: Logged) -> None:
            # At once, before anything else is written: a snapshot that comes next has to say it, too.
            count = self._unlogged.pop(name) - 1
            if count:
                self._unlogged[name] = count
            if logged.status.is_stored:
                self._set(name, config)

        self._unlogged[name] = self._unlogged.get(name, 0) + 1
        logged = await journal.logged(done)
        if logged.status.is_stored:
            logger.info("topic.logged topic=%s config=%s", name, config)
            self._tell()
        return logged.fault

    # ---- changes

    async def _create(self, config: TopicConfig) -> TopicConfig | str:
        if len(self._table) + len(self._unlogged) >= self._options.topic_count_max:
            return f"this broker holds its maximum of {self._options.topic_count_max} topics"
        if self.journal is not None:
            name = config.topic_name
            if name in self._unlogged:
                fault = (await self.journal.logged()).fault
            else:
                fault = await self._log(self.journal, name, config)
            if fault:
                return fault
            await self.announce()
            return self._table.get(name) or f"the topic {name} is deleted"
        self._table[config.topic_name] = config
        self._data_version = self._data_version.next(self._wall_clock_ms())
        try:
            await self._changed(self._file.save)
        except DiskFull as error:
            self._table.pop(config.topic_name, None)
            return str(error)
        logger.info("topic.created topic=%s queues=%d perm=%d", config.topic_name, config.write_queue_nums, config.perm)
        await self.announce()
        return config

    async def announce(self) -> None:
        """Wait until the name servers know the table as it is, but not for long: who made a topic by a send, or hears
        that it is made, may ask for its route at once. (RocketMQ tells them before it goes on, too: registerBrokerAll.)
        """
        if self.wait_told is not None:
            with trio.move_on_after(ANNOUNCE_TIMEOUT_S):
                await self.wait_told()

    async def _changed(self, save: Callable[[Callable[[], bytes]], Awaitable[None]]) -> None:
        self._change_number += 1
        wanted = self._change_number
        async with self._saving:
            if self._saved_number < wanted:
                number = self._change_number
                await save(lambda: java_json.dumps_pretty(self.snapshot()))
                self._saved_number = number
        self._tell()

    def _tell(self) -> None:
        for callback in self._subscribers:
            callback()

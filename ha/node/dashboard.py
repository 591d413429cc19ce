"""Provides the dashboard's data about topics, queues and groups, from the broker's tables and the consume queues.

Each call computes one page, and yields to other tasks every few queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import trio

from ha.admin.dashboard.formats import duration
from ha.admin.dashboard.source import (
    Counts,
    FoundMessages,
    Group,
    GroupDetail,
    GroupMember,
    Groups,
    GroupTopic,
    MessageLine,
    Missing,
    Neighbour,
    Queue,
    Topic,
    TopicDetail,
    Topics,
)
from ha.broker.clients import ConsumerGroup
from ha.broker.pop.service import GroupInFlight
from ha.broker.queue_times import known_store_time_ms, offset_at
from ha.protocol.bodies import TopicConfig
from ha.protocol.codes import Permission
from ha.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_TOPIC_PREFIX

from .group_progress import GroupProgress, topics_of, yield_sometimes
from .history import History
from .messages import MessageBrowser, queue_range, reads_files
from .node import Node
from .ports import join
from .status import describe

SEARCH_S = 2.0
"""Time in seconds after which a search of all topics skips the remaining topics, and returns the messages found so
far."""
MEMBER_COUNT_MAX = 200
"""Maximum number of listed members of a group."""


class NodeDashboard(MessageBrowser):
    """Implements `DashboardSource` for one node."""

    def __init__(self, node: Node, history: History, neighbours: Callable[[], Sequence[Neighbour]] = tuple) -> None:
        super().__init__(node.store)
        self._node = node
        self._history = history
        self.neighbours = neighbours
        self._tables = node.broker.tables
        self._progress = GroupProgress(node.store, self._tables)
        self._system_names = node.broker.admin.topics.system_names()

    @property
    def is_content_open(self) -> bool:
        """See `DashboardSource.is_content_open`."""
        config = self._node.config
        return (
            not (config.acl_enable or config.authentication_enabled) and config.tls_server_need_client_auth != "require"
        )

    def status(self) -> Mapping[str, object]:
        """See `DashboardSource.status`."""
        return describe(self._node)

    def counts(self) -> Counts:
        """See `DashboardSource.counts`."""
        return Counts(self._node.broker.put_service.stored_count, self._tables.reads.message_count)

    # ---- topics

    @reads_files
    async def topics(self, search: str, *, with_system: bool, begin: int, count: int) -> Topics:
        """See `DashboardSource.topics`."""
        wanted = search.casefold()
        names = [
            name
            for name in self._tables.topics.table
            if wanted in name.casefold() and (with_system or not self._is_system(name))
        ]
        names.sort()
        found = []
        for name in names[begin : begin + count]:
            config = self._tables.topics.get(name)
            if config is not None:
                found.append(await self._topic(config))
        return Topics(found, len(names))

    @reads_files
    async def topic(self, name: str, *, begin: int, count: int, at_ms: int | None = None) -> TopicDetail | Missing:
        """See `DashboardSource.topic`."""
        config = self._tables.topics.get_readable(name)
        if config is None:
            return Missing(f"Topic {name} does not exist on this node.")
        queue_count = _queue_count(config)
        queues = []
        for queue_id in range(begin, min(begin + count, queue_count)):
            await yield_sometimes(queue_id)
            queue = self._store.queues.get(name, queue_id)
            if queue is None:
                queues.append(Queue(queue_id, 0, 0, None if at_ms is None else 0))
                continue
            at = None if at_ms is None else await offset_at(self._store, queue, at_ms)
            queues.append(queue_range(queue, at))
        groups = {*self._tables.clients.consumer_groups_of(name), *self._tables.offsets.groups_of(name)}
        return TopicDetail(
            topic=await self._topic(config),
            attributes=config.attributes or {},
            queues=queues,
            queue_count=queue_count,
            groups=sorted(groups),
        )

    async def _topic(self, config: TopicConfig) -> Topic:
        name, message_count = config.topic_name, 0
        newest, newest_offset = None, -1
        for queue_id in range(_queue_count(config)):
            await yield_sometimes(queue_id)
            queue = self._store.queues.get(name, queue_id)
            if queue is None or queue.max_offset <= max(0, queue.min_offset):
                continue
            message_count += queue.max_offset - max(0, queue.min_offset)
            entries = queue.read(queue.max_offset - 1, 1)
            if entries and entries[0].physical_offset > newest_offset:
                newest, newest_offset = queue, entries[0].physical_offset
        last_ms = -1 if newest is None else await known_store_time_ms(self._store, newest, newest.max_offset - 1)
        return Topic(
            name=name,
            kind=self._kind(name),
            read_queue_count=config.read_queue_nums,
            write_queue_count=config.write_queue_nums,
            is_readable=bool(config.perm & Permission.READ),
            is_writable=bool(config.perm & Permission.WRITE),
            message_count=message_count,
            per_s=self._history.per_s(name),
            last_ms=None if last_ms < 0 else last_ms,
        )

    async def topic_names(self, count: int) -> Sequence[str]:
        """See `DashboardSource.topic_names`."""
        return sorted(name for name in self._tables.topics.table if not self._is_system(name))[:count]

    @reads_files
    async def with_key_anywhere(self, key: str, count: int) -> FoundMessages:
        """See `DashboardSource.with_key_anywhere`."""
        found: list[MessageLine] = []
        note, is_cut = "", False
        names = sorted(name for name in self._tables.topics.table if not self._is_system(name))
        ends_at = trio.current_time() + SEARCH_S
        for number, name in enumerate(names):
            if trio.current_time() >= ends_at or len(found) >= count:
                note = f"Searched {number:,} of {len(names):,} topics, by name. Enter a topic to search the others."
                break
            part = await self.with_key(name, key, count)
            found += part.messages
            is_cut |= part.is_cut
        found.sort(key=lambda line: line.physical_offset, reverse=True)
        return FoundMessages(found[:count], is_cut=is_cut or bool(note) or len(found) > count, note=note)

    def _is_system(self, name: str) -> bool:
        return name in self._system_names or name.startswith(SYSTEM_TOPIC_PREFIX)

    def _kind(self, name: str) -> str:
        if self._is_system(name):
            return "system"
        if name.startswith(RETRY_PREFIX):
            return "retries"
        return "dead letters" if name.startswith(DLQ_PREFIX) else "messages"

    # ---- groups

    async def groups(self, search: str, *, begin: int, count: int) -> Groups:
        """See `DashboardSource.groups`."""
        topics_by_group = await self._progress.topics_by_group()
        wanted = search.casefold()
        found = sorted(name for name in topics_by_group if wanted in name.casefold())
        shown = [await self._group(name, topics_by_group[name]) for name in found[begin : begin + count]]
        return Groups(shown, len(found))

    async def _group(self, name: str, committed_topics: Iterable[str]) -> Group:
        online = self._tables.clients.consumer_group(name)
        topics = topics_of(online, committed_topics)
        return Group(
            name=name,
            member_count=0 if online is None else len(online.members),
            topic_count=len(topics),
            behind_count=await self._progress.lag(name, topics),
            read_per_s=sum(self._tables.reads.per_s(name, topic) for topic in topics),
        )

    async def group(self, name: str, *, topic_count_max: int, queue_count_max: int) -> GroupDetail | Missing:
        """See `DashboardSource.group`."""
        online = self._tables.clients.consumer_group(name)
        config = self._tables.groups.get(name)
        topics = topics_of(online, self._tables.offsets.topics_of(name))
        if online is None and config is None and not topics:
            return Missing(f"Consumer group {name} does not exist on this node.")
        settings: dict[str, str] = {}
        if config is not None:
            settings["May consume"] = "yes" if config.consume_enable else "no"
            settings["Deliveries before a dead letter"] = f"{config.retry_max_times}"
        if online is not None:
            settings["Each member gets"] = "all messages" if online.is_broadcasting else "its share of the queues"
        popped = self._node.broker.pop.group(name)
        if popped is not None:
            settings["In flight (POP)"] = _in_flight(popped, self._node.platform.wall_clock_ms())
            settings["Delivered again since the start"] = f"{popped.revived_count:,}"
        members = [] if online is None else list(online.members.items())
        now = trio.current_time()
        return GroupDetail(
            name=name,
            settings=settings,
            members=[
                GroupMember(
                    member.client_id, join(*connection.peer), member.language.name.title(), now - member.seen_at
                )
                for connection, member in members[:MEMBER_COUNT_MAX]
            ],
            member_count=len(members),
            topics=[
                await self._group_topic(name, topic, online, queue_count_max) for topic in topics[:topic_count_max]
            ],
            topic_count=len(topics),
            lag=self._history.lag(name),
        )

    async def _group_topic(
        self, group: str, topic: str, online: ConsumerGroup | None, queue_count_max: int
    ) -> GroupTopic:
        queue_count = self._progress.readable_queues(topic)
        subscription = None if online is None else online.subscriptions.get(topic)
        behind_count, queues = 0, []
        for queue_id in range(queue_count):
            await yield_sometimes(queue_id)
            progress = self._progress.queue(group, topic, queue_id)
            behind_count += progress.behind_count
            if queue_id < queue_count_max:
                queues.append(progress)
        return GroupTopic(
            topic=topic,
            subscription="" if subscription is None else subscription.expression,
            behind_count=behind_count,
            read_per_s=self._tables.reads.per_s(group, topic),
            queues=queues,
            queue_count=queue_count,
        )


def _in_flight(popped: GroupInFlight, now_ms: int) -> str:
    if popped.oldest_pop_ms is None:
        return "none"
    age = duration(max(0.0, (now_ms - popped.oldest_pop_ms) / 1000))
    return f"{popped.in_flight_count:,}, the oldest for {age}"


def _queue_count(config: TopicConfig) -> int:
    return max(config.read_queue_nums, config.write_queue_nums)

"""Copies a master's tables to its slave, each with a request of its own:

    topics                GET_ALL_TOPIC_CONFIG (21)
    consumer offsets      GET_ALL_CONSUMER_OFFSET (43)
    groups                GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201)
    delay offsets         GET_ALL_DELAY_OFFSET (45)
    users, policies       AUTH_LIST_USER (3005) and AUTH_LIST_ACL (3010), only with authenticationEnabled

The tables are copied at start, when the slave begins to follow the master, and every `slave_sync_interval_s`. A slave
that has messages copies them only while it follows the master. Otherwise its log may differ from the master's, and be
the one that is kept: consumer offsets of another history would let consumers skip messages of this one.

Consumer offsets and delay offsets can depend on records: a pop moves its group's offset past messages whose state is in
the log, and a check moves the offset of transactions past a half message that was stored again. If these offsets were
kept and the records lost with the master, the messages would never be delivered. So the slave asks for the end of the
master's log after it has received offsets (GET_BROKER_RUNTIME_INFO, 28, which RocketMQ answers too), and applies them
once its own log has reached that end.

Topics and groups are replaced as a whole when their data version differs, delay offsets when they differ; consumer
offsets are merged. The queues of topics that a halog master lists as deleted are cleared, too. A topic that is only
missing in the master's table keeps its queues, as the master may have lost the table. RocketMQ: SlaveSynchronize (every
10 s in 4.9, also while the logs differ, and with offsets that its log has not reached; it sends GET_ALL_TOPIC_CONFIG to
the master's fast port, which gives the same answer).

Offsets committed to this slave are sent to the master as commits (UPDATE_CONSUMER_OFFSET, 15). If the master can't be
reached, the slave serves what it has. In a failover group nothing is copied once the tables come from the group's log
(group_log.py), unless the master keeps its own in files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import trio

from ha.broker.options import BrokerOptions
from ha.broker.tables import Tables
from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.access_bodies import (
    DISABLE,
    NORMAL,
    USER_STATUSES,
    USER_TYPES,
    AclInfo,
    UserConfig,
    UserInfo,
    known_name,
    username_of,
)
from ha.protocol.bodies import (
    ConsumerOffsets,
    DelayOffsets,
    GroupTable,
    KVTable,
    TimerCheckPoint,
    TopicConfigTable,
)
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import NAME_SIZE_MAX
from ha.remoting import RemotingClient
from ha.replication.ha_client import HAClient

logger = logging.getLogger(__name__)

ListedT = TypeVar("ListedT")

_NOT_YET = (
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
)
"""Answers of a master with failover to commits that it may lose; these commits are sent again later."""


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets that the master sent before its log ended at physical offset `log_end` (bytes).

    delays: None if the master sent none. timers: see `DelayOffsetTable.rocketmq_timers`.
    """

    log_end: int
    offsets: ConsumerOffsets
    delays: DelayOffsets | None
    timers: tuple[int, int] | None


class SlaveSync:
    """Copies the master's tables. `master_address` returns the master's host:port for clients; None while it is
    unknown. `ha_client`: of a slave outside a failover group."""

    def __init__(
        self,
        client: RemotingClient,
        master_address: Callable[[], str | None],
        tables: Tables,
        options: BrokerOptions,
        ha_client: HAClient | None = None,
    ) -> None:
        self._client = client
        self._ha_client = ha_client
        self._master_address = master_address
        self._tables = tables
        self._topics = tables.topics
        self._groups = tables.groups
        self._offsets = tables.offsets
        self._delay_offsets = tables.delay_offsets
        self._options = options
        self._wake = trio.Event()
        self._progress: _Progress | None = None
        """Offsets that are applied once the log here has reached their `log_end`. Newer ones do not replace them, since
        the log of a slave that is always behind would never reach the end of those"""
        self._last_fault = ""
        self._is_address_missed = False

    def sync_soon(self) -> None:
        """Makes `serve` copy at once. Called after the slave has (re)connected or has a new master."""
        self._wake.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Copies the tables every `slave_sync_interval_s`, or earlier after `sync_soon`, until cancelled."""
        task_status.started()
        while True:
            self._wake = trio.Event()
            self._progress = None  # the master may have another history now
            while not self._wake.is_set():
                await self.sync_once()
                with trio.move_on_after(self._options.slave_sync_interval_s):
                    await self._wake.wait()

    async def sync_once(self) -> bool:
        """Copies all tables once, and sends the offsets committed here; returns whether that succeeded.

        If the log here does not reach the end of the master's log within `slave_sync_timeout_s`, a later call applies
        the offsets. Also returns True if the tables come from the group's log, so that nothing is copied. Returns False
        if the log may differ from the master's; also logs it if the address is unknown, or requests fail or are
        refused. Raises DiskFailed.
        """
        address = self._master_address()
        if address is None:
            if self._is_address_missed:
                self._offsets.on_master_contact(is_reachable=False)
            self._is_address_missed = True  # the first time is normal: no name server has answered yet
            self._report("the master's address is not known yet", "")
            return False
        if self._ha_client is not None and self._ha_client.may_differ:
            return False
        try:
            topics = java_json.read_as(TopicConfigTable, await self._ask(address, RequestCode.GET_ALL_TOPIC_CONFIG))
            self._offsets.on_master_contact(is_reachable=True)
            if not self._tables.accepts_copy(topics.log_position):
                await self._hand_on(address, ConsumerOffsets())
                self._report("", address)
                return True
            if topics.data_version != self._topics.data_version:
                _leave_out_too_long("topic", topics.topic_config_table, address)
            await self._topics.replace(topics)
            await self._tables.clear_deleted_topics()
            await self._apply_progress()
            offsets = await self._copy_progress(address)
            own = {commit.consumer_group for commit in self._offsets.local_commits()}
            await self._hand_on(address, offsets)
            raw = await self._ask(address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
            groups = java_json.read_as(GroupTable, raw)
            if groups.data_version != self._groups.data_version:
                _leave_out_too_long("group", groups.subscription_group_table, address)
            await self._remove_offsets(offsets, groups, own)
            await self._groups.replace(groups)
            fault = await self._copy_users(address) if self._options.authentication_enabled else ""
            if self._progress is not None and self._ha_client is not None:
                with trio.move_on_after(self._options.slave_sync_timeout_s):
                    await self._ha_client.wait_reached(self._progress.log_end)
            await self._apply_progress()
            self._tables.copied()
        except (OSError, trio.BrokenResourceError, trio.TooSlowError, RemoteProtocolError) as error:
            self._offsets.on_master_contact(is_reachable=False)
            self._report(f"{type(error).__name__}: {error}", address)
            return False
        self._report(fault, address)
        return not fault

    async def _remove_offsets(self, of_master: ConsumerOffsets, groups: GroupTable, own: set[str]) -> None:
        """Removes offsets that the master has deleted: those of a deleted topic, and those of a deleted group without
        any offsets at the master.

        Other offsets that only this slave has stay. `own`: groups with offsets committed here; they do not count as
        deleted. No group counts as deleted unless the version counter of the master's group table is higher than that
        of this slave's: a master that lost its file of groups counts from the start.
        """
        kept = of_master.offset_table.keys()
        gone: set[str] = set()
        if groups.data_version.counter > self._groups.data_version.counter:
            gone = self._groups.table.keys() - groups.subscription_group_table.keys() - own
            gone -= {key.partition("@")[2] for key in kept}
        removed = False
        for key in self._offsets.table.keys() - kept:
            topic, _, group = key.partition("@")
            if group in gone:
                self._offsets.remove(group=group)
            elif topic in self._topics.deleted and self._topics.get(topic) is None:
                self._offsets.remove(topic=topic)
            else:
                continue
            removed = True
        if removed:
            # Before the groups are replaced: after a crash in between, their file still shows which are gone.
            await self._offsets.save()

    async def _copy_progress(self, address: str) -> ConsumerOffsets:
        """Asks for the master's offsets, to be applied by `_apply_progress`; returns its consumer offsets.

        If earlier ones still wait, only drops from these what the master has deleted.
        """
        raw = await self._ask(address, RequestCode.GET_ALL_CONSUMER_OFFSET)
        offsets = java_json.read_as(ConsumerOffsets, raw)
        if self._progress is not None:
            table = self._progress.offsets.offset_table
            for key in table.keys() - offsets.offset_table.keys():
                del table[key]
            return offsets
        delays, timers = await self._ask_delays(address)
        log_end = 0 if self._ha_client is None else await self._ask_log_end(address)
        self._progress = _Progress(log_end=log_end, offsets=offsets, delays=delays, timers=timers)
        return offsets

    async def _apply_progress(self) -> None:
        """Applies the master's offsets if the log here has everything that they can depend on."""
        progress = self._progress
        if progress is None or self._wake.is_set():
            return
        if self._ha_client is not None and not self._ha_client.has_reached(progress.log_end):
            return
        self._offsets.merge(progress.offsets)
        if progress.delays is not None:
            await self._delay_offsets.replace(progress.delays)
            self._delay_offsets.rocketmq_timers = progress.timers
        self._progress = None

    async def _ask_delays(self, address: str) -> tuple[DelayOffsets | None, tuple[int, int] | None]:
        """Returns the master's delay offsets and the progress of its timers, as `_Progress` has them."""
        request = RemotingCommand(RequestCode.GET_ALL_DELAY_OFFSET)
        answer = await self._client.invoke(address, request, self._options.slave_sync_timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            return None, None
        offsets = java_json.read_as(DelayOffsets, bytes(answer.body))
        is_told = any(key < 0 for key in offsets.offset_table) or not self._tables.have_timer_messages
        return offsets, None if is_told else await self._timer_progress(address)

    async def _ask_log_end(self, address: str) -> int:
        """Asks for the end of the master's log, a physical offset (bytes)."""
        figures = java_json.read_as(KVTable, await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO)).table
        try:
            return int(figures["commitLogMaxOffset"])
        except (KeyError, ValueError):
            raise RemoteProtocolError("the answer to GET_BROKER_RUNTIME_INFO has no commitLogMaxOffset") from None

    async def _timer_progress(self, address: str) -> tuple[int, int] | None:
        """Asks a master whose delay offsets say nothing about timers for their progress (GET_TIMER_CHECK_POINT, 60), as
        RocketMQ's slaves do.

        Without it, retention would keep every segment with a timer message. Returns queue offset and time (ms); None
        from a broker without timers.
        """
        request = RemotingCommand(RequestCode.GET_TIMER_CHECK_POINT)
        answer = await self._client.invoke(address, request, self._options.slave_sync_timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            return None
        check_point = TimerCheckPoint.decode(bytes(answer.body))
        return check_point.queue_offset, check_point.read_ms - 1

    async def _copy_users(self, address: str) -> str:
        """Copies users with their policies, and returns "". If the master refuses to send them or omits the passwords,
        keeps this slave's users and returns the reason."""
        try:
            users = _list_of(UserInfo, await self._ask(address, RequestCode.AUTH_LIST_USER))
            acls = _list_of(AclInfo, await self._ask(address, RequestCode.AUTH_LIST_ACL))
        except RemoteProtocolError as error:
            return str(error)
        policies = {username_of(acl.subject): acl.policies for acl in acls}
        found: dict[str, UserConfig] = {}
        for user in users:
            if not user.username or not user.password:
                return (
                    "the master sends passwords only to super users; the user of brokerAccessKey or "
                    "innerClientAuthenticationCredentials has to be one"
                )
            found[user.username] = UserConfig(
                username=user.username,
                password=user.password,
                user_type=known_name(user.user_type, USER_TYPES) or NORMAL,
                user_status=known_name(user.user_status, USER_STATUSES) or DISABLE,
                policies=policies.get(user.username) or [],
            )
        await self._tables.users.replace(found)
        return ""

    async def _hand_on(self, address: str, of_master: ConsumerOffsets) -> None:
        """Sends the master the offsets committed here that are higher than its own, `of_master`.

        A commit whose answer is in `_NOT_YET` is sent again with the next sync; others are not, even if the master
        refused them (for example because it does not know the topic). Accepted ones are noted in the offsets that wait
        to be applied, which are older.
        """
        for commit in self._offsets.local_commits():
            key = f"{commit.topic}@{commit.consumer_group}"
            known = of_master.offset_table.get(key, {}).get(commit.queue_id)
            if known is not None and known >= commit.commit_offset:
                continue
            request = RemotingCommand(RequestCode.UPDATE_CONSUMER_OFFSET, ext_fields=commit.to_ext_fields())
            answer = await self._client.invoke(address, request, self._options.slave_sync_timeout_s)
            if answer.code in _NOT_YET:
                continue
            if answer.code != ResponseCode.SUCCESS:
                logger.warning(
                    "slave_sync.commit_refused master=%s group=%s topic=%s queue=%d offset=%d code=%d remark=%r",
                    address,
                    commit.consumer_group,
                    commit.topic,
                    commit.queue_id,
                    commit.commit_offset,
                    answer.code,
                    answer.remark,
                )
            elif self._progress is not None:
                self._progress.offsets.offset_table.setdefault(key, {})[commit.queue_id] = commit.commit_offset
            self._offsets.drop_local_commit(commit)

    async def _ask(self, address: str, code: RequestCode) -> bytes:
        answer = await self._client.invoke(address, RemotingCommand(code), self._options.slave_sync_timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            raise RemoteProtocolError(f"{code.name} was answered {answer.code}: {answer.remark}")
        return bytes(answer.body)

    def _report(self, fault: str, address: str) -> None:
        if fault == self._last_fault:
            return
        self._last_fault = fault
        if fault:
            # Every slave starts without an address: no warning before a name server was asked.
            level = logging.WARNING if address else logging.INFO
            logger.log(level, "slave_sync.failed master=%s reason=%r", address, fault)
        else:
            logger.info(
                "slave_sync.completed master=%s topics=%d groups=%d", address, len(self._topics), len(self._groups)
            )


def _list_of(kind: type[ListedT], body: bytes) -> list[ListedT]:
    """Returns the list in an answer, which is empty if there is nothing to list."""
    return java_json.read_as(list[kind], body) if body else []  # type: ignore[valid-type]


def _leave_out_too_long(kind: str, table: dict[str, Any], address: str) -> None:
    """Removes entries whose names are too long for name servers from a master's table, and logs each."""
    for name in [name for name in table if len(name.encode(errors="surrogatepass")) > NAME_SIZE_MAX]:
        del table[name]
        logger.warning(
            "slave_sync.name_refused master=%s %s=%r reason=%r",
            address,
            kind,
            name[:NAME_SIZE_MAX],
            f"more than {NAME_SIZE_MAX} bytes",
        )

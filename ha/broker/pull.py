"""Requests that read messages: 11 PULL_MESSAGE and 361 LITE_PULL_MESSAGE, with long polling.

The checks run in RocketMQ's order (PullMessageProcessor) with the codes of 5.x and RocketMQ's remarks. A pull that
finds nothing yet and may wait becomes a hold (holds.py), and is answered later.
"""

from __future__ import annotations

import logging

import msgspec
import trio

from ha.broker.clients import Subscription
from ha.broker.core import BrokerCore
from ha.broker.filters import Filters, Selection, read_wanted
from ha.broker.holds import PullHold, PullHolds
from ha.broker.queue_read import UNREADABLE_RETRY_S, QueueRead, QueueReader, ReadStatus
from ha.broker.queue_times import bounds
from ha.broker.refused import RefusedError, refused_if_unreadable
from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import MASTER_ID, Permission, PullSysFlag, RequestCode, ResponseCode
from ha.protocol.headers import PullMessageRequest, PullMessageResponse, parse_header
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler

logger = logging.getLogger(__name__)

PULL_CODES = frozenset({RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE})


class PullProcessor:
    """Answers pulls. `serve` runs the long polls; the store calls `on_arrivals`."""

    def __init__(self, core: BrokerCore) -> None:
        store, tables, options = core.store, core.tables, core.options
        self._store = store
        self._topics = tables.topics
        self._groups = tables.groups
        self._clients = tables.clients
        self._offsets = tables.offsets
        self._options = options
        self.filters = Filters(options)
        self._reads = tables.reads
        self._standing = tables.standing
        self._reader = QueueReader(
            store.log,
            options,
            run_blocking=store.run_blocking,
            corrects_offsets=lambda: not self._keeps_offsets,
            repair_entry=store.scrub.repair_entry,
        )
        self.holds = PullHolds(
            self._resume,
            hold_count_max=options.hold_count_max,
            hold_count_per_connection_max=options.hold_count_per_connection_max,
        )
        self.on_arrivals = self.holds.on_arrivals
        store.damage.subscribe(self.holds.wake_all)  # repaired or given up: read damaged messages again
        self.serve = self.holds.serve

    @property
    def _keeps_offsets(self) -> bool:
        standing = self._standing
        if standing.is_slave:
            return not self._options.offset_check_in_slave
        if not standing.can_be_replaced:
            return False
        # A new master serves older messages only once they are confirmed again, but consumers may have read them
        # before.
        term = self._store.epochs.last
        return term is not None and self._store.log.dispatched_offset.value < term.start_offset

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.PULL_MESSAGE: self.handle,
            RequestCode.LITE_PULL_MESSAGE: self.handle,
            RequestCode.CHECK_CLIENT_CONFIG: self.filters.check_client,
        }

    async def handle(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        """Answers a pull; returns None if it is held. Raises RefusedError if a check fails or the disk can't read,
        RemoteProtocolError if the header is invalid."""
        request = parse_header(PullMessageRequest, command.ext_fields)
        group = await self._groups.find_or_create(request.consumer_group)
        selection = self._check(request, group)
        assert group is not None
        if request.sys_flag & PullSysFlag.COMMIT_OFFSET:
            self._commit(request)
        read = await self._read(request, selection)
        code = self._code(read, request.queue_offset)
        if (
            code is ResponseCode.PULL_NOT_FOUND
            and request.sys_flag & PullSysFlag.SUSPEND
            and not command.flag & FLAG_ONEWAY
            and self._hold(connection, command, request, selection, read)
        ):
            return None
        return self._answer(command, request, group, read)

    def _check(self, request: PullMessageRequest, group: GroupConfig | None) -> Selection:
        """Checks a pull and returns its message filter. Raises RefusedError."""
        options = self._options
        if self._standing.is_slave and not options.slave_read_enable:
            raise RefusedError(
                self._standing.refusal_code,
                "[REJECTREQUEST]system busy, start flow control for a while (SLAVE with slaveReadEnable=false)",
            )
        if not options.permission & Permission.READ:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"the broker[{options.host}] pulling message is forbidden")
        name = request.consumer_group
        if group is None:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{name}] does not exist (and is not created: auto-creation is off, the name is "
                "illegal, or there are too many)",
            )
        if not group.consume_enable:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"subscription group no permission, {name}")
        topic = request.topic
        config = self._topics.get_readable(topic)
        if config is None:
            raise RefusedError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
        if not config.perm & Permission.READ:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"the topic[{topic}] pulling message is forbidden")
        if not 0 <= request.queue_id < config.read_queue_nums:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{request.queue_id}] is illegal, topic:[{topic}] "
                f"topicConfig.readQueueNums:[{config.read_queue_nums}] consumer group:[{name}]",
            )
        if request.sys_flag & PullSysFlag.SUBSCRIPTION:
            return self.filters.select(request.subscription, request.expression_type, is_registered=False)
        subscription = self._registered(request, group)
        return self.filters.select(subscription.expression, subscription.expression_type, is_registered=True)

    def _registered(self, request: PullMessageRequest, group: GroupConfig) -> Subscription:
        """Returns the subscription that the group's heartbeats registered. Raises RefusedError."""
        name, topic = request.consumer_group, request.topic
        members = self._clients.consumer_group(name)
        if members is None:
            raise RefusedError(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist: {name}")
        if members.is_broadcasting and not group.consume_broadcast_enable:
            raise RefusedError(
                ResponseCode.NO_PERMISSION, f"the consumer group[{name}] can not consume by broadcast way"
            )
        subscription = members.subscriptions.get(topic)
        if subscription is None:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist: {name} of {topic}"
            )
        if subscription.version < request.sub_version:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the consumer's subscription not latest: {subscription.version} is registered, "
                f"{request.sub_version} asked",
            )
        return subscription

    async def _read(self, request: PullMessageRequest, selection: Selection) -> QueueRead:
        """Reads what a pull asks for. Raises RefusedError if the disk can't read."""
        queue = self._store.queues.get(request.topic, request.queue_id)
        if queue is None or request.queue_offset >= queue.max_offset:
            await self._store.dispatcher.wait_files_made()
            queue = self._store.queues.get(request.topic, request.queue_id)
        reset_offset = self._offsets.take_reset(request.consumer_group, request.topic, request.queue_id)
        if reset_offset is not None:
            return QueueRead(ReadStatus.OFFSET_RESET, reset_offset, *bounds(queue))
        bytes_max = request.max_msg_bytes or self._options.transfer_hot_bytes_max
        with refused_if_unreadable():
            if selection.is_wanted is not None:
                return await read_wanted(
                    self._reader,
                    queue,
                    request.queue_offset,
                    selection.is_wanted,
                    message_count_max=request.max_msg_nums,
                    message_bytes_max=bytes_max,
                )
            return await self._reader.read(
                queue,
                request.queue_offset,
                message_count_max=request.max_msg_nums,
                message_bytes_max=bytes_max,
                tags_codes=selection.tags_codes,
            )

    def _code(self, read: QueueRead, asked_offset: int) -> ResponseCode:
        code = read.status.response_code(asked_offset)
        is_reset = read.status is ReadStatus.OFFSET_RESET
        if code is ResponseCode.PULL_OFFSET_MOVED and not is_reset and self._keeps_offsets:
            return ResponseCode.PULL_RETRY_IMMEDIATELY  # consumers may have read later offsets at another broker
        return code

    def _answer(
        self, command: RemotingCommand, request: PullMessageRequest, group: GroupConfig, read: QueueRead
    ) -> RemotingCommand:
        if read.message_count:
            self._reads.note(
                request.consumer_group, request.topic, request.queue_id, read.next_offset, read.message_count
            )
        else:
            self._reads.missed_count += 1
        suggested = MASTER_ID
        if self._options.slave_read_enable:
            suggested = group.which_broker_when_consume_slowly if read.is_far_behind else group.broker_id
        header = PullMessageResponse(
            suggest_which_broker_id=suggested,
            next_begin_offset=read.next_offset,
            min_offset=read.min_offset,
            max_offset=read.max_offset,
            offset_delta=0,
            topic_sys_flag=0,
            group_sys_flag=group.group_sys_flag,
            forbidden_type=None,
        )
        code = self._code(read, request.queue_offset)
        return command.reply(code, read.status.value, header.to_ext_fields(), read.body)

    def _commit(self, request: PullMessageRequest) -> None:
        self._offsets.commit(request.consumer_group, request.topic, request.queue_id, request.commit_offset)

    def _hold(
        self,
        connection: RemotingConnection,
        command: RemotingCommand,
        request: PullMessageRequest,
        selection: Selection,
        read: QueueRead,
    ) -> bool:
        options = self._options
        wait_s = options.short_polling_s
        if options.long_polling_enable:
            wait_s = min(max(0.0, request.suspend_timeout_millis / 1000), options.suspend_s_max)
        if read.is_interrupted:
            wait_s = min(wait_s, UNREADABLE_RETRY_S)
        hold = PullHold(
            connection=connection,
            command=msgspec.structs.replace(command, ext_fields={}, remark=None, body=b""),
            request=msgspec.structs.replace(request, subscription=None, expression_type=None),
            topic=request.topic,
            queue_id=request.queue_id,
            queue_offset=request.queue_offset,
            selection=selection,
            deadline=trio.current_time() + wait_s,
        )
        return self.holds.add(hold)

    def _hold_again(self, hold: PullHold, next_offset: int) -> bool:
        """Holds a pull again if it has a condition on properties that selected no message; returns False if the pull
        must be answered."""
        if hold.selection.is_wanted is None or trio.current_time() >= hold.deadline:
            return False
        queue = self._store.queues.get(hold.topic, hold.queue_id)
        if queue is None or queue.max_offset > next_offset:
            return False  # there is more to read: the consumer pulls again
        request = msgspec.structs.replace(hold.request, queue_offset=next_offset)
        again = msgspec.structs.replace(hold, request=request, queue_offset=next_offset)
        return self.holds.add(again)

    async def _resume(self, hold: PullHold) -> None:
        """Reads again for a hold that was woken or reached its deadline; answers it, or holds it again."""
        request = hold.request
        group = self._groups.get(request.consumer_group)
        if group is None:
            response = hold.command.reply(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{request.consumer_group}] is gone"
            )
        else:
            try:
                read = await self._read(request, hold.selection)
            except RefusedError as refused:
                response = hold.command.reply(refused.code, refused.remark)
            else:
                if read.status is ReadStatus.NO_MATCHED_MESSAGE and self._hold_again(hold, read.next_offset):
                    return
                response = self._answer(hold.command, request, group, read)
        hold.connection.reply(hold.command, response)

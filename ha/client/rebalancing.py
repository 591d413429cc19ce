"""Rebalancing: assigns queues to this consumer, revokes them, and locks them in ORDERLY mode.

Every member asks a broker for the members of the group and computes its own share (`allocation`); a BROADCASTING one
takes all queues. A member rebalances when a broker reports that members joined or left, when a route changes, and every
rebalance_interval_s. Sources: RebalanceImpl, RebalancePushImpl, RebalanceService.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import anyio
import anyio.abc

from ha.client.allocation import allocate_averagely
from ha.client.client import Client
from ha.client.held_queue import HeldQueue
from ha.client.messages import MessageQueue, ReadFrom
from ha.client.push_options import MessageModel, PushOptions
from ha.client.routes import TopicRoute
from ha.client.saving import Saving
from ha.client.waiting import wait_any
from ha.errors import BrokerError, ClientError, ConnectionFailed, RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import (
    ConsumerList,
    GetConsumerListRequest,
    LockedQueuesBody,
    LockQueuesBody,
    QueueBody,
)
from ha.protocol.java_json import read_as
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

_log = logging.getLogger(__name__)

_UNSETTLED_INTERVAL_S = 1.0
"""Pause in seconds before missing locks are requested again, and first pause before an incomplete rebalance is
retried."""
_UNSETTLED_INTERVAL_MAX_S = 5.0
"""Maximum of the growing pause before a rebalance is retried, in seconds. Short, because nothing notifies a consumer
when its topic is created (RocketMQ's clients look every 30 s)."""
_UNLOCK_TIMEOUT_S = 2.0
"""Time limit for releasing all locks at the end, in seconds."""


class Rebalancer:
    """Assigns and revokes the queues of one consumer. `held`: the queues whose messages the consumer may handle."""

    def __init__(
        self,
        client: Client,
        group: str,
        topics: Iterable[str],
        model: MessageModel,
        saving: Saving,
        options: PushOptions,
        *,
        needs_lock: bool,
        feed: Callable[[HeldQueue], Coroutine[Any, Any, None]],
    ) -> None:
        self.held: dict[MessageQueue, HeldQueue] = {}
        self._releasing: dict[MessageQueue, HeldQueue] = {}
        self._client = client
        self._group = group
        self._topics = list(topics)
        self._model = model
        self._saving = saving
        self._options = options
        self._needs_lock = needs_lock
        self._feed = feed
        self._woken = anyio.Event()
        self._lock_wanted = anyio.Event()
        self._locking = anyio.Lock()
        """Serializes lock and unlock requests, so that no renewal follows the release of the same lock."""
        self._logged_failures: dict[str, str] = {}

    def wake(self) -> None:
        """Makes `serve` rebalance now."""
        self._woken.set()

    async def serve(self) -> None:
        """Rebalances until cancelled. Call `release` afterwards."""
        async with anyio.create_task_group() as tasks:
            if self._needs_lock:
                tasks.start_soon(self._renew_locks)
            unsettled_s = _UNSETTLED_INTERVAL_S
            while True:
                self._woken = anyio.Event()
                routes_changed = self._client.routes.changed
                settled = [await self._rebalance(topic, tasks) for topic in self._topics]
                pause_s = self._options.rebalance_interval_s
                if all(settled):
                    unsettled_s = _UNSETTLED_INTERVAL_S
                else:
                    pause_s = min(unsettled_s, pause_s)
                    unsettled_s = min(2 * pause_s, _UNSETTLED_INTERVAL_MAX_S)
                await wait_any(pause_s, self._woken, routes_changed)

    async def release(self) -> None:
        """Revokes all queues, saves their positions and releases their locks. Call it when the handlers have ended: one
        that still runs no longer advances its queue's position."""
        releasing = [*self.held.values(), *self._releasing.values()]
        for held in releasing:
            held.revoke()
            held.drop()
        self.held.clear()
        await self._saving.finish(releasing)
        if self._needs_lock:
            with anyio.move_on_after(_UNLOCK_TIMEOUT_S):
                await self._at_each_broker(self._unlock_at, releasing)

    async def _rebalance(self, topic: str, tasks: anyio.abc.TaskGroup) -> bool:
        """Assigns and revokes queues of `topic`. Returns False if this has to be repeated soon, because it failed, this
        consumer is not among the members of its group yet, or a queue is still being released."""
        is_settled = True
        try:
            route = await self._client.routes.find(topic)
            if self._model is MessageModel.BROADCASTING:
                own = list(route.read_queues)
            else:
                try:
                    members = await self._members(route)
                except BrokerError:
                    members = []  # brokers reject the request if the group has no members
                if self._client.client_id not in members:
                    # Brokers have expired this consumer, or have not received its first heartbeat yet.
                    await self._client.heartbeats.beat()
                    members = await self._members(route)
                if self._client.client_id not in members:
                    is_settled = False  # the other members assign queues without this one
                    self._log_once(topic, "this consumer is not among the members of its group")
                own = allocate_averagely(route.read_queues, members, self._client.client_id)
        except (ClientError, RemoteProtocolError) as error:
            self._log_once(topic, str(error))
            return False
        wanted = set(own)
        present = {queue for queue in self.held if queue.topic == topic}
        revoked = [self.held.pop(queue) for queue in present - wanted]
        if revoked:
            _log.info("client.queues_revoked group=%s queues=%s", self._group, [held.queue for held in revoked])
            for held in revoked:
                held.revoke()
                if not self._needs_lock:
                    held.drop()
                self._releasing[held.queue] = held
                tasks.start_soon(self._release, held)
        for queue in own:
            if queue in self._releasing:
                is_settled = False
            elif queue not in self.held:
                held = self.held[queue] = HeldQueue(queue)
                tasks.start_soon(self._feed, held)
                self._lock_wanted.set()
        if wanted - present:
            _log.info("client.queues_assigned group=%s queues=%s", self._group, sorted(wanted - present))
        if is_settled:
            self._logged_failures.pop(topic, None)
        return is_settled

    async def _members(self, route: TopicRoute) -> list[str]:
        """Returns the client ids of the group's members, from any broker of the route. Raises ClientError if none
        returns them, and RemoteProtocolError for a malformed response."""
        header = GetConsumerListRequest(consumer_group=self._group)
        failure: ClientError = ConnectionFailed(route.topic, "no broker is registered for this topic")
        for name in random.sample(list(route.addresses), len(route.addresses)):
            command = RemotingCommand(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext_fields=header.to_ext_fields())
            try:
                address = route.address_of(name, route.broker_id_for(name, ReadFrom.SUGGESTED))
                answer = await self._client.connections.invoke(address, command, self._client.options.request_timeout_s)
            except ClientError as error:
                failure = error
                self._client.routes.mark_stale(route.topic)
                continue
            if answer.code == ResponseCode.SUCCESS:
                return read_as(ConsumerList, answer.body).consumer_id_list
            failure = BrokerError(address, answer.code, answer.remark or "")
        raise failure

    async def _release(self, held: HeldQueue) -> None:
        if self._needs_lock:  # the running handler must end first: another member would handle later messages
            await held.wait_idle()
        held.drop()
        await self._saving.save(held)
        async with self._locking:
            if self._needs_lock:
                await self._unlock_at(held.queue.broker_name, [held])
            del self._releasing[held.queue]

    async def _renew_locks(self) -> None:
        while True:
            self._lock_wanted = anyio.Event()
            async with self._locking:
                queues = [*self.held.values(), *self._releasing.values()]
                await self._at_each_broker(self._lock_at, queues)
            is_settled = all(held.is_locked for held in queues)
            pause_s = self._options.lock_interval_s if is_settled else _UNSETTLED_INTERVAL_S
            await wait_any(pause_s, self._lock_wanted)

    async def _at_each_broker(
        self, ask: Callable[[str, list[HeldQueue]], Coroutine[Any, Any, None]], queues: list[HeldQueue]
    ) -> None:
        by_broker = defaultdict(list)
        for held in queues:
            by_broker[held.queue.broker_name].append(held)
        async with anyio.create_task_group() as tasks:
            for name, members in by_broker.items():
                tasks.start_soon(ask, name, members)

    async def _lock_at(self, broker_name: str, queues: list[HeldQueue]) -> None:
        started = anyio.current_time()
        try:
            answer = await self._ask_lock(RequestCode.LOCK_BATCH_MQ, [held.queue for held in queues])
            locked = {(q.topic, q.broker_name, q.queue_id) for q in read_as(LockedQueuesBody, answer.body).queues}
        except (ClientError, RemoteProtocolError) as error:
            # Locks held so far stay valid until they expire.
            self._log_once(broker_name, str(error))
            return
        self._logged_failures.pop(broker_name, None)
        if not locked:  # the broker may no longer be the master
            self._client.routes.mark_stale(queues[0].queue.topic)
        for held in queues:
            queue = held.queue
            if (queue.topic, queue.broker_name, queue.queue_id) in locked:
                held.set_locked(started + self._options.lock_valid_s, self._client.wall_clock_ms())
            elif held.is_locked:
                _log.warning("client.lock_lost group=%s queue=%s", self._group, queue)
                held.set_unlocked()

    async def _unlock_at(self, broker_name: str, queues: list[HeldQueue]) -> None:
        try:
            await self._ask_lock(RequestCode.UNLOCK_BATCH_MQ, [held.queue for held in queues])
        except (ClientError, RemoteProtocolError) as error:
            _log.warning("client.unlock_failed broker=%s reason=%r", broker_name, str(error))

    async def _ask_lock(self, code: RequestCode, queues: list[MessageQueue]) -> RemotingCommand:
        """Sends a request to lock or unlock `queues`, which must all be of one broker set, to the set's master. Raises
        ClientError, RemoteProtocolError."""
        body = LockQueuesBody(
            client_id=self._client.client_id,
            consumer_group=self._group,
            mq_set=[QueueBody(broker_name=q.broker_name, queue_id=q.queue_id, topic=q.topic) for q in queues],
        )
        route = await self._client.routes.find(queues[0].topic)
        address = route.master_of(queues[0].broker_name)
        command = RemotingCommand(code, body=java_json.dumps(body))
        try:
            return await self._client.connections.request(address, command)
        except ConnectionFailed:
            self._client.routes.mark_stale(queues[0].topic)
            raise

    def _log_once(self, place: str, trouble: str) -> None:
        """Logs a failure unless it equals the last one logged for `place`, a topic or a broker set."""
        if self._logged_failures.get(place) != trouble:
            self._logged_failures[place] = trouble
            # Brokers create a group's retry topic at its first heartbeat, so it may not exist yet.
            level = logging.INFO if place.startswith(RETRY_PREFIX) else logging.WARNING
            _log.log(level, "client.rebalance_failed group=%s at=%s reason=%r", self._group, place, trouble)

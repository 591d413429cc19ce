"""Locks of queues, for orderly consumers: requests 41 LOCK_BATCH_MQ and 42 UNLOCK_BATCH_MQ.

Each group has its own locks. One client id holds a queue until it unlocks the queue, or until LOCK_LIFETIME_S after its
last request for the queue (clients renew every 20 s). Closing the holder's connection does not release the lock: a
client that returns after a short interruption still works on its messages, and another holder would process later ones
at the same time. A client that shuts down properly unlocks its queues. Source: RebalanceLockManager.

Locks exist only in the memory of the broker that clients ask for them, the master. After a restart, or at a new master,
the first client that asks gets the queue. With failover, a broker that is no longer master answers that the client
holds no queue. A client with an old route therefore stops at its next renewal, instead of working beside the client to
which the new master gives the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import trio

from ha.broker.core import BrokerCore
from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.bodies import LIST_SIZE_MAX, read_request
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import LockedQueuesBody, LockQueuesBody, QueueBody
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler

logger = logging.getLogger(__name__)

LOCK_LIFETIME_S = 60.0
"""Lifetime of a lock after its last renewal (RocketMQ: rocketmq.broker.rebalance.lockMaxLiveTime)."""

NAME_LENGTH_MAX = 255

_Key = tuple[str, QueueBody]


class QueueLocks:
    """Holds the locks and answers LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42). At `queue_lock_count_max` locks, no
    further queue is locked, and clients retry later."""

    def __init__(self, core: BrokerCore) -> None:
        self._standing = core.standing
        self._count_max = core.options.queue_lock_count_max
        self._locks: dict[_Key, tuple[str, float]] = {}
        """(group, queue) -> client id and time of its last request (Trio's clock), in the order of these times"""
        self._is_full = False

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {RequestCode.LOCK_BATCH_MQ: self.handle_lock, RequestCode.UNLOCK_BATCH_MQ: self.handle_unlock}

    def __len__(self) -> int:
        return len(self._locks)

    def holder(self, group: str, queue: QueueBody) -> str | None:
        """Returns the client id that holds a queue, or None."""
        self._drop_expired()
        lock = self._locks.get((group, queue))
        return lock[0] if lock is not None else None

    def has_locks(self, group: str) -> bool:
        """Returns whether clients hold queues of a group, which means that the group consumes in order."""
        self._drop_expired()
        return any(holding == group for holding, _ in self._locks)

    def lock(self, group: str, client_id: str, queues: Iterable[QueueBody]) -> list[QueueBody]:
        """Locks or renews those of `queues` that no other client holds; returns those that `client_id` holds now."""
        self._drop_expired()
        now = trio.current_time()
        held = []
        for queue in dict.fromkeys(queues):
            key = group, queue
            lock = self._locks.get(key)
            if lock is not None:
                if lock[0] != client_id:
                    continue
                del self._locks[key]
            elif len(self._locks) >= self._count_max:
                if not self._is_full:
                    self._is_full = True
                    logger.warning('queue_locks.full locks=%d hint="further queues are not locked"', len(self._locks))
                continue
            self._locks[key] = client_id, now
            held.append(queue)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[QueueBody]) -> None:
        """Releases those of `queues` that `client_id` holds; locks of other clients stay."""
        for queue in queues:
            lock = self._locks.get((group, queue))
            if lock is not None and lock[0] == client_id:
                del self._locks[group, queue]
                self._is_full = False

    def clear(self) -> None:
        """Releases all locks."""
        self._locks.clear()
        self._is_full = False

    def _drop_expired(self) -> None:
        oldest = trio.current_time() - LOCK_LIFETIME_S
        while self._locks:
            key, (_, asked_at) = next(iter(self._locks.items()))
            if asked_at >= oldest:
                return
            del self._locks[key]
            self._is_full = False

    async def handle_lock(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """LOCK_BATCH_MQ (41): locks or renews the requested queues, and answers with those that the client holds now;
        with none on a member of a failover group that is not the master."""
        asked = _read(command)
        if self._standing.can_be_replaced and not self._standing.has_lease:
            held = []
        else:
            held = self.lock(asked.consumer_group, asked.client_id, asked.mq_set)
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(LockedQueuesBody(queues=held)))

    async def handle_unlock(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """UNLOCK_BATCH_MQ (42): releases those of the requested queues that the client holds; answers SUCCESS even if
        it holds none. Clients that shut down send this request oneway."""
        asked = _read(command)
        self.unlock(asked.consumer_group, asked.client_id, asked.mq_set)
        return command.reply(ResponseCode.SUCCESS)


def _read(command: RemotingCommand) -> LockQueuesBody:
    """Parses the body. Raises RemoteProtocolError if it is malformed or too large, or has invalid names."""
    asked = read_request(LockQueuesBody, command.body, LIST_SIZE_MAX)
    for what, name in (("client id", asked.client_id), ("consumer group", asked.consumer_group)):
        if not 0 < len(name) <= NAME_LENGTH_MAX:
            raise RemoteProtocolError(f"a {what} of {len(name)} characters; 1 to {NAME_LENGTH_MAX} are possible")
    longest = max((max(len(queue.topic), len(queue.broker_name)) for queue in asked.mq_set), default=0)
    if longest > NAME_LENGTH_MAX:
        raise RemoteProtocolError(f"a name of {longest} characters in a queue; at most {NAME_LENGTH_MAX}")
    return asked

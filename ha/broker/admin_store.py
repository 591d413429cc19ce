"""Requests that have the store cleaned now instead of at its hour: 306, 316, 329. Source: AdminBrokerProcessor."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ha.broker.core import BrokerCore
from ha.errors import DiskFull
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand

if TYPE_CHECKING:
    from ha.remoting import RemotingConnection, RequestHandler

logger = logging.getLogger(__name__)


class AdminStore:
    """Cleans at an operator's word what would be cleaned anyway."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._topics = core.tables.topics
        self._standing = core.standing

    def handlers(self) -> dict[int, RequestHandler]:
        """What is answered here."""
        return {
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.delete_expired,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.delete_expired,
            RequestCode.CLEAN_UNUSED_TOPIC: self.clear_unused,
        }

    async def delete_expired(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """329 and 306: delete the log's files that have expired, and what the queues and the index have of them."""
        deleted = await self._store.retention.clean(at_any_hour=True)
        logger.info("store.expired_deleted segments=%d", deleted)
        return command.reply(ResponseCode.SUCCESS)

    async def clear_unused(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """316: clear the queues of topics that there are no longer, which a deletion does by itself.

        Not on a slave, whose queues may be of topics that it has not heard of yet.
        """
        if self._standing.is_slave:
            return command.reply(ResponseCode.SYSTEM_ERROR, "Can't clean topics on a slave")
        for topic in self._store.queues.topics():
            if self._topics.get(topic) is None:
                try:
                    await self._store.clear_topic(topic)
                except DiskFull as error:
                    return command.reply(ResponseCode.SYSTEM_ERROR, str(error))
        return command.reply(ResponseCode.SUCCESS)

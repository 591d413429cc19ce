"""Requests that clean the store: 306 and 329 delete expired files at once, 316 clears queues of deleted topics.

Source: AdminBrokerProcessor.
"""

from __future__ import annotations

import logging

from ha.broker.core import BrokerCore
from ha.broker.refused import RefusedError, refuse_if, refuse_on_slave
from ha.errors import DiskFull
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler

logger = logging.getLogger(__name__)


class AdminStore:
    """Answers requests that delete expired files, or the queues of deleted topics."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._tables = core.tables
        self._topics = core.tables.topics
        self._standing = core.standing

    def handlers(self) -> dict[int, RequestHandler]:
        """Handlers by request code."""
        return {
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.delete_expired,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.delete_expired,
            RequestCode.CLEAN_UNUSED_TOPIC: self.clear_unused,
        }

    async def delete_expired(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """Requests 329 and 306: deletes expired log files, and their entries in queues and index. SYSTEM_ERROR on a
        full disk."""
        try:
            deleted = await self._store.retention.clean(at_any_hour=True)
        except DiskFull as error:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, str(error)) from None
        logger.info("store.expired_deleted segments=%d", deleted)
        return command.reply(ResponseCode.SUCCESS)

    async def clear_unused(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """Request 316: clears the queues of topics that don't exist, which deleting a topic (request 215) does as well.

        Records these topics as deleted, so that slaves clear their queues, too. Refused on a slave, because its table
        may still lack topics of its master.
        """
        refuse_on_slave(self._standing, "Can't clean topics on a slave")
        queues = self._store.queues
        unused = [
            topic
            for topic in queues.topics()
            if self._topics.get(topic) is None and (topic not in self._topics.deleted or queues.not_empty((topic,)))
        ]
        refuse_if(await self._topics.delete_messages(unused, self._store.log.max_offset.value))
        refuse_if(await self._tables.clear_deleted_topics())
        return command.reply(ResponseCode.SUCCESS)

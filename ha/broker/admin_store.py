"""Requests that clean the store: 306 CLEAN_EXPIRED_CONSUMEQUEUE and 329 DELETE_EXPIRED_COMMITLOG delete expired files
at once, 316 CLEAN_UNUSED_TOPIC clears the queues of deleted topics.

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
        """Returns the handlers by request code."""
        return {
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.delete_expired,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.delete_expired,
            RequestCode.CLEAN_UNUSED_TOPIC: self.clear_unused,
        }

    async def delete_expired(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """DELETE_EXPIRED_COMMITLOG (329) and CLEAN_EXPIRED_CONSUMEQUEUE (306): deletes expired log files, and their
        entries in queues and index. Raises RefusedError (SYSTEM_ERROR) if the disk is full."""
        try:
            deleted = await self._store.retention.clean(at_any_hour=True)
        except DiskFull as error:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, str(error)) from None
        logger.info("store.expired_deleted segments=%d", deleted)
        return command.reply(ResponseCode.SUCCESS)

    async def clear_unused(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """CLEAN_UNUSED_TOPIC (316): clears the queues of topics that don't exist. Deleting a topic
        (DELETE_TOPIC_IN_BROKER, 215) clears them, too.

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

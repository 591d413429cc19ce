"""Requests of slaves and tools for whole tables (21 GET_ALL_TOPIC_CONFIG, 43 GET_ALL_CONSUMER_OFFSET, 201
GET_ALL_SUBSCRIPTIONGROUP_CONFIG), and for the replication state (907 GET_BROKER_HA_STATUS)."""

from __future__ import annotations

from ha.broker.core import BrokerCore
from ha.protocol import java_json
from ha.protocol.bodies import (
    ConsumerOffsets,
    GroupTable,
    HAClientRuntimeInfo,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
    TopicConfigTable,
)
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService


class MetadataProcessor:
    """Answers with tables, or the replication state, as JSON bodies."""

    def __init__(self, core: BrokerCore, ha_service: HAService | None, ha_client: HAClient | None) -> None:
        self._tables = core.tables
        self._topics = core.tables.topics
        self._groups = core.tables.groups
        self._offsets = core.tables.offsets
        self._standing = core.standing
        self._ha = ha_service
        self._ha_client = ha_client
        self._wall_clock_ms = core.world.wall_clock_ms
        self._run_blocking = core.world.run_blocking

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {
            RequestCode.GET_ALL_TOPIC_CONFIG: self.topics,
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.consumer_offsets,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.groups,
            RequestCode.GET_BROKER_HA_STATUS: self.ha_status,
        }

    async def topics(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_ALL_TOPIC_CONFIG (21): answers with the configuration of all topics."""
        return await self._copy(command, self._topics.snapshot())

    async def consumer_offsets(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_ALL_CONSUMER_OFFSET (43), mostly sent by slaves: answers with the committed offsets of all groups."""
        if self._ha is not None:
            self._ha.record_table_copy(connection.peer[0])
        return await self._copy(command, self._offsets.snapshot())

    async def groups(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201): answers with the configuration of all consumer groups."""
        return await self._copy(command, self._groups.snapshot())

    async def _copy(
        self, command: RemotingCommand, table: TopicConfigTable | ConsumerOffsets | GroupTable
    ) -> RemotingCommand:
        """Answers with a table, encoded in a worker thread; in a failover group with the table's log position."""
        table.log_position = self._tables.log_position
        return command.reply(ResponseCode.SUCCESS, body=await self._run_blocking(java_json.dumps, table))

    async def ha_status(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_HA_STATUS (907): answers with the replication state: a master's slaves, or a slave's connection to
        its master."""
        ha = None if self._standing.is_slave else self._ha
        info = HARuntimeInfo(master=ha is not None)
        if ha is not None:
            seen = ha.statistics()
            info.master_commit_log_max_offset = seen.max_offset
            info.in_sync_slave_nums = seen.in_sync_replicas_nums - 1
            info.ha_connection_info = [
                HAConnectionRuntimeInfo(
                    addr=slave.peer,
                    diff=slave.lag_bytes,
                    in_sync=slave.is_in_sync,
                    slave_ack_offset=slave.ack_offset,
                    transfer_from_where=slave.transfer_offset,
                    transferred_byte_in_second=slave.transferred_bytes_per_s,
                )
                for slave in seen.slaves
            ]
        elif self._ha_client is not None:
            link = self._ha_client.statistics()
            info.ha_client_runtime_info = HAClientRuntimeInfo(
                last_read_timestamp=self._timestamp_ms(link.last_read_age_s),
                last_write_timestamp=self._timestamp_ms(link.last_write_age_s),
                master_addr=link.master_address,
                max_offset=link.max_offset,
                transferred_byte_in_second=link.received_bytes_per_s,
            )
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(info))

    def _timestamp_ms(self, age_s: float | None) -> int:
        return 0 if age_s is None else self._wall_clock_ms() - int(age_s * 1000)

"""From Config to what each room is told: the only place that reads both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from ha.broker.options import BrokerOptions, BrokerRole, ReplicaPolicy, memory_fraction_bytes
from ha.broker.registration import BrokerIdentity, RegistrationOptions
from ha.config import Config, remoting_limits, shown
from ha.failover.options import MemberOptions
from ha.protocol.record import encode_host
from ha.protocol.topic_names import TRACE_TOPIC
from ha.remoting import RemotingServerOptions
from ha.replication.options import HAOptions
from ha.replication.sync_state import ALONE, SyncStateRules
from ha.store.options import StoreOptions

from .ports import join

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

FLUSH_SHARE = 0.7
"""Of shutdownTimeout, the part that the store's last flush may take; the rest is for everything before it."""


MANY_FILES = 1 << 20
CLIENTS_SHARE = 4
SLAVES_SHARE = 16
"""Of the files that the process may have open, the part that one port's clients may take, and that slaves may"""


MEMBER_RECONNECT_S = 0.1
"""A member finds its master by what the group agreed on, often before that one is ready: every put waits for it then"""


class Advertised(msgspec.Struct, frozen=True, kw_only=True):
    """What others are told. `client_host` and `ha_host` as configured, `store_address` numeric for records."""

    client_host: str
    client_port: int
    ha_host: str
    ha_port: int
    store_address: str


def store_options(config: Config, advertised: Advertised, open_files_max: int = MANY_FILES) -> StoreOptions:
    """Of the store."""
    return StoreOptions(
        open_files_max=open_files_max,
        root=config.root,
        commitlog_directory=Path(config.store_path_commit_log),
        segment_size=config.mapped_file_size_commit_log_bytes,
        queue_entry_count=config.mapped_file_size_consume_queue_bytes // 20,
        index_enabled=config.message_index_enable,
        index_slot_count=config.max_hash_slot_num,
        index_entry_count=config.max_index_num,
        index_tags=config.index_tags,
        is_slave=config.is_slave or config.is_member,
        dispatch_confirmed=config.is_member,
        store_host=encode_host(advertised.store_address, advertised.client_port),
        message_size_max=config.max_message_size_bytes,
        append_property_crc=config.append_property_crc,
        delay_levels_ms=delay_levels_ms(config.message_delay_level),
        flush_mode=config.flush_disk_type,
        flush_interval_s=config.flush_interval_commit_log_ms / 1000,
        flush_least_pages=config.flush_commit_log_least_pages,
        flush_thorough_interval_s=config.flush_commit_log_thorough_interval_ms / 1000,
        scrub_bytes_per_s=config.scrub_bytes_per_s,
        scrub_pause_s=float(config.scrub_pause_s),
        clean_interval_s=config.clean_resource_interval_ms / 1000,
        delete_when_hours=frozenset(int(hour) for hour in config.delete_when_hours.split(";") if hour),
        reserved_h=float(config.file_reserved_time_h),
        disk_used_ratio_max=config.disk_max_used_space_percent / 100,
        clean_forcibly=config.clean_file_forcibly_enable,
        disk_used_ratio_forcible=config.disk_space_clean_forcibly_percent / 100,
        disk_used_ratio_warning=config.disk_space_warning_percent / 100,
        delete_files_max=config.delete_file_batch_max,
        retain_bytes_max=config.ha_retain_max_bytes,
        stop_timeout_s=config.shutdown_timeout_ms / 1000 * FLUSH_SHARE,
    )


def ha_options(config: Config, open_files_max: int = MANY_FILES) -> HAOptions:
    """Of both sides of replication."""
    # A member that lacks the log's begin could never be master.
    start: Literal["last", "first"] = "first" if config.is_member else config.ha_start_from
    return HAOptions(
        connection_count_max=min(HAOptions().connection_count_max, max(1, open_files_max // SLAVES_SHARE)),
        heartbeat_interval_s=config.ha_send_heartbeat_interval_ms / 1000,
        housekeeping_interval_s=config.ha_housekeeping_interval_ms / 1000,
        transfer_batch_size_bytes=config.ha_transfer_batch_size_bytes,
        fall_behind_max_bytes=config.ha_max_gap_not_in_sync_bytes,
        transfer_bytes_per_s_max=config.max_ha_transfer_bytes_per_s if config.ha_flow_control_enable else None,
        start_from=start,
        out_of_range=config.ha_out_of_range,
        overlap_bytes_max=config.ha_overlap_max_bytes,
        reconnect_interval_s=MEMBER_RECONNECT_S if config.is_member else HAOptions().reconnect_interval_s,
        ack_flushed=(config.is_slave or config.is_member) and config.flush_disk_type == "SYNC_FLUSH",
    )


def broker_options(config: Config, advertised: Advertised) -> BrokerOptions:
    """Of the front."""
    return BrokerOptions(
        cluster_name=config.cluster_name,
        broker_name=config.broker_name,
        broker_id=config.broker_id,
        role=BrokerRole(config.broker_role),
        keeps_tables_in_log=config.is_member,
        host=advertised.store_address,
        port=advertised.client_port,
        ha_address=join(advertised.ha_host, advertised.ha_port),
        config_dir=config.root / "config",
        permission=config.broker_permission,
        region_id=config.region_id,
        trace_on=config.trace_on,
        flush_sync=config.flush_disk_type == "SYNC_FLUSH",
        sync_flush_timeout_s=config.sync_flush_timeout_ms / 1000,
        slave_timeout_s=config.slave_timeout_ms / 1000,
        replica_policy=replica_policy(config),
        message_size_max=config.max_message_size_bytes,
        auto_create_topic=config.auto_create_topic_enable,
        default_topic_queue_nums=config.default_topic_queue_nums,
        topic_count_max=config.topic_count_max,
        group_count_max=config.group_count_max,
        sends_in_flight_max=config.sends_in_flight_max,
        store_reply_message=config.store_reply_message_enable,
        hold_count_max=config.hold_count_max,
        auto_create_group=config.auto_create_subscription_group,
        slave_read_enable=bool(config.slave_read_enable),
        offset_check_in_slave=config.offset_check_in_slave,
        long_polling_enable=config.long_polling_enable,
        enable_property_filter=config.enable_property_filter,
        short_polling_s=config.short_polling_time_ms / 1000,
        transfer_hot_count_max=config.transfer_hot_count_max,
        transfer_hot_bytes_max=config.transfer_hot_bytes_max,
        transfer_cold_count_max=config.transfer_cold_count_max,
        transfer_cold_bytes_max=config.transfer_cold_bytes_max,
        access_in_memory_bytes_max=memory_fraction_bytes(config.access_message_in_memory_percent / 100),
        channel_expired_s=config.channel_expired_timeout_ms / 1000,
        flush_consumer_offset_interval_s=config.flush_consumer_offset_interval_ms / 1000,
        server_side_reset_offset=config.use_server_side_reset_offset,
        flush_delay_offset_interval_s=config.flush_delay_offset_interval_ms / 1000,
        reject_transactions=config.reject_transaction_message,
        transaction_timeout_s=config.transaction_time_out_ms / 1000,
        transaction_check_max=config.transaction_check_max,
        transaction_check_interval_s=config.transaction_check_interval_ms / 1000,
    )


def reported_config(config: Config) -> dict[str, str]:
    """Returns the configuration by key as tools read it, with some keys that RocketMQ 4.9's tools require."""
    found = shown(config)
    tls = found.get("tls.enable", "false")
    return {
        **found,
        "filterServerNums": "0",
        "msgTraceTopicName": TRACE_TOPIC,
        "traceTopicEnable": "false",
        "useTLS": tls,
    }


def replica_policy(config: Config) -> ReplicaPolicy | None:
    """Return the rule of 5.x if one of its keys is set, else None for that of 4.9."""
    wanted, least, all_in_sync = config.in_sync_replicas, config.min_in_sync_replicas, config.all_ack_in_sync_state_set
    if wanted is None and least is None and not all_in_sync:
        return None
    return ReplicaPolicy(in_sync_replicas=wanted or 1, min_in_sync_replicas=least or 1, all_in_sync=all_in_sync)


def ack_count(config: Config) -> int | None:
    """How many of the sync-state set acknowledge a message of a member, its master included; None: all of them.

    RocketMQ's default is the master alone. Here it is all: whoever takes the trouble of elections wants to keep what
    was acknowledged, and says so if not.
    """
    if config.broker_role == "ASYNC_MASTER":
        return ALONE
    return None if config.all_ack_in_sync_state_set else config.in_sync_replicas


def sync_state_rules(config: Config) -> SyncStateRules:
    """Of the sync-state set that a member keeps while it is master."""
    return SyncStateRules(
        ack_count=ack_count(config),
        min_in_sync_replicas=config.min_in_sync_replicas or 1,
        not_catch_up_s_max=config.slave_not_catch_up_ms_max / 1000,
        stalled_s_max=config.lease_ttl_ms / 1000,
    )


def member_options(config: Config, ha_address: str, broker_address: str, run_id: int = 0) -> MemberOptions:
    """Of a member of a failover group."""
    return MemberOptions(
        broker_id=config.broker_id,
        ha_address=ha_address,
        broker_address=broker_address,
        run_id=run_id,
        priority=config.election_priority,
        ack_count=ack_count(config),
        elects_unclean=config.elect_unclean_master,
        lease_ttl_s=config.lease_ttl_ms / 1000,
        switch_timeout_s=config.switch_timeout_ms / 1000,
    )


def remoting_options(config: Config, open_files_max: int = MANY_FILES) -> RemotingServerOptions:
    """Of the broker's own port and the embedded name server's. Of the open files each gets a quarter at most.

    The rest is for the store: a stranger who takes every descriptor must not keep it from its files.
    """
    options = RemotingServerOptions(idle_timeout_s=float(config.channel_idle_timeout_s), **remoting_limits(config))
    connections_max = min(options.connections_max, max(1, open_files_max // CLIENTS_SHARE))
    return msgspec.structs.replace(options, connections_max=connections_max)


def registration_options(config: Config) -> RegistrationOptions:
    """Of the broker's standing with its name servers."""
    return RegistrationOptions(
        period_s=config.register_name_server_period_ms / 1000,
        timeout_s=config.register_broker_timeout_ms / 1000,
        unregister_timeout_s=min(3.0, config.shutdown_timeout_ms / 1000 * (1 - FLUSH_SHARE) / 2),
    )


def identity(config: Config, advertised: Advertised) -> BrokerIdentity:
    """Return how name servers know this broker."""
    return BrokerIdentity(
        cluster_name=config.cluster_name,
        broker_name=config.broker_name,
        broker_address=join(advertised.client_host, advertised.client_port),
        ha_address=join(advertised.ha_host, advertised.ha_port),
    )


def delay_levels_ms(text: str) -> tuple[int, ...]:
    """Return "1s 5m 2h" in ms."""
    return tuple(int(number) * _UNIT_MS[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))

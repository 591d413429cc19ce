"""Translates Config into the options of each package; nothing else reads both.

By default, an option takes the value of the configuration field of the same name (see ha/config/options.py). The
functions below compute the others, for example those with another name or unit, and those whose value depends on
several keys or on something besides the configuration.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from ha.broker.options import BrokerOptions, BrokerRole, ReplicaPolicy, memory_fraction_bytes
from ha.broker.registration import BrokerIdentity, RegistrationOptions
from ha.config import Config, options_of, shown
from ha.failover.options import MemberOptions
from ha.grpc import GrpcOptions
from ha.protocol.access_bodies import UserConfig
from ha.protocol.record import encode_host
from ha.protocol.topic_names import TRACE_TOPIC
from ha.proxy.options import FrontOptions
from ha.remoting import RemotingServerOptions
from ha.replication.options import HAOptions
from ha.replication.sync_state import ALONE, SyncStateRules
from ha.store.options import StoreOptions

from .ports import join

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

FLUSH_SHARE = 0.7
"""Share (0 to 1) of shutdownTimeout for the store's last flush; the rest is for the steps before it."""

OPEN_FILES_UNLIMITED = 1 << 20
GRPC_MESSAGE_OVERHEAD = 1 << 20
"""Number of bytes by which a gRPC request may exceed the maximum size of a message body."""
CLIENTS_SHARE = 4
SLAVES_SHARE = 16
"""Divisors of the process's limit of open files: the clients of one port may use a quarter of them, and slaves a
sixteenth."""

MEMBER_RECONNECT_S = 0.1
"""Maximum wait in seconds before a member connects to its master again after a connection was lost or could not be
made. It is shorter than a slave's, because a new master is often announced before it accepts connections, and all its
puts wait for its slaves.
"""


class Advertised(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses reported to others: `client_host` and `ha_host` as configured, `store_address` numeric for records."""

    client_host: str
    client_port: int
    ha_host: str
    ha_port: int
    store_address: str


def store_options(config: Config, advertised: Advertised, open_files_max: int = OPEN_FILES_UNLIMITED) -> StoreOptions:
    """Returns the options of the store."""
    return options_of(
        StoreOptions,
        config,
        open_files_max=open_files_max,
        commitlog_directory=Path(config.store_path_commit_log),
        queue_entry_count=config.mapped_file_size_consume_queue_bytes // 20,
        is_slave=config.is_slave or config.is_member,
        dispatch_confirmed=config.is_member,
        store_host=encode_host(advertised.store_address, advertised.client_port),
        delay_levels_ms=delay_levels_ms(config.message_delay_level),
        delete_when_hours=frozenset(int(hour) for hour in config.delete_when_hours.split(";") if hour),
        disk_used_ratio_max=config.disk_max_used_space_percent / 100,
        disk_used_ratio_forcible=config.disk_space_clean_forcibly_percent / 100,
        disk_used_ratio_warning=config.disk_space_warning_percent / 100,
        stop_timeout_s=config.shutdown_timeout_ms / 1000 * FLUSH_SHARE,
    )


def ha_options(config: Config, open_files_max: int = OPEN_FILES_UNLIMITED) -> HAOptions:
    """Returns the options of both sides of replication."""
    defaults = HAOptions()
    # A member whose log lacks the beginning could never become master.
    start: Literal["last", "first"] = "first" if config.is_member else config.ha_start_from
    return options_of(
        HAOptions,
        config,
        prefix="ha_",
        connection_count_max=min(defaults.connection_count_max, max(1, open_files_max // SLAVES_SHARE)),
        transfer_bytes_per_s_max=config.max_ha_transfer_bytes_per_s if config.ha_flow_control_enable else None,
        start_from=start,
        reconnect_interval_s=MEMBER_RECONNECT_S if config.is_member else defaults.reconnect_interval_s,
        ack_flushed=(config.is_slave or config.is_member) and config.flush_mode == "SYNC_FLUSH",
    )


def broker_options(config: Config, advertised: Advertised, initial_users: tuple[UserConfig, ...] = ()) -> BrokerOptions:
    """Returns the options of the broker."""
    return options_of(
        BrokerOptions,
        config,
        role=BrokerRole(config.broker_role),
        keeps_tables_in_log=config.is_member,
        initial_users=initial_users if config.authentication_enabled else (),
        host=advertised.store_address,
        port=advertised.client_port,
        ha_address=join(advertised.ha_host, advertised.ha_port),
        config_dir=config.root / "config",
        permission=config.broker_permission,
        flush_sync=config.flush_mode == "SYNC_FLUSH",
        replica_policy=replica_policy(config),
        access_in_memory_bytes_max=memory_fraction_bytes(config.access_message_in_memory_percent / 100),
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
    """Returns the values of RocketMQ 5's keys inSyncReplicas, minInSyncReplicas and allAckInSyncStateSet. None if none
    of them is set; then RocketMQ 4.9's rule applies."""
    wanted, least, all_in_sync = config.in_sync_replicas, config.min_in_sync_replicas, config.all_ack_in_sync_state_set
    if wanted is None and least is None and not all_in_sync:
        return None
    return ReplicaPolicy(in_sync_replicas=wanted or 1, min_in_sync_replicas=least or 1, all_in_sync=all_in_sync)


def promised_copies(config: Config) -> int:
    """Returns the number of nodes that a SYNC_MASTER with this configuration is expected to store each message on.

    It is at least 2 if sends wait for all slaves or members in sync, although sends also succeed while none is in sync.
    """
    policy = replica_policy(config)
    if policy is None:
        return 2
    by_number = max(policy.in_sync_replicas, policy.min_in_sync_replicas)
    waits_for_all = policy.all_in_sync or (config.is_member and config.in_sync_replicas is None)
    return max(by_number, 2) if waits_for_all else by_number


def ack_count(config: Config) -> int | None:
    """Returns how many members of the sync-state set, including the master, must acknowledge a message; None: all. For
    an ASYNC_MASTER, that is the master alone.

    For a SYNC_MASTER, RocketMQ's default is the master alone, too. Here the default is all, because a failover group
    exists to keep acknowledged messages.
    """
    if config.broker_role == "ASYNC_MASTER":
        return ALONE
    return None if config.all_ack_in_sync_state_set else config.in_sync_replicas


def sync_state_rules(config: Config) -> SyncStateRules:
    """Returns the rules of the sync-state set that a member maintains while it is master."""
    return SyncStateRules(
        ack_count=ack_count(config),
        min_in_sync_replicas=config.min_in_sync_replicas or 1,
        not_catch_up_s_max=config.slave_not_catch_up_ms_max / 1000,
        stalled_s_max=config.lease_ttl_ms / 1000,
    )


def member_options(config: Config, ha_address: str, broker_address: str, run_id: int = 0) -> MemberOptions:
    """Returns the options of a member of a failover group."""
    return options_of(
        MemberOptions,
        config,
        ha_address=ha_address,
        broker_address=broker_address,
        run_id=run_id,
        priority=config.election_priority,
        ack_count=ack_count(config),
        is_learner=config.async_learner,
        elects_unclean=config.elect_unclean_master,
    )


def remoting_options(config: Config, open_files_max: int = OPEN_FILES_UNLIMITED) -> RemotingServerOptions:
    """Returns the options of the broker's remoting ports and of the embedded name server's port.

    Connections may use only a share of the limit of open files, so that clients leave enough of it to the store.
    """
    connections_max = min(config.connections_max, max(1, open_files_max // CLIENTS_SHARE))
    return options_of(RemotingServerOptions, config, connections_max=connections_max)


def grpc_options(config: Config, open_files_max: int = OPEN_FILES_UNLIMITED) -> GrpcOptions:
    """Returns the limits of the gRPC port's connections."""
    defaults = GrpcOptions()
    return GrpcOptions(
        message_size_max=config.message_size_max + GRPC_MESSAGE_OVERHEAD,
        connections_max=min(defaults.connections_max, max(1, open_files_max // CLIENTS_SHARE)),
        idle_timeout_s=config.idle_timeout_s,
    )


def front_options(config: Config) -> FrontOptions:
    """Returns the limits of gRPC calls."""
    return FrontOptions(message_size_max=config.message_size_max, delay_ms_max=config.timer_delay_s_max * 1000)


def registration_options(config: Config) -> RegistrationOptions:
    """Returns the options of the registration at name servers."""
    return RegistrationOptions(
        period_s=config.register_name_server_period_ms / 1000,
        timeout_s=config.register_broker_timeout_ms / 1000,
        unregister_timeout_s=min(3.0, config.shutdown_timeout_ms / 1000 * (1 - FLUSH_SHARE) / 2),
    )


def identity(config: Config, advertised: Advertised) -> BrokerIdentity:
    """Returns the names and addresses under which this broker registers at name servers."""
    return BrokerIdentity(
        cluster_name=config.cluster_name,
        broker_name=config.broker_name,
        broker_address=join(advertised.client_host, advertised.client_port),
        ha_address=join(advertised.ha_host, advertised.ha_port),
    )


def delay_levels_ms(text: str) -> tuple[int, ...]:
    """Parses a list such as "1s 5m 2h" into milliseconds."""
    return tuple(int(number) * _UNIT_MS[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))

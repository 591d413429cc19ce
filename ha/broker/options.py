"""Options of a broker's front end. ha/node/options.py creates them from the configuration; this module reads neither
files nor the environment."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

import msgspec

from ha.protocol.access_bodies import UserConfig
from ha.protocol.bodies import HEARTBEAT_SIZE_MAX


class BrokerRole(Enum):
    """RocketMQ's brokerRole."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


def memory_fraction_bytes(fraction: float = 0.4) -> int:
    """Returns `fraction` of this machine's memory, in bytes. The default is RocketMQ's
    accessMessageInMemoryMaxRatio."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * fraction)


class ReplicaPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """RocketMQ 5.x's inSyncReplicas keys. Without them (None in BrokerOptions), a SYNC_MASTER waits for any one slave,
    as in 4.9.

    in_sync_replicas: number of nodes, this one included, that must have a message before it is answered PUT_OK
    (inSyncReplicas).
    min_in_sync_replicas: number of nodes, this one included, that must be in sync before anything is appended
    (minInSyncReplicas).
    all_in_sync: whether to wait for every slave in sync instead of a number (allAckInSyncStateSet).
    """

    in_sync_replicas: int = 1
    min_in_sync_replicas: int = 1
    all_in_sync: bool = False


class BrokerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one broker's front end. Sizes in bytes, times in seconds.

    Most options are copies of the fields of the same name in `ha.config.Config`, which has their keys and descriptions
    (a time in ms there is one in s here). Those with a key in brackets, here or below, are computed from it. All others
    always have their defaults.

    role: [brokerRole] as configured; with failover, it decides what puts wait for while the broker is master. The
    current role is in `Standing`.
    host, port: [brokerIP1, listenPort] the broker's address in records, message ids and routes.
    config_dir: [storePathRootDir/config] folder of topics.json, consumerOffset.json and subscriptionGroup.json.
    permission: [brokerPermission] what clients may do with every topic: sum of 4 (read) and 2 (write).
    ha_address: [brokerIP2:haListenPort] host:port that slaves use.
    flush_sync: [flushDiskType=SYNC_FLUSH] whether puts wait for their flush.
    replica_policy: [inSyncReplicas, minInSyncReplicas, allAckInSyncStateSet] None if none of these keys is set.
    access_in_memory_bytes_max: [accessMessageInMemoryMaxRatio of the machine's memory] distance from the end of the log
    beyond which messages count as on disk.
    """

    cluster_name: str = "DefaultCluster"
    broker_name: str = "broker"
    broker_id: int = 0
    role: BrokerRole = BrokerRole.ASYNC_MASTER
    host: str = "127.0.0.1"
    port: int = 10911
    config_dir: Path = Path("config")
    permission: int = 6
    ha_address: str = "127.0.0.1:10912"
    region_id: str = "DefaultRegion"
    trace_on: bool = True

    # put
    flush_sync: bool = False
    sync_flush_timeout_s: float = 5.0
    slave_timeout_s: float = 3.0
    replica_policy: ReplicaPolicy | None = None
    message_size_max: int = 4 * 1024 * 1024
    # sends waiting for a flush or a slave: at the first limit a connection is no longer read, at the second sends are
    # refused
    sends_in_flight_per_connection_max: int = 16_384
    sends_in_flight_max: int = 131_072
    store_reply_message: bool = True
    replies_in_flight_max: int = 4096
    reply_bytes_max: int = 64 * 1024 * 1024
    """Maximum bytes of the bodies and properties of replies in flight"""

    # topics and groups; the limits bound the memory that auto-creation can use
    auto_create_topic: bool = True
    default_topic_queue_nums: int = 8
    auto_create_group: bool = True
    topic_count_max: int = 16_384
    group_count_max: int = 16_384
    offset_key_count_max: int = 65_536
    offset_count_max: int = 1_048_576

    # pull
    slave_read_enable: bool = False
    offset_check_in_slave: bool = False
    long_polling_enable: bool = True
    enable_property_filter: bool = False
    short_polling_s: float = 1.0
    suspend_s_max: float = 120.0
    hold_count_max: int = 100_000
    hold_count_per_connection_max: int = 4096
    transfer_hot_count_max: int = 32
    transfer_hot_bytes_max: int = 256 * 1024
    transfer_cold_count_max: int = 8
    transfer_cold_bytes_max: int = 64 * 1024
    access_in_memory_bytes_max: int = msgspec.field(default_factory=memory_fraction_bytes)

    # POP
    enable_retry_topic_v2: bool = False
    pop_in_flight_per_queue_max: int = 100_000
    pop_in_flight_max: int = 1_000_000
    pop_waiting_bytes_max: int = 64 * 1024 * 1024

    # transactions
    reject_transactions: bool = False
    transaction_timeout_s: float = 6.0
    transaction_check_max: int = 15
    transaction_check_interval_s: float = 30.0

    # timer messages
    timer_enable: bool = True
    timer_delay_s_max: int = 40 * 86_400
    recall_enable: bool = True

    # clients, offsets, slave
    channel_expired_s: float = 120.0
    channel_scan_interval_s: float = 10.0
    client_count_max: int = 65_536
    queue_lock_count_max: int = 65_536
    groups_per_heartbeat_max: int = 256
    subscriptions_per_group_max: int = 1024
    heartbeat_size_max: int = HEARTBEAT_SIZE_MAX
    flush_consumer_offset_interval_s: float = 5.0
    flush_delay_offset_interval_s: float = 10.0
    server_side_reset_offset: bool = True
    slave_sync_interval_s: float = 10.0
    slave_sync_timeout_s: float = 3.0
    authentication_enabled: bool = False
    authorization_enabled: bool = False
    initial_users: tuple[UserConfig, ...] = ()
    """[initAuthenticationUser, innerClientAuthenticationCredentials] users that a master creates at its start if they
    don't exist; their representation hides the password"""
    keeps_tables_in_log: bool = False
    """[etcdEndpoints is set] whether topics, groups, offsets and users are records of the log, as in a failover group
    (group_log.py)"""

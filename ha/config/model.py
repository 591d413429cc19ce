"""The configuration keys: one frozen struct each for a broker node, a name server, and a front for gRPC clients.

The first argument of `_key` is the key as RocketMQ spells it; keys marked "own" exist only in halog. The type and its
bounds define the accepted values. Numbers keep RocketMQ's units, and field names end in the unit. A field that another
package uses has the name of that package's option (options.py). DERIVED, "" or None on a field marked "derived" stands
for a value that depends on other fields. `__post_init__` fills it in, except for addresses that only the running node
finds out (brokerIP1, brokerIP2, haMasterAddress). Creating a struct checks everything; it raises ConfigError for the
first error, with the others in its `others`.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ha.errors import ConfigError

from .access_keys import check_access
from .acl_keys import AclKeys, check_acl, derive_acl
from .broker_tls_keys import check_broker_tls, derive_broker_tls
from .check import DERIVED, check_addresses, check_bounds, raise_errors
from .failover_keys import FailoverKeys, check_failover, derive_failover
from .key import INT_MAX, Interval
from .key import key as _key
from .link_keys import LinkKeys, check_link, derive_link
from .tls_keys import check_tls, derive_tls
from .user_keys import check_users

LONG_MAX = 2**63 - 1
RECORD_OVERHEAD_MAX = 34_000
"""Maximum bytes of a record besides its body: fixed fields, topic (255), properties (32767) and the filler record."""
HA_BUFFER_SIZE = 4 << 20
"""Size in bytes of a RocketMQ slave's receive buffer, into which a whole frame must fit."""

LOOPBACK = "127.0.0.1"
GRPC_PORT_DEFAULT = 8081


class OptionalPort(int):
    """A default port, not a configured one: if it is in use, the node runs without it."""


Port = Annotated[int, Meta(ge=0, le=65_535)]
Int = Annotated[int, Meta(ge=0, le=INT_MAX)]
PositiveInt = Annotated[int, Meta(ge=1, le=INT_MAX)]
Milliseconds = Annotated[int, Meta(ge=1, le=INT_MAX)]
Long = Annotated[int, Meta(ge=0, le=LONG_MAX)]
Percent = Annotated[int, Meta(ge=1, le=99)]
DerivedPort = Annotated[int, Meta(ge=DERIVED, le=65_535)]
Name = Annotated[str, Meta(max_length=127, pattern=r"^[^\s@#;,]*$")]
"""A name without spaces, and without characters that separate names in files, routes and log lines."""
Host = Annotated[str, Meta(max_length=253, pattern=r"^[A-Za-z0-9._:-]*$")]
Addresses = Annotated[str, Meta(pattern=r"^$|^[A-Za-z0-9._-]+:\d{1,5}(;[A-Za-z0-9._-]+:\d{1,5})*;?$")]
Address = Annotated[str, Meta(pattern=r"^$|^[A-Za-z0-9._-]+:\d{1,5}$")]
Url = Annotated[str, Meta(pattern=r"^$|^https?://[^\s/]+(/\S*)?$")]
Hours = Annotated[str, Meta(pattern=r"^([01]?\d|2[0-3])(;([01]?\d|2[0-3]))*;?$")]
DelayLevels = Annotated[str, Meta(pattern=r"^[1-9]\d{0,8}[smhd]( +[1-9]\d{0,8}[smhd])*$")]

BrokerRoleName = Literal["ASYNC_MASTER", "SYNC_MASTER", "SLAVE"]


class Config(FailoverKeys, frozen=True, kw_only=True):
    """The configuration of a broker node: master, slave, or member of a failover group.

    The default is an ASYNC_MASTER with its own name server, on loopback.
    """

    # identity
    cluster_name: Name = _key("brokerClusterName", "DefaultCluster")
    """name of the cluster, which groups broker sets in tools"""
    broker_name: Name = _key("brokerName", "")
    """name of the broker set, the same on a master and its slaves; derived: the host name"""
    broker_id: Annotated[int, Meta(ge=DERIVED, le=LONG_MAX)] = _key("brokerId", DERIVED)
    """number of the broker within its set; derived: 0 for a master (no other value is allowed), 1 for a slave; a
    failover group's member must set it, to 1 or higher"""
    broker_role: BrokerRoleName = _key("brokerRole", "ASYNC_MASTER")
    """whether the broker is a slave, and if not, whether its puts wait for slaves (SYNC_MASTER); `ha.slave` has the
    default SLAVE, and `ha.member`, which uses the key while it is master, SYNC_MASTER"""
    broker_permission: Literal[2, 4, 6] = _key("brokerPermission", 6)
    """what clients may do with every topic: sum of 4 (read) and 2 (write)"""
    region_id: Name = _key("regionId", "DefaultRegion")
    """value of the property MSG_REGION of messages"""
    trace_on: bool = _key("traceOn", True)
    """value of the property TRACE_ON of messages"""

    # addresses
    bind_address: Host = _key("bindAddress", "")
    """address on which all ports listen, except the admin port; derived: 127.0.0.1, or 0.0.0.0 if brokerIP1 or
    brokerIP2 is not a loopback address"""
    listen_port: DerivedPort = _key("listenPort", DERIVED)
    """port for clients; derived: 10911, for a slave 10921; 0 lets the system choose; listenPort - 2 is opened as
    RocketMQ's fast port"""
    ha_listen_port: DerivedPort = _key("haListenPort", DERIVED)
    """port for slaves; derived: listenPort + 1"""
    admin_listen_port: DerivedPort = _key("adminListenPort", DERIVED)
    """own; HTTP port with metrics, health checks and dashboard; derived: listenPort + 2"""
    grpc_listen_port: DerivedPort = _key("grpcListenPort", DERIVED)
    """own; port on bindAddress for RocketMQ 5's gRPC clients; 0 disables it; derived: 8081 on a master whose listenPort
    is 10911 (none if that port is in use), otherwise 0"""
    admin_bind_address: Host = _key("adminBindAddress", LOOPBACK)
    """own; address on which the admin port listens"""
    broker_ip1: Host = _key("brokerIP1", "")
    """address reported to clients; derived: bindAddress, or this machine's address if bindAddress is a wildcard"""
    broker_ip2: Host = _key("brokerIP2", "")
    """address reported to slaves; derived: brokerIP1"""
    name_server_addresses: Addresses = _key("namesrvAddr", "")
    """name servers to register at; unset: a master runs its own name server on port 9876 (a free port if listenPort is
    0), a slave uses 127.0.0.1:9876"""
    ha_master_address: Address = _key("haMasterAddress", "")
    """HA port of a slave's master; derived: 127.0.0.1:10912 while namesrvAddr is unset, otherwise the name server
    reports it"""
    register_name_server_period_ms: Annotated[int, Meta(ge=10_000, le=60_000)] = _key(
        "registerNameServerPeriod", 30_000
    )
    """interval between registrations at the name servers, in ms"""
    register_broker_timeout_ms: Milliseconds = _key("registerBrokerTimeoutMills", 24_000)
    """timeout of one registration, in ms"""
    idle_timeout_s: PositiveInt = _key("serverChannelMaxIdleTimeSeconds", 120)
    """seconds without a byte in either direction after which a client's connection is closed"""
    channel_expired_ms: Milliseconds = _key("channelExpiredTimeout", 120_000)
    """time without a heartbeat after which a client is removed from its groups, in ms"""
    shutdown_timeout_ms: Interval = _key("shutdownTimeout", 10_000)
    """own; maximum time from the first signal to the end of the process, in ms"""
    log_format: Literal["text", "json"] = _key("logFormat", "text")
    """own; format of log lines on stderr, also set by `--log-format`"""
    otel_endpoint: Url = _key("otelEndpoint", "")
    """own; URL of an OpenTelemetry collector for metrics and traces, such as http://127.0.0.1:4318 (OTLP over HTTP;
    halog[otel]); derived: the environment variable OTEL_EXPORTER_OTLP_ENDPOINT"""
    otel_interval_ms: Interval = _key("otelInterval", 15_000)
    """own; interval between two exports to otelEndpoint, in ms"""
    otel_trace_every: PositiveInt = _key("otelTraceEvery", 100)
    """own; number N: one of every N groups of sends gets a trace span; sends that are answered together are a group"""

    # store
    store_path_root_dir: str = _key("storePathRootDir", "")
    """directory of the store; derived: data/master, data/slave, or for a member data/member-brokerId"""
    store_path_commit_log: str = _key("storePathCommitLog", "")
    """directory of the commitlog; derived: commitlog in storePathRootDir"""
    segment_size: Annotated[int, Meta(ge=4096, le=INT_MAX)] = _key("mappedFileSizeCommitLog", 1_073_741_824)
    """bytes of a commitlog file; the same on a master and its slaves"""
    preallocate: bool = _key("preallocateCommitLog", True)
    """own; whether the disk space of a commitlog file is allocated when the file is created, so that messages are
    refused if the disk is full; otherwise it is allocated as messages arrive, and a full disk stops the node; default
    of `ha.master`, `ha.slave` and `ha.member` without configuration: false"""
    mapped_file_size_consume_queue_bytes: Annotated[int, Meta(ge=20, le=INT_MAX)] = _key(
        "mappedFileSizeConsumeQueue", 6_000_000
    )
    """bytes of a consume-queue file; a multiple of 20, the size of an entry"""
    index_enabled: bool = _key("messageIndexEnable", True)
    """whether messages are indexed by their keys, so that they can be queried"""
    index_slot_count: PositiveInt = _key("maxHashSlotNum", 5_000_000)
    """hash slots of an index file"""
    index_entry_count: Annotated[int, Meta(ge=2, le=INT_MAX)] = _key("maxIndexNum", 20_000_000)
    """maximum entries of an index file"""
    index_tags: bool = _key("indexTags", True)
    """own; whether the key index contains the tag of each message, as in 5.4 and later; 4.9 and 5.3 have no tags in
    it"""
    message_size_max: Annotated[int, Meta(ge=DERIVED, le=INT_MAX)] = _key("maxMessageSize", DERIVED)
    """maximum bytes of a message body; derived: 4194304, or less if it would not fit into mappedFileSizeCommitLog"""
    message_delay_level: DelayLevels = _key(
        "messageDelayLevel", "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    )
    """delay of each delay level, from level 1 on"""
    append_property_crc: bool = _key("enabledAppendPropCRC", False)
    """whether each record gets a property with a CRC of the record"""
    flush_mode: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = _key("flushDiskType", "ASYNC_FLUSH")
    """whether a put is answered before (ASYNC_FLUSH) or after (SYNC_FLUSH) it is flushed to the disk"""
    flush_interval_ms: Milliseconds = _key("flushIntervalCommitLog", 500)
    """with ASYNC_FLUSH: interval at which the broker checks how many pages are unflushed, in ms"""
    flush_least_pages: Int = _key("flushCommitLogLeastPages", 4)
    """with ASYNC_FLUSH: a check flushes if at least this number of 4 KiB pages is unflushed"""
    flush_thorough_interval_ms: Milliseconds = _key("flushCommitLogThoroughInterval", 10_000)
    """with ASYNC_FLUSH: time after which any unflushed page is flushed, in ms"""
    sync_flush_timeout_ms: Milliseconds = _key("syncFlushTimeout", 5_000)
    """with SYNC_FLUSH: maximum time that a put waits for its flush, in ms; then it is answered FLUSH_DISK_TIMEOUT"""
    scrub_bytes_per_s: Int = _key("scrubBytesPerSecond", 5 << 20)
    """own; rate at which the store is read and verified in rounds, in bytes per second; 0 disables it"""
    scrub_pause_s: Annotated[int, Meta(ge=1, le=INT_MAX)] = _key("scrubPauseSeconds", 3_600)
    """own; pause between two rounds of verification, in seconds"""
    heal_from: Addresses = _key("healFrom", "")
    """own; further HA ports to repair damaged bytes from, besides those of the master and of registered slaves"""
    clean_interval_ms: Milliseconds = _key("cleanResourceInterval", 10_000)
    """interval at which expired files are looked for, in ms"""
    delete_when_hours: Hours = _key("deleteWhen", "04")
    """hours of the day (0 to 23, local time, separated by ;) at which expired files are deleted"""
    reserved_h: PositiveInt = _key("fileReservedTime", 72)
    """time after its last write at which a commitlog file expires, in hours"""
    disk_max_used_space_percent: Annotated[int, Meta(ge=10, le=95)] = _key("diskMaxUsedSpaceRatio", 75)
    """disk usage, in percent, above which expired files are deleted at any hour"""
    disk_space_clean_forcibly_percent: Percent = _key("diskSpaceCleanForciblyRatio", 85)
    """disk usage, in percent, above which files are deleted before they expire"""
    disk_space_warning_percent: Percent = _key("diskSpaceWarningLevelRatio", 90)
    """disk usage, in percent, above which the store rejects messages"""
    clean_forcibly: bool = _key("cleanFileForciblyEnable", True)
    """whether files are deleted before they expire if the disk is fuller than diskSpaceCleanForciblyRatio"""
    delete_files_max: PositiveInt = _key("deleteFileBatchMax", 10)
    """maximum number of files deleted in one round"""
    retain_bytes_max: Long = _key("haRetainMaxBytes", 8 << 30)
    """own; an expired file that a slave still needs is deleted once the end of the log is more than this number of
    bytes after the file's start; RocketMQ does not keep files for slaves"""

    # replication
    ha_heartbeat_interval_ms: Milliseconds = _key("haSendHeartbeatInterval", 5_000)
    """time without other data after which master and slave send each other a heartbeat, in ms"""
    ha_housekeeping_interval_ms: Milliseconds = _key("haHousekeepingInterval", 20_000)
    """time without data from the other side after which a replication connection is closed, in ms; greater than
    haSendHeartbeatInterval"""
    ha_transfer_batch_size_bytes: PositiveInt = _key("haTransferBatchSize", 1 << 20)
    """maximum bytes of the log in one frame to a slave; at most 4194292, so that a frame fits a slave's buffer"""
    ha_fall_behind_max_bytes: PositiveInt = _key("haMaxGapNotInSync", 268_435_456)
    """a slave that is at least this number of bytes behind the master is not in sync; haSlaveFallbehindMax, the name of
    this key in 4.9, is accepted too"""
    ha_flow_control_enable: bool = _key("haFlowControlEnable", False)
    """whether maxHaTransferByteInSecond limits the transfer to slaves"""
    max_ha_transfer_bytes_per_s: Annotated[int, Meta(ge=1024, le=LONG_MAX)] = _key(
        "maxHaTransferByteInSecond", 104_857_600
    )
    """maximum transfer rate to each slave, in bytes per second, if haFlowControlEnable is true"""
    slave_timeout_ms: Milliseconds = _key("slaveTimeout", 3_000)
    """maximum time that a put waits for slaves, in ms; then it is answered FLUSH_SLAVE_TIMEOUT"""
    total_replicas: PositiveInt | None = _key("totalReplicas", None)
    """upper bound of inSyncReplicas; no other effect"""
    in_sync_replicas: PositiveInt | None = _key("inSyncReplicas", None)
    """with brokerRole=SYNC_MASTER: number of nodes, including the master, that must have a message before SEND_OK;
    unset: in a failover group the whole sync-state set; elsewhere the master and one slave, or 1 if minInSyncReplicas
    or allAckInSyncStateSet is set"""
    min_in_sync_replicas: PositiveInt | None = _key("minInSyncReplicas", None)
    """with brokerRole=SYNC_MASTER: number of nodes, including the master, that must be in sync for messages to be
    accepted"""
    all_ack_in_sync_state_set: bool = _key("allAckInSyncStateSet", False)
    """with brokerRole=SYNC_MASTER: whether SEND_OK waits for every slave that is in sync"""
    ha_out_of_range: Literal["wait", "resync"] = _key("haOutOfRange", "wait")
    """own; reaction of a slave whose next bytes the master has deleted: wait, or move its log aside and copy the
    master's again (resync)"""
    ha_start_from: Literal["last", "first"] = _key("haStartFrom", "last")
    """own; the master's file at which an empty slave starts: the last one, as in RocketMQ, or the first; members always
    use first"""
    ha_overlap_bytes_max: Annotated[int, Meta(ge=0, le=1 << 24)] = _key("haOverlapMax", 65_536)
    """own; number of bytes at the end of its log that a connecting slave compares with the master's, or more if its
    last record is longer; 0: no comparison, as in RocketMQ"""

    # broker
    auto_create_topic: bool = _key("autoCreateTopicEnable", True)
    """whether a send to a topic that does not exist creates it"""
    auto_create_group: bool = _key("autoCreateSubscriptionGroup", True)
    """whether a heartbeat or pull of a consumer group that does not exist creates it"""
    default_topic_queue_nums: Annotated[int, Meta(ge=1, le=65_535)] = _key("defaultTopicQueueNums", 8)
    """maximum number of queues of a topic that a send creates"""
    topic_count_max: PositiveInt = _key("maxTopics", 16_384)
    """own; maximum number of topics; beyond it, sends and heartbeats create none"""
    group_count_max: PositiveInt = _key("maxSubscriptionGroups", 16_384)
    """own; maximum number of consumer groups; beyond it, none is created"""
    sends_in_flight_max: PositiveInt = _key("maxSendsInFlight", 131_072)
    """own; maximum number of sends that wait for a flush or a slave; further ones are answered SYSTEM_BUSY"""
    store_reply_message: bool = _key("storeReplyMessageEnable", True)
    """whether the replies of request-reply messaging are stored in the log"""
    hold_count_max: PositiveInt = _key("maxHeldPulls", 100_000)
    """own; maximum number of pulls that wait for messages; further ones are answered at once"""
    slave_read_enable: bool | None = _key("slaveReadEnable", None)
    """whether consumers may read from this broker while it is a slave; derived: true for a slave or member, false for a
    master"""
    offset_check_in_slave: bool = _key("offsetCheckInSlave", False)
    """whether a slave tells a consumer whose offset is outside its queue to continue at the nearest valid one; if not,
    the consumer retries at the same offset"""
    long_polling_enable: bool = _key("longPollingEnable", True)
    """whether a pull without messages waits for as long as the client asks; if not, for shortPollingTimeMills"""
    enable_property_filter: bool = _key("enablePropertyFilter", False)
    """whether consumers can filter with SQL92 conditions, which read every message of the queue"""
    short_polling_ms: Milliseconds = _key("shortPollingTimeMills", 1_000)
    """time that a pull without messages waits if longPollingEnable is false, in ms"""
    transfer_hot_bytes_max: PositiveInt = _key("maxTransferBytesOnMessageInMemory", 262_144)
    """maximum bytes of the messages that one pull returns from memory"""
    transfer_hot_count_max: PositiveInt = _key("maxTransferCountOnMessageInMemory", 32)
    """maximum number of messages that one pull returns from memory"""
    transfer_cold_bytes_max: PositiveInt = _key("maxTransferBytesOnMessageInDisk", 65_536)
    """maximum bytes of the messages that one pull returns from disk"""
    transfer_cold_count_max: PositiveInt = _key("maxTransferCountOnMessageInDisk", 8)
    """maximum number of messages that one pull returns from disk"""
    access_message_in_memory_percent: Percent = _key("accessMessageInMemoryMaxRatio", 40)
    """messages that are further from the end of the log than this percentage of the machine's memory count as on
    disk"""
    flush_consumer_offset_interval_ms: Milliseconds = _key("flushConsumerOffsetInterval", 5_000)
    """interval at which consumer offsets are written to their file, in ms"""
    server_side_reset_offset: bool = _key("useServerSideResetOffset", True)
    """whether the broker resets a group's offsets itself, as 5.x does; if not, it asks the group's members to do so, as
    4.9 does"""
    flush_delay_offset_interval_ms: Milliseconds = _key("flushDelayOffsetInterval", 10_000)
    """interval at which the progress of delayed messages is written, in ms; those delivered within this time before a
    crash are delivered again"""
    reject_transactions: bool = _key("rejectTransactionMessage", False)
    """whether half messages of transactions are rejected"""
    transaction_timeout_ms: Milliseconds = _key("transactionTimeOut", 6_000)
    """age of an open half message at which its producer is first asked about it, in ms"""
    transaction_check_max: PositiveInt = _key("transactionCheckMax", 15)
    """number of checks after which a half message moves to TRANS_CHECK_MAX_TIME_TOPIC"""
    transaction_check_interval_ms: Milliseconds = _key("transactionCheckInterval", 30_000)
    """interval between two searches for open half messages, in ms"""

    timer_enable: bool = _key("timerWheelEnable", True)
    """whether messages with a delivery time (TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS) are accepted"""
    timer_delay_s_max: PositiveInt = _key("timerMaxDelaySec", 40 * 86_400)
    """longest delay of a message with a delivery time, in seconds"""
    recall_enable: bool = _key("recallMessageEnable", True)
    """whether a message with a delivery time can be recalled before that time"""

    enable_retry_topic_v2: bool = _key("enableRetryTopicV2", False)
    """whether retries of POP consumers go to %RETRY%group+topic instead of %RETRY%group_topic"""
    pop_in_flight_per_queue_max: PositiveInt = _key("popInflightMessageThreshold", 100_000)
    """maximum number of messages of one queue that a POP consumer group may have in flight; RocketMQ has this limit
    only if enablePopMessageThreshold is set"""
    pop_in_flight_max: PositiveInt = _key("maxPopInFlight", 1_000_000)
    """own; maximum number of messages that all POP consumer groups together may have in flight"""

    @property
    def is_slave(self) -> bool:
        """Whether brokerRole is SLAVE; always false for a member, whose role elections decide."""
        return self.broker_role == "SLAVE"

    @property
    def embeds_name_server(self) -> bool:
        """Whether this node runs its own name server: a master without namesrvAddr."""
        return not self.is_slave and not self.is_member and not self.name_server_addresses

    @property
    def root(self) -> Path:
        """Directory of the store."""
        return Path(self.store_path_root_dir)

    @property
    def name_servers(self) -> list[str]:
        """The addresses in namesrvAddr."""
        return [address for address in self.name_server_addresses.split(";") if address]

    def __post_init__(self) -> None:
        errors = check_bounds(self)
        raise_errors(errors)  # the checks below need valid values
        errors += _check_identity(self)
        self._derive()
        errors += _check_ports(self)
        errors += _check_sizes(self)
        errors += _check_replication(self)
        errors += _check_tls(self)
        errors += check_link(self) + check_access(self)
        errors += check_users(self)
        errors += check_acl(self, has_tls=self.takes_tls, has_users=self.authentication_enabled)
        errors += check_failover(self)
        raise_errors(errors)

    def _derive(self) -> None:
        def put(field: str, value: object) -> None:
            msgspec.structs.force_setattr(self, field, value)

        derive_tls(self)
        derive_link(self)
        derive_broker_tls(self)
        derive_acl(self)
        derive_failover(self)
        slave = self.is_slave
        if self.broker_id == DERIVED:
            put("broker_id", 1 if slave else 0)
        if not self.broker_name:
            put("broker_name", re.sub(r"[\s@#;,]", "-", platform.node()) or "localhost")
        if not self.bind_address:
            outside = any(ip and not is_loopback(ip) for ip in (self.broker_ip1, self.broker_ip2))
            put("bind_address", "0.0.0.0" if outside else LOOPBACK)
        if self.listen_port == DERIVED:
            put("listen_port", 10_921 if slave else 10_911)
        for field, step in (("ha_listen_port", 1), ("admin_listen_port", 2)):
            if getattr(self, field) == DERIVED:
                put(field, self.listen_port + step if self.listen_port else 0)
        if self.grpc_listen_port == DERIVED:
            is_usual = self.listen_port == 10_911 and not slave and not self.is_member
            put("grpc_listen_port", OptionalPort(GRPC_PORT_DEFAULT if is_usual else 0))
        if slave and not self.name_server_addresses:
            put("name_server_addresses", f"{LOOPBACK}:9876")
            if not self.ha_master_address:
                put("ha_master_address", f"{LOOPBACK}:10912")
        if not self.store_path_root_dir:
            member = f"data/member-{self.broker_id}"
            put("store_path_root_dir", member if self.is_member else "data/slave" if slave else "data/master")
        if not self.store_path_commit_log:
            put("store_path_commit_log", str(Path(self.store_path_root_dir) / "commitlog"))
        if self.message_size_max == DERIVED:
            room = self.segment_size - RECORD_OVERHEAD_MAX
            put(
                "message_size_max",
                min(4_194_304, room if room > 0 else self.segment_size // 2),
            )
        if self.slave_read_enable is None:
            put("slave_read_enable", slave or self.is_member)


class NameServerConfig(AclKeys, frozen=True, kw_only=True):
    """The configuration of a name server, which by default listens on loopback port 9876."""

    bind_address: Host = _key("bindAddress", LOOPBACK)
    """address to listen on"""
    listen_port: Port = _key("listenPort", 9876)
    """port for clients and brokers; 0 lets the system choose"""
    idle_timeout_s: PositiveInt = _key("serverChannelMaxIdleTimeSeconds", 120)
    """seconds without a byte in either direction after which a connection is closed"""
    order_message_enable: bool = _key("orderMessageEnable", False)
    """whether routes of ordered topics contain the queues in use (`updateOrderConf`)"""
    shutdown_timeout_ms: Interval = _key("shutdownTimeout", 10_000)
    """own; maximum time from the first signal to the end of the process, in ms"""
    log_format: Literal["text", "json"] = _key("logFormat", "text")
    """own; format of log lines on stderr, also set by `--log-format`"""

    def __post_init__(self) -> None:
        raise_errors(check_bounds(self))
        derive_tls(self)
        derive_acl(self)
        raise_errors(check_tls(self) + check_acl(self, has_tls=self.takes_tls))


class ProxyConfig(LinkKeys, frozen=True, kw_only=True):
    """The configuration of a front for RocketMQ 5's gRPC clients, which by default listens on loopback port 8081."""

    bind_address: Host = _key("bindAddress", LOOPBACK)
    """address to listen on"""
    grpc_listen_port: Port = _key("grpcListenPort", GRPC_PORT_DEFAULT)
    """own; port for gRPC clients; 0 lets the system choose"""
    name_server_addresses: Addresses = _key("namesrvAddr", f"{LOOPBACK}:9876")
    """name servers of the cluster"""
    idle_timeout_s: PositiveInt = _key("serverChannelMaxIdleTimeSeconds", 120)
    """seconds without a call after which a connection is closed"""
    message_size_max: PositiveInt = _key("maxMessageSize", 4_194_304)
    """maximum bytes of a message body; set it no higher than the brokers' maxMessageSize"""
    authentication_enabled: bool = _key("authenticationEnabled", False)
    """whether every call must be signed by a user of the brokers (or by an account of plain_acl.yml); requires the
    brokerAccessKey of a super user; see docs/security.md"""
    authorization_enabled: bool = _key("authorizationEnabled", False)
    """whether the policies of users are checked here, too; requires authenticationEnabled"""
    shutdown_timeout_ms: Interval = _key("shutdownTimeout", 10_000)
    """own; maximum time from the first signal to the end of the process, in ms"""
    log_format: Literal["text", "json"] = _key("logFormat", "text")
    """own; format of log lines on stderr, also set by `--log-format`"""

    @property
    def name_servers(self) -> list[str]:
        """The addresses in namesrvAddr."""
        return [address for address in self.name_server_addresses.split(";") if address]

    def __post_init__(self) -> None:
        raise_errors(check_bounds(self))
        derive_tls(self)
        derive_acl(self)
        derive_link(self)
        has_users = self.authentication_enabled
        errors = check_tls(self) + check_acl(self, has_tls=self.takes_tls, has_users=has_users) + check_link(self)
        errors += check_addresses("namesrvAddr", self.name_server_addresses)
        if self.broker_access_key and not (self.acl_enable or has_users):
            reason = "requires access control: without it, the front does not know whose requests it signs"
            errors.append(
                ConfigError("brokerAccessKey", reason, "no value, aclEnable=true or authenticationEnabled=true")
            )
        if has_users and not self.broker_access_key:
            reason = "is required with authenticationEnabled=true, to read users from brokers"
            errors.append(ConfigError("brokerAccessKey", reason, "a super user of the brokers"))
        if self.authorization_enabled and not has_users:
            reason = "requires authenticationEnabled=true: rights belong to users who have signed"
            errors.append(ConfigError("authorizationEnabled", reason, "false, or authenticationEnabled=true"))
        raise_errors(errors)


def is_loopback(host: str) -> bool:
    """Returns whether `host` is a loopback address or localhost."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _check_identity(config: Config) -> list[ConfigError]:
    if config.is_member:
        return _check_member(config)
    if config.is_slave and config.broker_id == 0:
        return [ConfigError("brokerId", "0 is reserved for the master, and brokerRole is SLAVE", "a number from 1")]
    if not config.is_slave and config.broker_id > 0:
        return [
            ConfigError("brokerId", f"{config.broker_id} is for slaves, and brokerRole is {config.broker_role}", "0")
        ]
    return []


def _check_member(config: Config) -> list[ConfigError]:
    errors = []
    if config.broker_id < 1:
        reason = "a member keeps its own ID; 0 is reserved for the current master"
        errors.append(ConfigError("brokerId", reason, "a number from 1, unique in the group"))
    if config.is_slave:
        reason = "SLAVE is not allowed in a failover group (etcdEndpoints)"
        errors.append(ConfigError("brokerRole", reason, "SYNC_MASTER; ASYNC_MASTER to wait for no slave"))
    if config.ha_master_address:
        errors.append(ConfigError("haMasterAddress", "a member follows the elected master (etcdEndpoints)", "no value"))
    if not config.broker_name:
        errors.append(
            ConfigError("brokerName", "is required as the name of the group (etcdEndpoints)", "the group's name")
        )
    if not config.name_server_addresses:
        reason = "is required: a name server inside one member would fail with it (etcdEndpoints)"
        errors.append(ConfigError("namesrvAddr", reason, "the addresses of name servers"))
    if config.ha_out_of_range == "resync":
        reason = "resync would discard acknowledged messages (etcdEndpoints)"
        errors.append(ConfigError("haOutOfRange", reason, "wait"))
    return errors


def _check_ports(config: Config) -> list[ConfigError]:
    errors = []
    taken: dict[int, str] = {}
    if config.embeds_name_server and config.listen_port:  # with listenPort=0, its port is a free one, too
        taken[9876] = "the embedded name server"
    taken[config.listen_port - 2] = "the fast port, listenPort - 2"
    for key, port in (
        ("listenPort", config.listen_port),
        ("haListenPort", config.ha_listen_port),
        ("adminListenPort", config.admin_listen_port),
        ("grpcListenPort", config.grpc_listen_port),
    ):
        if port > 65_535:
            errors.append(ConfigError(key, f"{port} (from listenPort) is not a port", "a number from 0 to 65535"))
        elif port and port in taken:
            errors.append(ConfigError(key, f"{port} is used by {taken[port]}", "another port, or 0 for a free one"))
        elif port:
            taken[port] = key
    errors += check_addresses("namesrvAddr", config.name_server_addresses)
    errors += check_addresses("haMasterAddress", config.ha_master_address)
    return errors + check_addresses("healFrom", config.heal_from)


def _check_sizes(config: Config) -> list[ConfigError]:
    errors = []
    if config.mapped_file_size_consume_queue_bytes % 20:
        errors.append(
            ConfigError(
                "mappedFileSizeConsumeQueue",
                f"{config.mapped_file_size_consume_queue_bytes} is not a multiple of 20, the size of an entry",
                "a multiple of 20, such as 6000000",
            )
        )
    if config.message_size_max > config.segment_size:
        errors.append(
            ConfigError(
                "maxMessageSize",
                f"{config.message_size_max} is more than mappedFileSizeCommitLog",
                f"a number from 0 to {config.segment_size}",
            )
        )
    if config.disk_space_clean_forcibly_percent > config.disk_space_warning_percent:
        errors.append(
            ConfigError(
                "diskSpaceCleanForciblyRatio",
                "messages would be rejected (diskSpaceWarningLevelRatio) before files are deleted",
                f"a number from 1 to {config.disk_space_warning_percent}",
            )
        )
    if "," in config.store_path_commit_log:
        errors.append(ConfigError("storePathCommitLog", "several directories are not supported", "one directory"))
    return errors


def _check_tls(config: Config) -> list[ConfigError]:
    errors = check_tls(config) + check_broker_tls(config)
    may_follow = config.is_slave or config.is_member
    if may_follow and config.ha_tls == "enforcing" and not config.tls_client_cert_path:
        reason = "is required for a slave with haTls=enforcing"
        errors.append(ConfigError("tls.client.certPath", reason, "a PEM file"))
    return errors


def _check_replication(config: Config) -> list[ConfigError]:
    errors = []
    if config.ha_transfer_batch_size_bytes + 12 > HA_BUFFER_SIZE:
        errors.append(
            ConfigError(
                "haTransferBatchSize",
                f"{config.ha_transfer_batch_size_bytes} and the header of 12 bytes don't fit a slave's buffer of 4 MiB",
                f"a number from 1 to {HA_BUFFER_SIZE - 12}",
            )
        )
    if config.ha_housekeeping_interval_ms <= config.ha_heartbeat_interval_ms:
        errors.append(
            ConfigError(
                "haHousekeepingInterval",
                "idle connections would be closed before their heartbeat is due",
                f"a number above haSendHeartbeatInterval ({config.ha_heartbeat_interval_ms})",
            )
        )
    least, total = config.min_in_sync_replicas or 1, config.total_replicas
    # By default, all members of the sync-state set must acknowledge.
    wanted = config.in_sync_replicas or (least if config.is_member else 1)
    if least > wanted:
        errors.append(
            ConfigError(
                "minInSyncReplicas", f"{least} is more than inSyncReplicas ({wanted})", f"a number from 1 to {wanted}"
            )
        )
    if total is not None and wanted > total:
        errors.append(
            ConfigError(
                "inSyncReplicas", f"{wanted} is more than totalReplicas ({total})", f"a number from 1 to {total}"
            )
        )
    return errors

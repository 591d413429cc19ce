"""The keys: one frozen struct for a broker node, one for a name server.

A field's `name` is the key as RocketMQ spells it (or, marked "own", as halog does); its type and bounds are what is
accepted. Numbers keep RocketMQ's units, which the field's name says. A default of DERIVED, "" or None on a field whose
comment says "derived" stands for a value that depends on the others; `__post_init__` puts it in, so a Config always
shows what is in force. Constructing one checks everything: ConfigError, with further errors in its `others`.
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
from .acl_keys import check_acl, derive_acl
from .check import DERIVED, check_bounds, raise_errors
from .failover_keys import FailoverKeys, check_failover, derive_failover
from .key import INT_MAX, Interval
from .key import key as _key
from .tls_keys import ServerTlsKeys, check_tls, derive_tls

LONG_MAX = 2**63 - 1
RECORD_OVERHEAD_MAX = 34_000
"""Bytes of a record besides its body, at most: fixed fields, topic (255), properties (32767), and the filler behind."""
HA_BUFFER_SIZE = 4 << 20
"""A RocketMQ slave's receive buffer; a whole frame must fit."""

LOOPBACK = "127.0.0.1"

Port = Annotated[int, Meta(ge=0, le=65_535)]
Int = Annotated[int, Meta(ge=0, le=INT_MAX)]
PositiveInt = Annotated[int, Meta(ge=1, le=INT_MAX)]
Milliseconds = Annotated[int, Meta(ge=1, le=INT_MAX)]
Long = Annotated[int, Meta(ge=0, le=LONG_MAX)]
Percent = Annotated[int, Meta(ge=1, le=99)]
DerivedPort = Annotated[int, Meta(ge=DERIVED, le=65_535)]
Name = Annotated[str, Meta(max_length=127, pattern=r"^[^\s@#;,]*$")]
"""What can stand in a file name, a route and a log line."""
Host = Annotated[str, Meta(max_length=253, pattern=r"^[A-Za-z0-9._:-]*$")]
Addresses = Annotated[str, Meta(pattern=r"^$|^[A-Za-z0-9._-]+:\d{1,5}(;[A-Za-z0-9._-]+:\d{1,5})*;?$")]
Address = Annotated[str, Meta(pattern=r"^$|^[A-Za-z0-9._-]+:\d{1,5}$")]
Url = Annotated[str, Meta(pattern=r"^$|^https?://[^\s/]+(/\S*)?$")]
Hours = Annotated[str, Meta(pattern=r"^([01]?\d|2[0-3])(;([01]?\d|2[0-3]))*;?$")]
DelayLevels = Annotated[str, Meta(pattern=r"^[1-9]\d{0,8}[smhd]( +[1-9]\d{0,8}[smhd])*$")]

BrokerRoleName = Literal["ASYNC_MASTER", "SYNC_MASTER", "SLAVE"]


class Config(FailoverKeys, frozen=True, kw_only=True):
    """A broker node: master, slave, or member of a failover group.

    Without arguments: an ASYNC_MASTER with its own name server, on loopback.
    """

    # who it is
    cluster_name: Name = _key("brokerClusterName", "DefaultCluster")
    broker_name: Name = _key("brokerName", "")
    """derived: the host's name, as RocketMQ; equal for a master and its slaves"""
    broker_id: Annotated[int, Meta(ge=DERIVED, le=LONG_MAX)] = _key("brokerId", DERIVED)
    """derived: 0 for a master (and nothing else is accepted), 1 for a slave; a member must say its own, from 1 on"""
    broker_role: BrokerRoleName = _key("brokerRole", "ASYNC_MASTER")
    """the command sets it: `ha.slave` SLAVE, `ha.master` ASYNC_MASTER unless the file says SYNC_MASTER, `ha.member`
    SYNC_MASTER: of a member it says what sends wait for while it is master"""
    broker_permission: Literal[2, 4, 6] = _key("brokerPermission", 6)
    """4 read + 2 write, of every topic"""
    region_id: Name = _key("regionId", "DefaultRegion")
    """property MSG_REGION of messages"""
    trace_on: bool = _key("traceOn", True)
    """property TRACE_ON of messages"""

    # where it is
    bind_address: Host = _key("bindAddress", "")
    """derived: 127.0.0.1, but 0.0.0.0 if brokerIP1 or brokerIP2 is set to an address that others can reach"""
    listen_port: DerivedPort = _key("listenPort", DERIVED)
    """derived: 10911, a slave's 10921; 0 lets the system choose; RocketMQ's fast port, listenPort - 2, is opened too"""
    ha_listen_port: DerivedPort = _key("haListenPort", DERIVED)
    """derived: listenPort + 1, as RocketMQ"""
    admin_listen_port: DerivedPort = _key("adminListenPort", DERIVED)
    """own; derived: listenPort + 2"""
    admin_bind_address: Host = _key("adminBindAddress", LOOPBACK)
    """own"""
    broker_ip1: Host = _key("brokerIP1", "")
    """what clients are told; derived: bindAddress, or this machine's address if that is a wildcard"""
    broker_ip2: Host = _key("brokerIP2", "")
    """what slaves are told; derived: brokerIP1"""
    name_server_addresses: Addresses = _key("namesrvAddr", "")
    """unset: a master embeds a name server on 9876 (any free port if listenPort is 0), a slave uses 127.0.0.1:9876"""
    ha_master_address: Address = _key("haMasterAddress", "")
    """slave; derived: 127.0.0.1:10912 while namesrvAddr is unset too; else the master is learnt from the name server"""
    register_name_server_period_ms: Annotated[int, Meta(ge=10_000, le=60_000)] = _key(
        "registerNameServerPeriod", 30_000
    )
    """ms"""
    register_broker_timeout_ms: Milliseconds = _key("registerBrokerTimeoutMills", 24_000)
    """ms"""
    channel_idle_timeout_s: PositiveInt = _key("serverChannelMaxIdleTimeSeconds", 120)
    """s"""
    channel_expired_timeout_ms: Milliseconds = _key("channelExpiredTimeout", 120_000)
    """ms; a client that is silent for so long is forgotten"""
    shutdown_timeout_ms: Interval = _key("shutdownTimeout", 10_000)
    """own; ms from the first signal to the end of the process"""
    log_format: Literal["text", "json"] = _key("logFormat", "text")
    """own; how lines of the log are written to stderr; also `--log-format`"""
    otel_endpoint: Url = _key("otelEndpoint", "")
    """own; an OpenTelemetry collector to send metrics and traces to (OTLP over HTTP; halog[otel]), such as
    http://127.0.0.1:4318; the environment's OTEL_EXPORTER_OTLP_ENDPOINT unless set"""
    otel_interval_ms: Interval = _key("otelInterval", 15_000)
    """own; ms from one time that they are sent to the next"""
    otel_trace_every: PositiveInt = _key("otelTraceEvery", 100)
    """own; of one in so many groups of sends that are answered together a span is made"""

    # store
    store_path_root_dir: str = _key("storePathRootDir", "")
    """derived: data/master, data/slave, or data/member- and brokerId"""
    store_path_commit_log: str = _key("storePathCommitLog", "")
    """derived: commitlog below storePathRootDir"""
    mapped_file_size_commit_log_bytes: Annotated[int, Meta(ge=4096, le=INT_MAX)] = _key(
        "mappedFileSizeCommitLog", 1_073_741_824
    )
    """bytes; the same on a master and its slaves"""
    mapped_file_size_consume_queue_bytes: Annotated[int, Meta(ge=20, le=INT_MAX)] = _key(
        "mappedFileSizeConsumeQueue", 6_000_000
    )
    """bytes; a multiple of 20"""
    message_index_enable: bool = _key("messageIndexEnable", True)
    max_hash_slot_num: PositiveInt = _key("maxHashSlotNum", 5_000_000)
    max_index_num: Annotated[int, Meta(ge=2, le=INT_MAX)] = _key("maxIndexNum", 20_000_000)
    index_tags: bool = _key("indexTags", True)
    """own: put the tag of each message into the key index, as 5.4 and later do; false: as 4.9 and 5.3"""
    max_message_size_bytes: Annotated[int, Meta(ge=DERIVED, le=INT_MAX)] = _key("maxMessageSize", DERIVED)
    """bytes of a body; derived: 4194304, less if mappedFileSizeCommitLog does not have room for it"""
    message_delay_level: DelayLevels = _key(
        "messageDelayLevel", "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    )
    append_property_crc: bool = _key("enabledAppendPropCRC", False)
    flush_disk_type: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = _key("flushDiskType", "ASYNC_FLUSH")
    flush_interval_commit_log_ms: Milliseconds = _key("flushIntervalCommitLog", 500)
    """ms"""
    flush_commit_log_least_pages: Int = _key("flushCommitLogLeastPages", 4)
    """pages of 4 KiB"""
    flush_commit_log_thorough_interval_ms: Milliseconds = _key("flushCommitLogThoroughInterval", 10_000)
    """ms"""
    sync_flush_timeout_ms: Milliseconds = _key("syncFlushTimeout", 5_000)
    """ms"""
    scrub_bytes_per_s: Int = _key("scrubBytesPerSecond", 5 << 20)
    """own; bytes: how fast all of the store is read again and checked, round after round; 0: not at all"""
    scrub_pause_s: Annotated[int, Meta(ge=1, le=INT_MAX)] = _key("scrubPauseSeconds", 3_600)
    """own; s between two rounds"""
    heal_from: Addresses = _key("healFrom", "")
    """own; HA ports to fetch damaged bytes from, besides those of the master and the slaves that name servers tell"""
    clean_resource_interval_ms: Milliseconds = _key("cleanResourceInterval", 10_000)
    """ms"""
    delete_when_hours: Hours = _key("deleteWhen", "04")
    """local hours at which expired files are deleted"""
    file_reserved_time_h: PositiveInt = _key("fileReservedTime", 72)
    """hours"""
    disk_max_used_space_percent: Annotated[int, Meta(ge=10, le=95)] = _key("diskMaxUsedSpaceRatio", 75)
    """percent; above it expired files are deleted at any hour"""
    disk_space_clean_forcibly_percent: Percent = _key("diskSpaceCleanForciblyRatio", 85)
    """percent; above it files are deleted before they expire"""
    disk_space_warning_percent: Percent = _key("diskSpaceWarningLevelRatio", 90)
    """percent; above it nothing is stored"""
    clean_file_forcibly_enable: bool = _key("cleanFileForciblyEnable", True)
    delete_file_batch_max: PositiveInt = _key("deleteFileBatchMax", 10)
    """files deleted in one round"""
    ha_retain_max_bytes: Long = _key("haRetainMaxBytes", 8 << 30)
    """own; bytes: at most so much past its time is kept for a connected slave that still needs it; RocketMQ: nothing"""

    # replication
    ha_send_heartbeat_interval_ms: Milliseconds = _key("haSendHeartbeatInterval", 5_000)
    """ms"""
    ha_housekeeping_interval_ms: Milliseconds = _key("haHousekeepingInterval", 20_000)
    """ms; above haSendHeartbeatInterval"""
    ha_transfer_batch_size_bytes: PositiveInt = _key("haTransferBatchSize", 1 << 20)
    """bytes; RocketMQ's default is 32768; with 12 more it must fit a slave's buffer of 4 MiB"""
    ha_max_gap_not_in_sync_bytes: PositiveInt = _key("haMaxGapNotInSync", 268_435_456)
    """bytes; a slave further behind is not in sync; 4.9 calls it haSlaveFallbehindMax, both names are accepted"""
    ha_flow_control_enable: bool = _key("haFlowControlEnable", False)
    max_ha_transfer_bytes_per_s: Annotated[int, Meta(ge=1024, le=LONG_MAX)] = _key(
        "maxHaTransferByteInSecond", 104_857_600
    )
    """bytes a second for each slave, if haFlowControlEnable"""
    slave_timeout_ms: Milliseconds = _key("slaveTimeout", 3_000)
    """ms; how long a put waits for slaves"""
    total_replicas: PositiveInt | None = _key("totalReplicas", None)
    """with inSyncReplicas and minInSyncReplicas: the rule of 5.x, and only if one of these two is set"""
    in_sync_replicas: PositiveInt | None = _key("inSyncReplicas", None)
    """nodes, the master included, that must have a message before it is SEND_OK; unset, with the next two: one slave"""
    min_in_sync_replicas: PositiveInt | None = _key("minInSyncReplicas", None)
    """nodes that must be in sync before anything is stored"""
    all_ack_in_sync_state_set: bool = _key("allAckInSyncStateSet", False)
    """wait for every slave that is in sync"""
    ha_out_of_range: Literal["wait", "resync"] = _key("haOutOfRange", "wait")
    """own: what a slave does whose position the master no longer has"""
    ha_start_from: Literal["last", "first"] = _key("haStartFrom", "last")
    """own: where an empty slave starts: at the master's last file, as RocketMQ, or at its first byte, as members do"""
    ha_overlap_max_bytes: Annotated[int, Meta(ge=0, le=1 << 24)] = _key("haOverlapMax", 65_536)
    """bytes, own: so much of its log's end a slave compares with the master's when it connects; 0: as RocketMQ"""

    # front
    auto_create_topic_enable: bool = _key("autoCreateTopicEnable", True)
    auto_create_subscription_group: bool = _key("autoCreateSubscriptionGroup", True)
    default_topic_queue_nums: Annotated[int, Meta(ge=1, le=65_535)] = _key("defaultTopicQueueNums", 8)
    topic_count_max: PositiveInt = _key("maxTopics", 16_384)
    """own; no further ones are created by sends or heartbeats"""
    group_count_max: PositiveInt = _key("maxSubscriptionGroups", 16_384)
    """own; the same of consumer groups"""
    sends_in_flight_max: PositiveInt = _key("maxSendsInFlight", 131_072)
    """own; sends that wait for a flush or a slave; further ones are answered SYSTEM_BUSY"""
    store_reply_message_enable: bool = _key("storeReplyMessageEnable", True)
    """replies to who waits for them (request-reply) are kept, too"""
    hold_count_max: PositiveInt = _key("maxHeldPulls", 100_000)
    """own; pulls that wait for messages; further ones are answered at once"""
    slave_read_enable: bool | None = _key("slaveReadEnable", None)
    """derived: true for a slave and a member, false for a master (RocketMQ: false)"""
    offset_check_in_slave: bool = _key("offsetCheckInSlave", False)
    long_polling_enable: bool = _key("longPollingEnable", True)
    enable_property_filter: bool = _key("enablePropertyFilter", False)
    """SQL92 conditions of consumers; each message of the queue is then read for them"""
    short_polling_time_ms: Milliseconds = _key("shortPollingTimeMills", 1_000)
    """ms"""
    transfer_hot_bytes_max: PositiveInt = _key("maxTransferBytesOnMessageInMemory", 262_144)
    """bytes; one pull"""
    transfer_hot_count_max: PositiveInt = _key("maxTransferCountOnMessageInMemory", 32)
    """one pull"""
    transfer_cold_bytes_max: PositiveInt = _key("maxTransferBytesOnMessageInDisk", 65_536)
    """bytes; one pull of old messages"""
    transfer_cold_count_max: PositiveInt = _key("maxTransferCountOnMessageInDisk", 8)
    """one pull of old messages"""
    access_message_in_memory_percent: Percent = _key("accessMessageInMemoryMaxRatio", 40)
    """percent of memory; older messages count as on disk"""
    flush_consumer_offset_interval_ms: Milliseconds = _key("flushConsumerOffsetInterval", 5_000)
    """ms"""
    use_server_side_reset_offset: bool = _key("useServerSideResetOffset", True)
    """the broker itself sends a group elsewhere, as 5.x; false: it tells the group's members to go there, as 4.9"""
    flush_delay_offset_interval_ms: Milliseconds = _key("flushDelayOffsetInterval", 10_000)
    """ms; so much of what delayed messages were delivered is delivered again after a crash"""
    reject_transaction_message: bool = _key("rejectTransactionMessage", False)
    transaction_time_out_ms: Milliseconds = _key("transactionTimeOut", 6_000)
    """ms; so old an open half message is before a producer is asked about it"""
    transaction_check_max: PositiveInt = _key("transactionCheckMax", 15)
    """times that a producer is asked about a half message; then it goes to TRANS_CHECK_MAX_TIME_TOPIC"""
    transaction_check_interval_ms: Milliseconds = _key("transactionCheckInterval", 30_000)
    """ms between the times at which open half messages are looked at"""

    @property
    def is_slave(self) -> bool:
        """Whether brokerRole is SLAVE; of a member elections decide, and this is false."""
        return self.broker_role == "SLAVE"

    @property
    def embeds_name_server(self) -> bool:
        """Whether this node runs a name server of its own: a master whose namesrvAddr is unset."""
        return not self.is_slave and not self.is_member and not self.name_server_addresses

    @property
    def root(self) -> Path:
        """The store's directory."""
        return Path(self.store_path_root_dir)

    @property
    def name_servers(self) -> list[str]:
        """The addresses in namesrvAddr."""
        return [address for address in self.name_server_addresses.split(";") if address]

    def __post_init__(self) -> None:
        errors = check_bounds(self)
        raise_errors(errors)  # what follows computes with the values
        errors += _check_identity(self)
        self._derive()
        errors += _check_ports(self)
        errors += _check_sizes(self)
        errors += _check_replication(self)
        errors += _check_tls(self)
        errors += check_access(self)
        errors += check_acl(self, has_tls=self.takes_tls)
        errors += check_failover(self)
        raise_errors(errors)

    def _derive(self) -> None:
        def put(field: str, value: object) -> None:
            msgspec.structs.force_setattr(self, field, value)

        derive_tls(self)
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
        if slave and not self.name_server_addresses:
            put("name_server_addresses", f"{LOOPBACK}:9876")
            if not self.ha_master_address:
                put("ha_master_address", f"{LOOPBACK}:10912")
        if not self.store_path_root_dir:
            member = f"data/member-{self.broker_id}"
            put("store_path_root_dir", member if self.is_member else "data/slave" if slave else "data/master")
        if not self.store_path_commit_log:
            put("store_path_commit_log", str(Path(self.store_path_root_dir) / "commitlog"))
        if self.max_message_size_bytes == DERIVED:
            room = self.mapped_file_size_commit_log_bytes - RECORD_OVERHEAD_MAX
            put(
                "max_message_size_bytes",
                min(4_194_304, room if room > 0 else self.mapped_file_size_commit_log_bytes // 2),
            )
        if self.slave_read_enable is None:
            put("slave_read_enable", slave or self.is_member)


class NameServerConfig(ServerTlsKeys, frozen=True, kw_only=True):
    """A name server: port 9876, on loopback unless told otherwise."""

    bind_address: Host = _key("bindAddress", LOOPBACK)
    listen_port: Port = _key("listenPort", 9876)
    channel_idle_timeout_s: PositiveInt = _key("serverChannelMaxIdleTimeSeconds", 120)
    order_message_enable: bool = _key("orderMessageEnable", False)
    """tell clients with the route of an ordered topic which of its queues are in use (`updateOrderConf`)"""
    shutdown_timeout_ms: Interval = _key("shutdownTimeout", 10_000)
    log_format: Literal["text", "json"] = _key("logFormat", "text")

    def __post_init__(self) -> None:
        raise_errors(check_bounds(self))
        derive_tls(self)
        derive_acl(self)
        raise_errors(check_tls(self) + check_acl(self, has_tls=self.takes_tls))


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine to itself only."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _check_identity(config: Config) -> list[ConfigError]:
    if config.is_member:
        return _check_member(config)
    if config.is_slave and config.broker_id == 0:
        return [ConfigError("brokerId", "0 belongs to the master, and brokerRole is SLAVE", "a number from 1 on")]
    if not config.is_slave and config.broker_id > 0:
        return [
            ConfigError(
                "brokerId", f"{config.broker_id} belongs to a slave, and brokerRole is {config.broker_role}", "0"
            )
        ]
    return []


def _check_member(config: Config) -> list[ConfigError]:
    errors = []
    if config.broker_id < 1:
        reason = "a member has an id of its own for good; whoever is master is known as 0 for that time"
        errors.append(ConfigError("brokerId", reason, "a number from 1 on, another for each member of the group"))
    if config.is_slave:
        reason = "SLAVE is nothing that a member stays: elections decide (etcdEndpoints)"
        errors.append(ConfigError("brokerRole", reason, "SYNC_MASTER; ASYNC_MASTER to wait for no slave"))
    if config.ha_master_address:
        errors.append(ConfigError("haMasterAddress", "a member follows whoever is elected (etcdEndpoints)", "nothing"))
    if not config.broker_name:
        errors.append(ConfigError("brokerName", "is unset, and names the group (etcdEndpoints)", "the group's name"))
    if not config.name_server_addresses:
        reason = "is unset, and a name server inside one member would go with it (etcdEndpoints)"
        errors.append(ConfigError("namesrvAddr", reason, "the addresses of name servers"))
    if config.ha_out_of_range == "resync":
        reason = "resync would throw away what was acknowledged (etcdEndpoints)"
        errors.append(ConfigError("haOutOfRange", reason, "wait"))
    return errors


def _check_ports(config: Config) -> list[ConfigError]:
    errors = []
    taken: dict[int, str] = {9876: "the embedded name server"} if config.embeds_name_server else {}
    taken[config.listen_port - 2] = "RocketMQ's fast port, listenPort - 2"
    for key, port in (
        ("listenPort", config.listen_port),
        ("haListenPort", config.ha_listen_port),
        ("adminListenPort", config.admin_listen_port),
    ):
        if port > 65_535:
            errors.append(ConfigError(key, f"{port} (from listenPort) is no port", "a number from 0 to 65535"))
        elif port and port in taken:
            errors.append(
                ConfigError(key, f"{port} is taken by {taken[port]}", "another port, or 0 for any that is free")
            )
        elif port:
            taken[port] = key
    for address in (*config.name_servers, *filter(None, [config.ha_master_address])):
        if not 1 <= int(address.rpartition(":")[2]) <= 65_535:
            key = "haMasterAddress" if address == config.ha_master_address else "namesrvAddr"
            errors.append(ConfigError(key, f"{address} has no port", "host:port with a port from 1 to 65535"))
    return errors


def _check_sizes(config: Config) -> list[ConfigError]:
    errors = []
    if config.mapped_file_size_consume_queue_bytes % 20:
        errors.append(
            ConfigError(
                "mappedFileSizeConsumeQueue",
                f"{config.mapped_file_size_consume_queue_bytes} is no multiple of 20, the size of an entry",
                "a multiple of 20, such as 6000000",
            )
        )
    if config.max_message_size_bytes > config.mapped_file_size_commit_log_bytes:
        errors.append(
            ConfigError(
                "maxMessageSize",
                f"{config.max_message_size_bytes} does not fit into a file of mappedFileSizeCommitLog",
                f"a number from 0 to {config.mapped_file_size_commit_log_bytes}",
            )
        )
    if config.disk_space_clean_forcibly_percent > config.disk_space_warning_percent:
        errors.append(
            ConfigError(
                "diskSpaceCleanForciblyRatio",
                "writes would be refused (diskSpaceWarningLevelRatio) before files are deleted",
                f"a number from 1 to {config.disk_space_warning_percent}",
            )
        )
    if "," in config.store_path_commit_log:
        errors.append(ConfigError("storePathCommitLog", "several directories are not supported", "one directory"))
    return errors


def _check_tls(config: Config) -> list[ConfigError]:
    errors = check_tls(config)
    may_follow = config.is_slave or config.is_member
    if may_follow and config.ha_tls == "enforcing" and not config.tls_client_cert_path:
        reason = "is unset, and a slave with haTls=enforcing must show its master a certificate"
        errors.append(ConfigError("tls.client.certPath", reason, "a PEM file"))
    return errors


def _check_replication(config: Config) -> list[ConfigError]:
    errors = []
    if config.ha_transfer_batch_size_bytes + 12 > HA_BUFFER_SIZE:
        errors.append(
            ConfigError(
                "haTransferBatchSize",
                f"{config.ha_transfer_batch_size_bytes} and 12 bytes of header don't fit a slave's buffer of 4 MiB",
                f"a number from 1 to {HA_BUFFER_SIZE - 12}",
            )
        )
    if config.ha_housekeeping_interval_ms <= config.ha_send_heartbeat_interval_ms:
        errors.append(
            ConfigError(
                "haHousekeepingInterval",
                "an idle connection would be closed before its heartbeat is due",
                f"a number above haSendHeartbeatInterval ({config.ha_send_heartbeat_interval_ms})",
            )
        )
    least, total = config.min_in_sync_replicas or 1, config.total_replicas
    # Of a member all of the sync-state set acknowledge unless it says how many.
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

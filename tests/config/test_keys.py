"""Every key: what it is called, what it takes, what stands in for it, what contradicts it."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect

from ha.config import REFUSED_IF_TRUE, Config, NameServerConfig, fields, load_config, rocketmq_keys
from ha.config.loading import REMOVED
from ha.config.secret import SecretStr
from ha.errors import ConfigError

OWN = {
    "logFormat",
    "otelEndpoint",
    "otelInterval",
    "otelTraceEvery",
    "healFrom",
    "preallocateCommitLog",
    "scrubBytesPerSecond",
    "scrubPauseSeconds",
    "adminListenPort",
    "grpcListenPort",
    "adminBindAddress",
    "shutdownTimeout",
    "indexTags",
    "maxConnections",
    "maxConnectionsPerHost",
    "maxFrameSize",
    "maxPartialBytes",
    "maxHandledBytes",
    "maxOutboxBytes",
    "maxTopics",
    "maxSubscriptionGroups",
    "maxSendsInFlight",
    "maxHeldPulls",
    "maxPopInFlight",
    "haRetainMaxBytes",
    "haOutOfRange",
    "haStartFrom",
    "haOverlapMax",
    "tls.client.checkHost",
    "haTls",
    "haTlsTrustCertPath",
    "haTlsSubjects",
    "adminTls",
    "aclFile",
    "aclAdminFrom",
    "aclDirectory",
    "aclRequireTls",
    "brokerAccessKey",
    "brokerSecretKey",
    "brokerSecretKeyFile",
    "haSharedSecret",
    "haSharedSecretFile",
    "adminToken",
    "adminTokenFile",
    "etcdEndpoints",
    "etcdUser",
    "etcdPassword",
    "etcdPasswordFile",
    "etcdTrustCertPath",
    "etcdCertPath",
    "etcdKeyPath",
    "leaseTtl",
    "switchTimeout",
}

BENCH_MASTER = """
brokerClusterName=PeerCluster
brokerName=broker-a
brokerId=0
brokerRole=SYNC_MASTER
brokerIP1=127.0.0.1
brokerIP2=127.0.0.1
namesrvAddr=127.0.0.1:19876
listenPort=20911
haListenPort=20912
flushDiskType=ASYNC_FLUSH
mappedFileSizeCommitLog=67108864
mappedFileSizeConsumeQueue=600000
maxIndexNum=500000
maxHashSlotNum=100000
storePathRootDir=/tmp/run/store-master
storePathCommitLog=/tmp/run/store-master/commitlog
deleteWhen=04
fileReservedTime=72
diskMaxUsedSpaceRatio=95
autoCreateTopicEnable=true
autoCreateSubscriptionGroup=true
slaveReadEnable=true
inSyncReplicas=2
"""

SHIPPED = """
# what RocketMQ ships as conf/2m-2s-sync/broker-a-s.properties and conf/broker.conf, together
brokerClusterName=DefaultCluster
brokerName=broker-a
brokerId=1
deleteWhen=04
fileReservedTime=48
brokerRole=SLAVE
flushDiskType=ASYNC_FLUSH
"""


def load(*settings: str) -> Config:
    return load_config(Config, settings=settings).config


def mistakes(*settings: str) -> list[ConfigError]:
    with pytest.raises(ConfigError) as caught:
        load(*settings)
    return [caught.value, *caught.value.others]


def test_every_key_is_rocketmqs_or_one_of_ours() -> None:
    assert set(fields(Config)) - set(rocketmq_keys()) == OWN


def test_types_are_those_of_the_java_setters() -> None:
    java = {"bool": "boolean", "int": ("int", "long"), "str": "String"}
    for key, field in fields(Config).items():
        if key in OWN or key == "haMaxGapNotInSync":
            continue
        kind = re.sub(r"Type$", "", type(field.type).__name__).lower()
        if kind == "union":
            (inner,) = (each for each in field.type.types if not isinstance(each, inspect.NoneType))  # type: ignore[attr-defined]
            kind = {"Bool": "bool", "Int": "int", "Custom": "str"}[type(inner).__name__.removesuffix("Type")]
        if kind == "literal":
            assert rocketmq_keys()[key] in ("String", "int")
        else:
            assert rocketmq_keys()[key] in java[kind], key


def test_defaults_of_a_master() -> None:
    config = Config()
    assert config == load()
    assert (config.broker_role, config.broker_id) == ("ASYNC_MASTER", 0)
    assert (config.listen_port, config.ha_listen_port, config.admin_listen_port) == (10911, 10912, 10913)
    assert (config.bind_address, config.admin_bind_address) == ("127.0.0.1", "127.0.0.1")
    assert (config.store_path_root_dir, config.store_path_commit_log) == ("data/master", "data/master/commitlog")
    assert config.embeds_name_server
    assert config.slave_read_enable is False
    assert (config.in_sync_replicas, config.min_in_sync_replicas) == (None, None)


def test_defaults_of_a_slave() -> None:
    config = load("brokerRole=SLAVE")
    assert config.broker_id == 1
    assert (config.listen_port, config.ha_listen_port, config.admin_listen_port) == (10921, 10922, 10923)
    assert config.store_path_root_dir == "data/slave"
    assert config.name_servers == ["127.0.0.1:9876"]
    assert config.ha_master_address == "127.0.0.1:10912"
    assert not config.embeds_name_server
    assert config.slave_read_enable is True


def test_a_slave_with_a_name_server_learns_its_master_there() -> None:
    assert load("brokerRole=SLAVE", "namesrvAddr=10.0.0.1:9876;10.0.0.2:9876").ha_master_address == ""


def test_the_other_ports_follow_listen_port() -> None:
    assert load("listenPort=20911").ha_listen_port == 20912
    assert load("listenPort=0").ha_listen_port == 0
    assert load("listenPort=0").admin_listen_port == 0
    assert load("listenPort=20911", "haListenPort=0").ha_listen_port == 0
    assert load("listenPort=0", "adminListenPort=9876").admin_listen_port == 9876  # the name server's is free, too


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ((), "127.0.0.1"),
        (("brokerIP1=127.0.0.1", "brokerIP2=localhost"), "127.0.0.1"),
        (("brokerIP1=10.1.2.3",), "0.0.0.0"),
        (("brokerIP1=127.0.0.1", "brokerIP2=10.1.2.3"), "0.0.0.0"),
        (("brokerIP1=10.1.2.3", "bindAddress=127.0.0.1"), "127.0.0.1"),
    ],
)
def test_listens_where_it_says_that_it_can_be_reached(settings: tuple[str, ...], address: str) -> None:
    assert load(*settings).bind_address == address


def test_small_commitlog_files_make_smaller_messages() -> None:
    assert load("mappedFileSizeCommitLog=1048576").message_size_max == 1_048_576 - 34_000
    assert load("mappedFileSizeCommitLog=8192").message_size_max == 4096
    assert [error.key for error in mistakes("mappedFileSizeCommitLog=8192", "maxMessageSize=8193")] == [
        "maxMessageSize"
    ]


@pytest.mark.parametrize("text", [BENCH_MASTER, SHIPPED])
def test_rocketmqs_own_files_load_without_a_warning(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broker.conf"
    file.write_text(text)
    assert load_config(Config, file=file).ignored == ()


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("listenPort", "65536", "65536 is too large"),
        ("listenPort", "-1", "-1 is too small"),
        ("haListenPort", "-1", "-1 is too small"),
        ("brokerId", "-1", "-1 is too small"),
        ("listenPort", "10911x", "'10911x' is not an integer"),
        ("listenPort", "", "'' is not an integer"),
        ("fileReservedTime", "2147483648", "2147483648 overflows a Java int"),
        ("fileReservedTime", "0", "0 is too small"),
        ("brokerId", "9223372036854775808", "9223372036854775808 overflows a Java long"),
        ("haMaxGapNotInSync", "2147483648", "2147483648 overflows a Java int"),
        ("mappedFileSizeCommitLog", "4294967296", "4294967296 overflows a Java int"),
        ("slaveReadEnable", "yes", "'yes' is not a boolean"),
        ("brokerRole", "sync_master", "'sync_master' is not one of them"),
        ("flushDiskType", "SYNC", "'SYNC' is not one of them"),
        ("haOutOfRange", "restart", "'restart' is not one of them"),
        ("brokerPermission", "7", "'7' is not one of them"),
        ("namesrvAddr", "localhost", "'localhost' has the wrong format"),
        ("namesrvAddr", "localhost:0", "localhost:0 has an invalid port"),
        ("namesrvAddr", "h:9876;h:65536", "h:65536 has an invalid port"),
        ("haMasterAddress", "h:99999", "h:99999 has an invalid port"),
        ("healFrom", "h:1;h:99999;", "h:99999 has an invalid port"),
        ("haMasterAddress", "10.0.0.1:10912;10.0.0.2:10912", "'10.0.0.1:10912;10.0.0.2:10912' has the wrong format"),
        ("deleteWhen", "24", "'24' has the wrong format"),
        ("messageDelayLevel", "1s 5x", "'1s 5x' has the wrong format"),
        ("diskMaxUsedSpaceRatio", "96", "96 is too large"),
        ("registerNameServerPeriod", "5000", "5000 is too small"),
        ("brokerName", "broker a", "'broker a' has the wrong format"),
        ("storePathCommitLog", "/a,/b", "several directories are not supported"),
    ],
)
def test_what_a_key_does_not_take(key: str, text: str, reason: str) -> None:
    (error,) = mistakes(f"{key}={text}")
    assert (error.key, error.reason) == (key, reason)
    assert error.accepted
    assert str(error) == f"{key}: {reason}; accepted: {error.accepted}"


@pytest.mark.parametrize(
    ("key", "accepted"),
    [
        ("listenPort", "an integer from 0 to 65535"),
        ("fileReservedTime", "an integer from 1 to 2147483647"),
        ("brokerRole", "ASYNC_MASTER, SLAVE, SYNC_MASTER"),
        ("traceOn", "true or false"),
        ("namesrvAddr", "host:port, several separated by ;"),
    ],
)
def test_says_what_a_key_takes(key: str, accepted: str) -> None:
    assert mistakes(f"{key}=?")[0].accepted == accepted


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("brokerId", ("brokerRole=SLAVE", "brokerId=0")),
        ("brokerId", ("brokerRole=SYNC_MASTER", "brokerId=1")),
        ("minInSyncReplicas", ("minInSyncReplicas=2",)),
        ("minInSyncReplicas", ("inSyncReplicas=2", "minInSyncReplicas=3")),
        ("inSyncReplicas", ("inSyncReplicas=3", "totalReplicas=2")),
        ("haTransferBatchSize", ("haTransferBatchSize=4194293",)),
        ("mappedFileSizeConsumeQueue", ("mappedFileSizeConsumeQueue=6000001",)),
        ("haHousekeepingInterval", ("haHousekeepingInterval=5000",)),
        ("diskSpaceCleanForciblyRatio", ("diskSpaceCleanForciblyRatio=91",)),
        ("haListenPort", ("listenPort=10911", "haListenPort=10911")),
        ("adminListenPort", ("adminListenPort=10912",)),
        ("listenPort", ("listenPort=9876",)),
        ("adminListenPort", ("listenPort=65534",)),
    ],
)
def test_contradictions(key: str, settings: tuple[str, ...]) -> None:
    (error,) = mistakes(*settings)
    assert error.key == key


def test_the_largest_transfer_batch_fits_a_rocketmq_slave() -> None:
    assert load("haTransferBatchSize=4194292").ha_transfer_batch_size_bytes + 12 == 4 << 20


def test_a_port_may_be_the_name_servers_if_that_runs_elsewhere() -> None:
    assert load("listenPort=9876", "namesrvAddr=10.0.0.1:9876").listen_port == 9876


def test_everything_wrong_is_said_at_once() -> None:
    errors = mistakes("brokerRol=SLAVE", "listenPort=x", "fileReservedTime=0", "popCkMaxBufferSize=2147483648")
    assert [error.key for error in errors] == ["brokerRol", "listenPort", "fileReservedTime", "popCkMaxBufferSize"]
    with pytest.raises(ConfigError) as caught:
        load("brokerRol=SLAVE", "listenPort=x")
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("brokerRol", "brokerRole"),
        ("listenport", "listenPort"),
        ("flushDiskTyp", "flushDiskType"),
        ("haOutOfRage", "haOutOfRange"),
        ("waitTimeMillsInSendQueu", "waitTimeMillsInSendQueue"),
        ("namesrvAdress", "namesrvAddr"),
    ],
)
def test_an_unknown_key_is_told_its_nearest(key: str, nearest: str) -> None:
    (error,) = mistakes(f"{key}=1")
    assert (error.key, error.reason) == (key, "is unknown")
    assert error.accepted.startswith(f"{nearest}, which is the nearest known key")


@pytest.mark.parametrize("key", ["nosuchKey", "x", "retentionDays"])
def test_unknown_key_that_resembles_none_gets_no_proposal(key: str) -> None:
    (error,) = mistakes(f"{key}=1")
    assert error.accepted == "the keys that --print-config and docs/configuration.md list"


def test_keys_of_both_rocketmq_lines_are_known() -> None:
    keys = rocketmq_keys()
    assert len(keys) == 597 + 15  # and TlsSystemConfig
    assert keys["filterServerNums"] == "int"  # 4.9.7 only
    assert keys["popCkMaxBufferSize"] == "int"  # 5.5.0 only
    assert keys["haMaxTimeSlaveNotCatchup"] == "long"
    assert keys["readAheadCacheSizeThresholdRate"] == "double"
    assert keys["scanNotActiveBrokerInterval"] == "long"  # NamesrvConfig
    assert keys["useTLS"] == "boolean"  # NettyClientConfig


def test_every_rocketmq_key_is_accepted() -> None:
    """With a value of its Java type; what nothing reads is reported."""
    samples = {"int": "1", "long": "1", "double": "0.5", "boolean": "false", "String": "x"}
    unread = {key: java_type for key, java_type in rocketmq_keys().items() if key not in fields(Config)}
    loaded = load_config(Config, settings=[f"{key}={samples[java_type]}" for key, java_type in unread.items()])
    assert set(loaded.ignored) == set(unread) - {"haSlaveFallbehindMax", "useTLS"}


def test_removed_keys_are_ignored() -> None:
    assert load_config(Config, settings=[f"{key}=1" for key in REMOVED]).ignored == tuple(sorted(REMOVED))


@pytest.mark.parametrize(
    "setting",
    [
        "popCkMaxBufferSize=2147483648",
        "popCkMaxBufferSize=x",
        "reviveInterval=9223372036854775808",
        "useReentrantLockWhenPutMessage=maybe",
    ],
)
def test_what_nothing_reads_is_still_checked_against_its_java_type(setting: str) -> None:
    (error,) = mistakes(setting)
    assert error.key == setting.partition("=")[0]


@pytest.mark.parametrize("struct", [Config, NameServerConfig])
def test_access_control_of_brokers_and_name_servers_has_the_same_keys(
    struct: type[NameServerConfig],
) -> None:
    found = load_config(struct, settings=["aclEnable=true", "aclFile=/etc/halog/acl.yml", "aclAdminFrom=tls"])
    assert found.ignored == ()
    config = found.config
    assert (config.acl_enable, config.acl_file, config.acl_directory) == (True, "/etc/halog/acl.yml", "/etc/halog/acl")
    assert (config.acl_require_tls, config.acl_admin_from) == (False, "tls")
    certificate = "tls.server.certPath=c.pem"
    for settings, key in (
        (["aclRequireTls=true", certificate], "aclRequireTls"),
        (["aclEnable=true", "aclRequireTls=true"], "aclRequireTls"),
        (
            ["aclEnable=true", "aclRequireTls=true", "tls.server.certPath=c.pem", "tls.server.mode=disabled"],
            "aclRequireTls",
        ),
        (["aclAdminFrom=10.0.0.1"], "aclAdminFrom"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(struct, settings=settings)
        assert caught.value.key == key
    with_tls = ["aclEnable=true", "aclRequireTls=true", certificate]
    assert load_config(struct, settings=with_tls).config.acl_require_tls


@pytest.mark.parametrize("key", sorted(REFUSED_IF_TRUE.keys() - fields(Config)))
def test_what_would_silently_not_be_done_is_refused(key: str) -> None:
    assert load_config(Config, settings=[f"{key}=false"]).ignored == (key,)
    (error,) = mistakes(f"{key}=true")
    assert (error.key, error.accepted) == (key, "false")


def test_a_library_user_gets_the_same_checks() -> None:
    with pytest.raises(ConfigError, match="listenPort: 70000 is too large"):
        Config(listen_port=70_000)
    with pytest.raises(ConfigError, match="brokerRole: 'MASTER' is not one of them"):
        Config(broker_role="MASTER")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="traceOn: 'no' is not a boolean"):
        Config(trace_on="no")  # type: ignore[arg-type]


def test_name_server_keys() -> None:
    loaded = load_config(NameServerConfig, settings=["listenPort=19876", "clusterTest=true", "brokerName=x"])
    assert loaded.config.listen_port == 19876
    assert loaded.ignored == ("brokerName", "clusterTest")
    with pytest.raises(ConfigError, match="listenPrt: is unknown; accepted: listenPort"):
        load_config(NameServerConfig, settings=["listenPrt=1"])


MEMBER = ("etcdEndpoints=http://127.0.0.1:2379", "brokerId=2", "brokerName=broker-a", "namesrvAddr=127.0.0.1:9876")


def test_defaults_of_a_member() -> None:
    config = load("brokerRole=SYNC_MASTER", *MEMBER)
    assert config.is_member
    assert not config.is_slave
    assert not config.embeds_name_server
    assert config.store_path_root_dir == "data/member-2"
    assert config.slave_read_enable is True
    assert config.lease_ttl_ms == 3_000
    assert config.etcd_servers == ("http://127.0.0.1:2379",)
    several = load(*MEMBER, "etcdEndpoints=https://a:1;https://b:2;")
    assert several.etcd_servers == ("https://a:1", "https://b:2")


def test_what_a_member_must_and_must_not_say() -> None:
    assert [error.key for error in mistakes("etcdEndpoints=http://127.0.0.1:2379")] == [
        "brokerId",
        "brokerName",
        "namesrvAddr",
    ]
    for setting in ("brokerRole=SLAVE", "haMasterAddress=10.0.0.1:10912", "haOutOfRange=resync", "brokerId=0"):
        [error] = mistakes(*MEMBER, setting)
        assert error.key == setting.partition("=")[0]
        assert "etcdEndpoints" in str(error) or error.key == "brokerId"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("etcdEndpoints=127.0.0.1:2379",), "etcdEndpoints"),
        (("etcdEndpoints=http://a:1;https://b:2",), "etcdEndpoints"),
        (("etcdEndpoints=http://a:1;http://b:99999",), "etcdEndpoints"),
        (("etcdUser=me",), "etcdPassword"),
        (("etcdPassword=secret",), "etcdUser"),
        (("etcdUser=me", "etcdPassword=secret", "etcdPasswordFile=f"), "etcdPassword"),
        (("etcdEndpoints=https://a:1", "etcdKeyPath=f"), "etcdCertPath"),
        (("etcdTrustCertPath=f",), "etcdEndpoints"),
        (("leaseTtl=3",), "leaseTtl"),
        (("enableControllerMode=true",), "enableControllerMode"),
    ],
)
def test_contradictions_of_failover(settings: tuple[str, ...], key: str) -> None:
    [error] = mistakes(*MEMBER, *settings)
    assert error.key == key
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("keys", "key", "reason"),
    [
        ({"authorization_enabled": True}, "authorizationEnabled", "requires authenticationEnabled=true"),
        ({"init_authentication_user": SecretStr("hidden-value")}, "initAuthenticationUser", "not the expected JSON"),
        (
            {"init_authentication_user": SecretStr('{"username":" ","password":"hidden-value"}')},
            "initAuthenticationUser",
            "blank name or password",
        ),
        (
            {"inner_client_authentication_credentials": SecretStr('{"username":"u","password":"hidden-value"}')},
            "innerClientAuthenticationCredentials",
            "not the expected JSON",
        ),
        ({"acl_admin_from": "tls"}, "aclAdminFrom", "requires aclEnable=true or authenticationEnabled=true"),
    ],
)
def test_wrong_users(keys: dict[str, Any], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**keys)
    assert caught.value.key == key
    assert reason in caught.value.reason
    assert "hidden-value" not in str(caught.value)

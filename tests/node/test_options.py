"""Every key reaches the package that it configures."""

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from ha.broker.options import BrokerOptions
from ha.config import Config, fields, load_config
from ha.node import options
from ha.protocol.properties import DELAY_LEVELS_MS
from ha.remoting import RemotingServerOptions
from ha.replication.options import HAOptions
from ha.store.options import StoreOptions

ADVERTISED = options.Advertised(
    client_host="127.0.0.1", client_port=10911, ha_host="127.0.0.1", ha_port=10912, store_address="127.0.0.1"
)
NUMBERS_AND_SWITCHES = (inspect.BoolType, inspect.IntType)
USED_BY_THE_NODE = {
    *("adminListenPort", "grpcListenPort", "haListenPort", "listenPort"),
    *("otelInterval", "otelTraceEvery"),
    *("aclEnable", "aclRequireTls", "asyncLearner", "tls.client.authServer", "tls.client.checkHost"),
    *("tls.enable", "tls.server.authClient", "tls.test.mode.enable", "totalReplicas"),
}
"""Read by other parts of the node, or compared with other keys only."""
PREREQUISITES = {
    "authorizationEnabled": ("authenticationEnabled=true",),
    "maxHaTransferByteInSecond": ("haFlowControlEnable=true",),
    "minInSyncReplicas": ("inSyncReplicas=3",),
    "haHousekeepingInterval": ("haSendHeartbeatInterval=100",),
}
MEMBER = ("etcdEndpoints=http://e:2379", "brokerName=b", "namesrvAddr=n:1", "brokerId=2")


def all_options(config: Config) -> list[object]:
    return [
        options.store_options(config, ADVERTISED),
        options.ha_options(config),
        options.broker_options(config, ADVERTISED),
        options.remoting_options(config),
        options.registration_options(config),
        options.member_options(config, "127.0.0.1:2", "127.0.0.1:1"),
        options.sync_state_rules(config),
    ]


def kind(field: inspect.Field) -> inspect.Type:
    found = field.type
    if isinstance(found, inspect.UnionType):
        [found] = [each for each in found.types if not isinstance(each, inspect.NoneType)]
    return found


def another_value(field: inspect.Field, current: Any) -> str:
    if isinstance(kind(field), inspect.BoolType):
        return "false" if current else "true"
    return str(
        2 if current is None else current + 1 if current < 20 else current - 20 if current % 20 == 0 else current - 1
    )


@pytest.mark.parametrize(
    "key",
    [
        key
        for key, field in fields(Config).items()
        if isinstance(kind(field), NUMBERS_AND_SWITCHES) and key not in USED_BY_THE_NODE
    ],
)
def test_a_key_changes_an_option(key: str) -> None:
    given = (*MEMBER, *PREREQUISITES.get(key, ()))
    before = load_config(Config, settings=given).config
    field = fields(Config)[key]
    value = another_value(field, getattr(before, field.name))
    after = load_config(Config, settings=[*given, f"{key}={value}"]).config
    assert all_options(after) != all_options(before)


def test_units() -> None:
    config = Config(sync_flush_timeout_ms=1500, ha_heartbeat_interval_ms=250, ha_housekeeping_interval_ms=700)
    found = options.ha_options(config)
    assert (found.heartbeat_interval_s, found.housekeeping_interval_s) == (0.25, 0.7)
    assert options.broker_options(config, ADVERTISED).sync_flush_timeout_s == 1.5
    assert options.delay_levels_ms(config.message_delay_level) == DELAY_LEVELS_MS
    assert options.delay_levels_ms("1s  2d") == (1000, 172_800_000)


def test_the_defaults_of_packages_and_of_the_configuration_are_equal() -> None:
    config = Config(broker_name="broker", store_path_root_dir=".")
    assert options.broker_options(config, ADVERTISED) == BrokerOptions()
    assert options.ha_options(config) == HAOptions()
    assert options.remoting_options(config) == RemotingServerOptions()
    store = options.store_options(config, ADVERTISED)
    expected = StoreOptions(root=config.root, commitlog_directory=store.commitlog_directory)
    assert store == msgspec.structs.replace(
        expected, open_files_max=store.open_files_max, stop_timeout_s=store.stop_timeout_s
    )


def test_only_a_sync_flush_slave_acknowledges_late() -> None:
    for role, mode, is_late in (
        ("SLAVE", "SYNC_FLUSH", True),
        ("SLAVE", "ASYNC_FLUSH", False),
        ("ASYNC_MASTER", "SYNC_FLUSH", False),
    ):
        config = load_config(Config, settings=[f"brokerRole={role}", f"flushDiskType={mode}"]).config
        assert options.ha_options(config).ack_flushed is is_late


def test_the_rule_of_rocketmq_5_applies_if_one_of_its_keys_is_set() -> None:
    assert options.replica_policy(Config()) is None
    assert options.replica_policy(Config(total_replicas=3)) is None
    policy = options.replica_policy(Config(in_sync_replicas=2))
    assert policy is not None
    assert (policy.in_sync_replicas, policy.min_in_sync_replicas, policy.all_in_sync) == (2, 1, False)
    assert options.replica_policy(Config(all_ack_in_sync_state_set=True)) is not None


def test_a_member_stores_like_a_slave_and_has_the_whole_log() -> None:
    config = load_config(Config, settings=MEMBER).config
    store, ha, broker = (
        options.store_options(config, ADVERTISED),
        options.ha_options(config),
        options.broker_options(config, ADVERTISED),
    )
    assert (store.is_slave, store.dispatch_confirmed) == (True, True)
    assert (ha.start_from, ha.reconnect_interval_s) == ("first", options.MEMBER_RECONNECT_S)
    assert broker.keeps_tables_in_log

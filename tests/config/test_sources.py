"""Which source wins, how a key is named in each, and what a broken source says."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import ha.master
import ha.slave
from ha.config import Config, ProxyConfig, load_config, render
from ha.errors import ConfigError

SOURCES = ("default", "file", "environment", "set")


@pytest.mark.parametrize("given", [each for size in (1, 2, 3, 4) for each in combinations(SOURCES, size)])
def test_the_later_source_wins(tmp_path: Path, given: tuple[str, ...]) -> None:
    port = {source: 20_000 + number for number, source in enumerate(SOURCES)}
    file = tmp_path / "broker.conf"
    file.write_text(f"listenPort={port['file']}\n" if "file" in given else "")
    loaded = load_config(
        Config,
        defaults={"listenPort": str(port["default"])} if "default" in given else {},
        file=file,
        environment={"HA_LISTEN_PORT": str(port["environment"])} if "environment" in given else {},
        settings=[f"listenPort={port['set']}"] if "set" in given else [],
    )
    assert loaded.config.listen_port == port[given[-1]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"settings": ["listenPort=1"]}, False),
        ({"settings": ["preallocateCommitLog=true"]}, True),
        ({"environment": {"PATH": "/bin", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}}, False),
        ({"environment": {"HA_BROKER_NAME": "a"}}, True),
        ({"file": "broker.conf"}, True),
    ],
)
def test_a_node_without_configuration_does_not_preallocate(
    tmp_path: Path, given: dict[str, Any], expected: bool
) -> None:
    (tmp_path / "broker.conf").write_text("")
    if "file" in given:
        given = {"file": tmp_path / given["file"]}
    for entry in (ha.master.ENTRY, ha.slave.ENTRY):
        loaded = load_config(Config, defaults=entry.defaults, unconfigured=entry.unconfigured, **given)
        assert loaded.config.preallocate is expected


@pytest.mark.parametrize("variable", ["HA_listenPort", "HA_LISTEN_PORT", "HA_LISTENPORT", "HA_listen_port"])
def test_environment_names(variable: str) -> None:
    assert load_config(Config, environment={variable: "20911", "PATH": "/bin"}).config.listen_port == 20911


def test_environment_names_with_odd_capitals() -> None:
    environment = {"HA_BROKER_IP1": "10.0.0.1", "HA_HA_LISTEN_PORT": "1", "HA_MAX_HA_TRANSFER_BYTE_IN_SECOND": "2048"}
    config = load_config(Config, environment=environment).config
    assert (config.broker_ip1, config.ha_listen_port, config.max_ha_transfer_bytes_per_s) == ("10.0.0.1", 1, 2048)


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="HA_LISTEN_PROT: does not name a key; accepted: HA_listenPort") as caught:
        load_config(Config, environment={"HA_LISTEN_PROT": "1"})
    assert caught.value.key == "HA_LISTEN_PROT"


def test_two_variables_for_one_key() -> None:
    with pytest.raises(ConfigError, match="listenPort is set twice"):
        load_config(Config, environment={"HA_LISTEN_PORT": "1", "HA_listenPort": "2"})


@pytest.mark.parametrize("setting", ["listenPort", "=1", ""])
def test_a_setting_without_key_and_value(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"--set: .* accepted: key=value"):
        load_config(Config, settings=[setting])


def test_the_last_of_repeated_keys_wins(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("listenPort=1000\nlistenPort=2000\n")
    assert load_config(Config, file=file).config.listen_port == 2000
    assert load_config(Config, settings=["listenPort=1", "listenPort=2"]).config.listen_port == 2


def test_the_name_of_4_9_in_any_source(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("haSlaveFallbehindMax=1000\n")
    loaded = load_config(Config, file=file)
    assert (loaded.config.ha_fall_behind_max_bytes, loaded.ignored) == (1000, ())
    assert load_config(Config, file=file, settings=["haMaxGapNotInSync=2"]).config.ha_fall_behind_max_bytes == 2
    environment = {"HA_HA_SLAVE_FALLBEHIND_MAX": "3"}
    assert load_config(Config, file=file, environment=environment).config.ha_fall_behind_max_bytes == 3
    with pytest.raises(ConfigError, match="haSlaveFallbehindMax: contradicts haMaxGapNotInSync"):
        load_config(Config, settings=["haSlaveFallbehindMax=1", "haMaxGapNotInSync=2"])


def test_an_empty_value_unsets_text(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("namesrvAddr=\nbrokerName=\n")
    config = load_config(Config, file=file).config
    assert config.embeds_name_server
    assert config.broker_name


def test_an_empty_value_of_text_with_a_default_gives_the_default() -> None:
    """As from `HA_namesrvAddr: ${ADDRESSES}` in a compose file without ADDRESSES."""
    environment = {"HA_namesrvAddr": "", "HA_bindAddress": ""}
    front = load_config(ProxyConfig, environment=environment).config
    assert (front.name_servers, front.bind_address) == (["127.0.0.1:9876"], "127.0.0.1")
    node = load_config(Config, settings=["adminBindAddress=", "brokerClusterName="]).config
    assert (node.admin_bind_address, node.cluster_name) == ("127.0.0.1", "DefaultCluster")


def test_an_empty_value_of_a_later_source_takes_back_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("namesrvAddr=10.0.0.1:9876\n")
    assert load_config(Config, file=file, settings=["namesrvAddr="]).config.embeds_name_server


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: .*absent\.conf: No such file"):
        load_config(Config, file=tmp_path / "absent.conf")
    with pytest.raises(ConfigError, match=r"--config: .*Is a directory"):
        load_config(Config, file=tmp_path)
    file = tmp_path / "broker.conf"
    file.write_text("a=\\uXYZW\n")
    with pytest.raises(ConfigError, match="line 1"):
        load_config(Config, file=file)
    file.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigError, match="is larger than"):
        load_config(Config, file=file)


def test_comments_may_be_in_any_encoding_values_in_utf8(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_bytes("\ufeff# 端口\n".encode() + "# 端口\n".encode("gbk") + "storePathRootDir=/资料\n".encode())
    assert load_config(Config, file=file).config.store_path_root_dir == "/资料"
    file.write_bytes("storePathRootDir=/资料\n".encode("gbk"))
    with pytest.raises(ConfigError, match=r"storePathRootDir: .*not UTF-8"):
        load_config(Config, file=file)


@pytest.mark.parametrize("key", ["haSharedSecret", "adminToken", "etcdPassword", "initAuthenticationUser"])
def test_secrets_are_utf8(key: str, tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_bytes(f"{key}=hidden-value-ü\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=f"^{key}: it is not UTF-8 text") as caught:
        load_config(Config, file=file)
    assert "hidden" not in str(caught.value)


def test_what_is_printed_can_be_loaded(tmp_path: Path) -> None:
    config = Config(broker_role="SLAVE", store_path_root_dir="/a\\b", in_sync_replicas=2, listen_port=0)
    file = tmp_path / "broker.conf"
    file.write_text(render(config))
    assert load_config(Config, file=file).config == config

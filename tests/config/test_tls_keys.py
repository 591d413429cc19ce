"""The keys of TLS: RocketMQ's names, where they may stand, what contradicts what."""

from pathlib import Path

import pytest

from ha.config import Config, NameServerConfig, SecretStr, load_config, render
from ha.errors import ConfigError

PASSWORD = "not to be seen"
CERTIFICATE = "tls.server.certPath=/etc/halog/server.pem"
TRUST = "tls.server.trustCertPath=/etc/halog/ca.pem"


def load(*settings: str) -> Config:
    return load_config(Config, settings=settings).config


def mistakes(*settings: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*settings)
    return [error.key for error in (caught.value, *caught.value.others)]


def test_defaults_are_rocketmqs_but_for_whom_is_trusted() -> None:
    config = load()
    assert (config.tls_server_mode, config.tls_enable, config.tls_server_need_client_auth) == (
        "permissive",
        False,
        "none",
    )
    assert config.tls_client_auth_server  # RocketMQ: false
    assert not config.tls_test_mode_enable  # RocketMQ: true
    assert (config.ha_tls, config.admin_tls) == ("disabled", "disabled")


def test_a_name_server_has_the_keys_of_servers() -> None:
    loaded = load_config(NameServerConfig, settings=["tls.server.mode=enforcing", CERTIFICATE, "tls.enable=true"])
    assert loaded.config.tls_server_mode == "enforcing"
    assert loaded.config.tls_server_key_path == "/etc/halog/server.pem"
    assert loaded.ignored == ("tls.enable",)


def test_what_depends_on_other_keys() -> None:
    config = load(
        CERTIFICATE, TRUST, "haTls=permissive", "tls.client.certPath=c.pem", "tls.server.need.client.auth=optional"
    )
    assert config.tls_server_key_path == "/etc/halog/server.pem"
    assert config.tls_client_key_path == "c.pem"
    assert config.ha_tls_trust_cert_path == "/etc/halog/ca.pem"
    assert config.tls_server_auth_client is True
    assert load("haTls=enforcing", CERTIFICATE, TRUST, "haTlsSubjects= b-1 ;b 2;").ha_tls_subject_set == {"b-1", "b 2"}


def test_use_tls_of_broker_conf_is_tls_enable() -> None:
    assert load("useTLS=true").tls_enable


def test_dots_in_the_environment() -> None:
    environment = {"HA_TLS_SERVER_MODE": "disabled", "HA_TLS_SERVER_KEY_PASSWORD": PASSWORD, "HA_HA_TLS": "disabled"}
    config = load_config(Config, environment=environment).config
    assert config.tls_server_mode == "disabled"
    assert config.tls_server_key_password == SecretStr(PASSWORD)


def test_a_tls_config_file_holds_what_is_not_given_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "tls.properties"
    file.write_text(f"tls.server.certPath=/a.pem\ntls.server.keyPath=/a.key\ntls.server.keyPassword={PASSWORD}\n")
    config = load(f"tls.config.file={file}", "tls.server.keyPath=/b.key")
    assert (config.tls_server_cert_path, config.tls_server_key_path) == ("/a.pem", "/b.key")
    assert config.tls_server_key_password == SecretStr(PASSWORD)
    file.write_text("listenPort=1\ntls.server.mdoe=disabled\n")
    assert mistakes(f"tls.config.file={file}") == ["listenPort", "tls.server.mdoe"]
    assert mistakes(f"tls.config.file={tmp_path / 'none'}") == ["tls.config.file"]


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (["tls.test.mode.enable"], ["tls.test.mode.enable=true"]),
        (["tls.server.certPath"], ["tls.server.mode=enforcing"]),
        (["tls.server.certPath"], ["tls.server.keyPath=x.key"]),
        (["tls.server.trustCertPath"], [CERTIFICATE, "tls.server.need.client.auth=optional"]),
        (["tls.server.authClient"],
         [CERTIFICATE, TRUST, "tls.server.need.client.auth=optional", "tls.server.authClient=false"]),
        (["tls.server.need.client.auth"], [CERTIFICATE, TRUST, "tls.server.authClient=true"]),
        (["tls.server.need.client.auth"], [CERTIFICATE, TRUST, "tls.server.need.client.auth=require"]),
        (["tls.server.need.client.auth"], ["tls.server.need.client.auth=REQUIRE"]),
        (["tls.client.certPath"], ["tls.client.keyPath=x.key"]),
        (["tls.server.certPath", "haTlsTrustCertPath"], ["haTls=enforcing"]),
        (["haTlsSubjects"], ["haTlsSubjects=broker-b"]),
        (["tls.server.certPath"], ["adminTls=enforcing"]),
        (["adminTls"], ["adminTls=permissive"]),
        (["tls.client.certPath"], ["brokerRole=SLAVE", CERTIFICATE, TRUST, "haTls=enforcing"]),
    ],
)  # fmt: skip
def test_contradictions(keys: list[str], settings: list[str]) -> None:
    assert mistakes(*settings) == keys


def test_passwords_are_not_printed() -> None:
    config = load(CERTIFICATE, f"tls.server.keyPassword={PASSWORD}", f"tls.client.keyPassword={PASSWORD}")
    assert PASSWORD not in render(config) + repr(config) + str(config)
    assert "tls.server.keyPassword=***\n" in render(config)

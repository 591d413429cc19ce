"""Nodes get known secrets in every possible way; then all of their output is searched for them."""

import ast
import base64
import gc
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ha
from ha.acl.secret_file import read_secret_file
from ha.config import load_config, render
from ha.config.secret import SecretStr
from ha.errors import BrokerError, ConfigError, HalogError
from ha.master import ENTRY
from ha.node import Node
from ha.protocol.acl import AclCredentials
from ha.protocol.ha_handshake import HandshakeKey
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from ha.replication.statistics import Condition
from tests.metrics.nodes import ask
from tests.node.test_library import config, slave_config
from tests.tls.nodes import until

PACKAGE = Path(ha.__file__).parent
CLIENT, BROKER = "client-secret-7f3a", "broker-secret-91bc"
SHARED, TOKEN = "shared-secret-0d5e77", "admin-token-c0ffee42"
WRONG = "wrong-secret-e1e2e3e4"
SECRETS = (CLIENT, BROKER, SHARED, TOKEN, WRONG)
ACCOUNTS = f"""
accounts:
  - {{accessKey: client-key, secretKey: {CLIENT}}}
  - {{accessKey: broker-key, secretKey: {BROKER}, admin: true}}
"""


def secrets_in(text: str) -> list[str]:
    """The secrets in `text`, plain or encoded for basic authentication."""
    shapes = {secret: (secret, base64.b64encode(f"x:{secret}".encode()).decode()) for secret in SECRETS}
    return [secret for secret, shape in shapes.items() if any(each in text for each in shape)]


def secure(make: Callable[..., ha.Config], folder: Path, *arguments: Any, **keys: Any) -> ha.Config:
    """A configuration with every secret."""
    (folder / "plain_acl.yml").write_text(ACCOUNTS)
    (folder / "token").write_text(TOKEN + "\n")
    for name in ("plain_acl.yml", "token"):
        (folder / name).chmod(0o600)
    return make(
        *arguments,
        acl_enable=True,
        acl_file=str(folder / "plain_acl.yml"),
        broker_access_key="broker-key",
        broker_secret_key=SecretStr(BROKER),
        ha_shared_secret=keys.pop("ha_shared_secret", SecretStr(SHARED)),
        admin_token_file=str(folder / "token"),
        **keys,
    )


async def test_node_output_has_no_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    master_config = secure(config, tmp_path, tmp_path / "master")
    async with ha.open_master(master_config) as master:
        good = secure(slave_config, tmp_path, tmp_path / "good", master, broker_id=1)
        bad = secure(slave_config, tmp_path, tmp_path / "bad", master, broker_id=2, ha_shared_secret=SecretStr(WRONG))
        async with ha.open_slave(good) as slave, ha.open_slave(bad) as stranger:
            link, refused = slave.ha_client, stranger.ha_client
            assert link is not None
            assert refused is not None
            await until(lambda: link.statistics().condition is Condition.CONNECTED)
            await until(lambda: refused.statistics().condition is Condition.NOT_AUTHENTICATED)
            await until(lambda: "slave_sync.completed" in caplog.text)  # the master takes the slave's signature
            await _ask_for_trouble(master, said)
            (tmp_path / "plain_acl.yml").write_text(ACCOUNTS + f"  - {{accessKey: {WRONG}")
            await until(lambda: "acl.reload_failed" in caplog.text)
            for node in (master, slave, stranger):
                _, *shown = await ask(node.admin_address, "/status", f"Authorization: Bearer {TOKEN}")
                assert '"is_ready"' in shown[1]
                status, *refusal = await ask(node.admin_address, "/status", f"Authorization: Bearer {WRONG}")
                assert status == 401
                said += [*shown, *refusal]
                said += [render(node.config), repr(node.config)]
                said.append(repr(msgspec.to_builtins(node.broker.acl_guard.statistics())))  # type: ignore[union-attr]
            said.append(everything())
            said.append(_traceback(master_config))
    said += [caplog.text, *capfd.readouterr()]
    assert "acl.refused" in caplog.text
    assert "reason=not_authenticated" in caplog.text
    assert secrets_in("\n".join(said)) == []


async def _ask_for_trouble(master: Node, said: list[str]) -> None:
    """Refused requests, and the SDK's errors."""
    async with open_remoting_client() as client:
        for credentials in (None, AclCredentials("client-key", WRONG), AclCredentials("client-key", CLIENT)):
            command = RemotingCommand(17, ext_fields={"topic": "t"})
            if credentials is not None:
                credentials.sign(command)
            said.append(repr(await client.invoke(master.remoting_address, command, 5)))
    from ha.client import Message, Producer

    assert master.name_server_address is not None
    async with Producer(master.name_server_address, credentials=AclCredentials("client-key", WRONG)) as producer:
        said.append(repr(vars(producer)))
        try:
            await producer.send(Message("t", b"x"))
        except BrokerError as error:
            said.append("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))
        else:
            raise AssertionError("it was let in")


def everything() -> str:
    """The repr of every live object of halog."""
    shown = []
    for found in gc.get_objects():
        if str(type(found).__module__).startswith("ha.") and not isinstance(found, type):
            shown.append(repr(found))
    for expected in ("HandshakeOptions(", "AclCredentials(", "Account(", "ha.acl.guard"):
        assert any(expected in text for text in shown), expected
    return "\n".join(shown)


def _traceback(given: ha.Config) -> str:
    """The report of a bug by a tool that shows local variables, among them a configuration."""
    try:
        raise RuntimeError(f"a bug with {given}, {given.ha_shared_secret!r}, {given.ha_shared_secret}")
    except RuntimeError as error:
        return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())


KEYS = ("brokerSecretKey", "haSharedSecret", "adminToken")


@pytest.mark.parametrize("source", ["file", "environment", "--set"])
def test_print_config_hides_secrets(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--print-config", "--set", "brokerAccessKey=broker-key"]
    given = dict(zip(KEYS, (BROKER, SHARED, TOKEN), strict=True))
    if source == "file":
        (tmp_path / "broker.conf").write_text("".join(f"{key}={value}\n" for key, value in given.items()))
        arguments += ["--config", str(tmp_path / "broker.conf")]
    for key, value in given.items():
        if source == "environment":
            monkeypatch.setenv(f"HA_{key}", value)
        if source == "--set":
            arguments += ["--set", f"{key}={value}"]
    assert ENTRY.main(arguments) == 0
    shown = capsys.readouterr()
    assert secrets_in(shown.out + shown.err) == []
    for key in KEYS:
        assert f"{key}=***" in shown.out


@pytest.mark.parametrize(
    "settings",
    [
        [f"haSharedSecret={SHARED[:9]}"],
        [f"adminToken={TOKEN[:9]}"],
        [f"brokerSecretKey={BROKER}"],
        [f"haSharedSecret={SHARED}", "haSharedSecretFile=/x"],
        [f"haSharedSecrt={SHARED}"],
        [f"haSharedSecret:{SHARED}"],
        [f"haSharedSecret {SHARED}"],
        [f"aclEnable={SHARED}"],
    ],
)
def test_configuration_errors_do_not_show_secrets(settings: list[str], request: pytest.FixtureRequest) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ha.Config, settings=settings)
    shown = "".join(traceback.format_exception(caught.value)) + repr(vars(caught.value))
    found = [part for part in (*SECRETS, SHARED[:9], TOKEN[:9]) if part in shown]
    # Where a boolean is expected, the error repeats the text.
    assert found == ([SHARED, SHARED[:9]] if settings[0].startswith("aclEnable") else [])


def only(error: BaseException) -> BaseException:
    """The exceptions in exception groups."""
    while isinstance(error, BaseExceptionGroup):
        [error] = error.exceptions
    return error


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "secret has 0 characters"),
        (SHARED[:15].encode(), "secret has 15 characters"),
        (f"{SHARED}\n{WRONG}\n".encode(), "more than one line"),
        (SHARED.encode() + b"\xff", "not UTF-8"),
        (b"x" * 5000, "more than 4096 bytes"),
    ],
)
async def test_secret_file_without_a_secret(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((HalogError, BaseExceptionGroup)) as caught:
        async with ha.open_master(config(tmp_path / "store", ha_shared_secret_file=str(path))):
            pass
    error = only(caught.value)
    assert isinstance(error, ConfigError)
    assert error.key == "haSharedSecretFile"
    assert reason in error.reason
    shown = "".join(traceback.TracebackException.from_exception(caught.value).format())
    assert secrets_in(shown) == []
    assert SHARED[:15] not in shown


async def test_secret_file_of_a_windows_editor(tmp_path: Path) -> None:
    """It begins with a byte order mark, and its line ends with two characters."""
    path = tmp_path / "secret"
    path.write_bytes(f"\ufeff{SHARED}\r\n".encode())
    assert await read_secret_file("haSharedSecretFile", str(path), 1) == SHARED


async def test_world_readable_secret_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.write_text(SHARED)
    for mode, is_warned in ((0o600, False), (0o640, False), (0o644, True), (0o604, True)):
        path.chmod(mode)
        caplog.clear()
        async with ha.open_master(config(tmp_path / "store", ha_shared_secret_file=str(path))):
            pass
        assert ("config.secret_file_exposed" in caplog.text) is is_warned, oct(mode)


def test_all_secrets_are_compared_in_constant_time() -> None:
    """Code that checks a signature, proof or token calls hmac.compare_digest, and never compares with ==."""
    places = {
        "protocol/acl.py": {"has_signed"},
        "acl/grpc_signature.py": {"is_by"},
        "protocol/ha_handshake.py": {"is_slave_proof", "is_master_proof"},
        "admin/sessions.py": {"matches"},
        "config/secret.py": {"__eq__"},
    }
    for file, names in places.items():
        functions = {
            node.name: node
            for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        for name in names:
            calls = [ast.unparse(n.func) for n in ast.walk(functions[name]) if isinstance(n, ast.Call)]
            assert "hmac.compare_digest" in calls, (file, name)
            compared = [n for n in ast.walk(functions[name]) if isinstance(n, ast.Compare)]
            harmless = ("len(", "b'authorization'", "is not None")  # how many headers there are, and their name
            assert all(any(word in ast.unparse(n) for word in harmless) for n in compared), (file, name)
    # No other code reads a Signature.
    for path in PACKAGE.rglob("*.py"):
        if path not in (PACKAGE / "protocol" / "acl.py", PACKAGE / "acl" / "grpc_signature.py"):
            assert '"Signature"' not in path.read_text(), path


def test_wrong_signature_uses_compare_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    command = RemotingCommand(310, ext_fields={"a": "b"})
    AclCredentials("k", CLIENT).sign(command)
    from ha.protocol.acl import SigningKey

    assert not SigningKey(WRONG).has_signed(command)
    assert not HandshakeKey(SHARED).is_slave_proof(bytes(32), bytes(32), bytes(32))
    assert compared == [(28, 28), (32, 32)]

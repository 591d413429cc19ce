"""The SDK and the command over TLS, against halog's own nodes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import trio
from anyio.abc import ByteStream
from anyio.from_thread import start_blocking_portal

from ha.cli import run
from ha.client import ClientOptions, ClientTls, Message, Producer, PullConsumer, SendStatus
from ha.client.tls import environment_tls
from ha.config import SecretStr
from ha.errors import ConnectionFailed, HalogError
from ha.node import Node, open_node
from tests.tls.nodes import server, settings
from tests.tls.pki import Pki

PASSWORD = "open sesame"


@contextmanager
def running(folder: Path, *keys: str) -> Iterator[Node]:
    """A master in a thread of its own, so that clients of any event loop can come."""
    with (
        start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(open_node(settings(folder, "ASYNC_MASTER", *keys))) as node,
    ):
        yield node


@pytest.fixture(scope="module")
def enforcing(session_pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    keys = (
        *server(session_pki),
        "tls.server.mode=enforcing",
        "tls.server.need.client.auth=optional",
        "adminTls=enforcing",
    )
    with running(tmp_path_factory.mktemp("enforcing"), *keys) as node:
        yield node


def names(node: Node) -> str:
    assert node.name_server_address is not None
    return node.name_server_address


async def send_and_read(node: Node, options: ClientOptions, topic: str) -> list[bytes]:
    async with Producer(names(node), options=options) as producer:
        result = await producer.send(Message(topic, b"x" * 100_000))
        assert result.status is SendStatus.SEND_OK
    async with PullConsumer(names(node), options=options) as consumer:
        return [message.body for message in (await consumer.pull(result.queue, result.queue_offset)).messages]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("kind", ["files", "context", "certificate", "encrypted key", "unchecked"])
def test_sends_and_reads(kind: str, backend: str, enforcing: Node, session_pki: Pki) -> None:
    certificate, key = session_pki.issue(f"sdk-{backend}", password=PASSWORD if kind == "encrypted key" else "")
    files = ClientTls(trust=session_pki.trust)
    own = ClientTls(trust=session_pki.trust, certificate=certificate, key=key, key_password=SecretStr(PASSWORD))
    options = {
        "files": ClientOptions(tls=files),
        "context": ClientOptions(tls=files.context()),
        "certificate": ClientOptions(tls=own),
        "encrypted key": ClientOptions(tls=own),
        "unchecked": ClientOptions(tls=ClientTls(check_server=False)),
    }[kind]
    topic = re.sub(r"\W", "-", f"{kind}-{backend}")
    assert anyio.run(send_and_read, enforcing, options, topic, backend=backend) == [b"x" * 100_000]
    assert PASSWORD not in repr(options)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("tls", "reason"),
    [
        (None, "closed by the server|lost: "),
        (ClientTls(), "can't connect: TLS: the certificate is not valid: "),
        (ClientTls(trust="others"), "can't connect: TLS: the certificate is not valid: "),
        (ClientTls(trust="ours", certificate="others"), "closed by the server|lost: "),
    ],
)
def test_is_told_why_not(
    tls: ClientTls | None, reason: str, backend: str, enforcing: Node, session_pki: Pki, tmp_path: Path
) -> None:
    others = Pki(tmp_path)
    if tls is not None and tls.trust:
        certificate, key = others.issue("astray") if tls.certificate else ("", "")
        tls = ClientTls(
            trust=session_pki.trust if tls.trust == "ours" else others.trust, certificate=certificate, key=key
        )

    async def send() -> None:
        async with Producer(names(enforcing), options=ClientOptions(tls=tls)) as producer:
            await producer.send(Message("nowhere", b"x"))

    with pytest.raises(ConnectionFailed, match=reason):
        anyio.run(send, backend=backend)


def test_the_host_in_the_certificate_is_compared(session_pki: Pki, tmp_path: Path) -> None:
    certificate, key = session_pki.issue("elsewhere", hosts=("elsewhere.example",))
    keys = (f"tls.server.certPath={certificate}", f"tls.server.keyPath={key}")
    with running(tmp_path, *keys) as node:
        strict, lax = (ClientTls(trust=session_pki.trust, check_host=check) for check in (True, False))
        assert anyio.run(send_and_read, node, ClientOptions(tls=lax), "t") == [b"x" * 100_000]
        with pytest.raises(ConnectionFailed, match="IP address mismatch"):
            anyio.run(send_and_read, node, ClientOptions(tls=strict), "t")


def test_a_file_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    async def open_producer() -> None:
        async with Producer("127.0.0.1:1", options=ClientOptions(tls=ClientTls(trust=str(tmp_path / "none.pem")))):
            raise AssertionError

    with pytest.raises(ValueError, match=r"none\.pem: No such file"):
        anyio.run(open_producer)


async def test_connections_come_from_where_the_program_says(session_pki: Pki, tmp_path: Path) -> None:
    opened: list[tuple[str, int]] = []

    async def connect(host: str, port: int) -> ByteStream:
        opened.append((host, port))
        return await anyio.connect_tcp(host, port)

    async with open_node(settings(tmp_path, "ASYNC_MASTER", *server(session_pki))) as node:
        for tls in (None, ClientTls(trust=session_pki.trust)):
            opened.clear()
            assert await send_and_read(node, ClientOptions(connect=connect, tls=tls), "t") == [b"x" * 100_000]
            assert {f"{host}:{port}" for host, port in opened} == {names(node), node.remoting_address}
        assert node.tls.handshakes.statistics().completed == 4


async def test_a_server_that_says_nothing_costs_the_connect_timeout(session_pki: Pki) -> None:
    async def swallow(stream: trio.SocketStream) -> None:
        async with stream:
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, swallow, 0, host="127.0.0.1")
        )
        port = listeners[0].socket.getsockname()[1]
        options = ClientOptions(tls=ClientTls(trust=session_pki.trust), connect_timeout_s=0.2)
        with trio.fail_after(5), pytest.raises(HalogError):
            async with Producer(f"127.0.0.1:{port}", options=options) as producer:
                await producer.send(Message("nowhere", b"x"), timeout_s=2)
        nursery.cancel_scope.cancel()


# The environment


def test_what_the_environment_says() -> None:
    assert environment_tls({}) is None
    assert environment_tls({"HALOG_TLS": "false", "HALOG_TLS_KEY": "k"}) is None
    assert environment_tls({"HALOG_TLS": "true"}) == ClientTls()
    assert environment_tls({"HALOG_TLS_CA": "a", "HALOG_TLS_CERT": "c", "HALOG_TLS_KEY": "k"}) == ClientTls(
        trust="a", certificate="c", key="k"
    )
    assert environment_tls(
        {"HALOG_TLS_CERT": "c", "HALOG_TLS_KEY_PASSWORD": "p", "HALOG_TLS_ANY_HOST": "TRUE"}
    ) == ClientTls(certificate="c", key_password=SecretStr("p"), check_host=False)
    with pytest.raises(ValueError, match="HALOG_TLS='maybe'"):
        environment_tls({"HALOG_TLS": "maybe"})


@pytest.mark.parametrize("name", ["HALOG_TLS_KEY", "HALOG_TLS_ANY_HOST"])
def test_what_needs_tls_does_not_mean_plaintext(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.* require HALOG_TLS"):
        environment_tls({name: "true"})


def test_a_program_that_says_nothing_gets_the_environments(
    enforcing: Node, session_pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOG_TLS_CA", session_pki.trust)
    assert anyio.run(send_and_read, enforcing, ClientOptions(), "t") == [b"x" * 100_000]


# The command


def test_produce_and_consume(enforcing: Node, session_pki: Pki, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--servers", names(enforcing), "--tls-ca", session_pki.trust]
    assert run(["produce", "of-the-command", "--body", "hello", *flags]) == 0
    capfd.readouterr()
    assert run(["consume", "of-the-command", *flags]) == 0
    assert capfd.readouterr().out == "hello\n"
    assert run(["produce", "of-the-command", "--body", "hello", "--servers", names(enforcing), "--tls"]) == 69
    assert "certificate is not valid" in capfd.readouterr().err


def test_flags_of_the_command(
    enforcing: Node, session_pki: Pki, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["produce", "t", "--body", "x", "--tls-ca", "/nowhere.pem"]) == 2
    assert "/nowhere.pem: No such file or directory" in capfd.readouterr().err
    assert run(["produce", "t", "--body", "x", "--tls-key", "k"]) == 2
    certificate, key = session_pki.issue("command", password=PASSWORD)
    flags = ["--servers", names(enforcing), "--tls-ca", session_pki.trust, "--tls-cert", certificate, "--tls-key", key]
    assert run(["produce", "t", "--body", "x", *flags]) == 2
    assert "its password is missing" in capfd.readouterr().err
    monkeypatch.setenv("HALOG_TLS_KEY_PASSWORD", PASSWORD)
    assert run(["produce", "t", "--body", "x", *flags]) == 0


@pytest.mark.parametrize("word", ["true", "True", "t", "yes", "y", "1", "false", "f", "no", "N", "0"])
def test_a_word_means_the_same_to_command_and_sdk(
    word: str, enforcing: Node, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOG_TLS", word)
    encrypts = word.lower()[0] in "ty1"
    assert environment_tls({"HALOG_TLS": word}) == (ClientTls() if encrypts else None)
    assert run(["produce", "t", "--body", "x", "--servers", names(enforcing)]) == 69
    assert ("certificate is not valid" in capfd.readouterr().err) == encrypts


def test_status_by_https(
    enforcing: Node, session_pki: Pki, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = ["status", "--admin", enforcing.admin_address]
    assert run([*admin, "--tls-ca", session_pki.trust]) == 0
    assert "broker-a:0" in capfd.readouterr().out
    assert run(admin) == 69
    assert run([*admin, "--tls"]) == 69
    assert "TLS error: the certificate is not valid" in capfd.readouterr().err


def test_status_names_an_expiring_certificate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pki = Pki(tmp_path)
    keys = server(pki)
    pki.issue("server", valid_for=timedelta(days=3))
    with running(tmp_path, *keys) as node:
        assert run(["status", "--admin", node.admin_address]) == 0
    assert re.search(r"broker-a:0: server certificate \S+server.pem expires 20\d\d-\d\d-\d\d", capfd.readouterr().out)

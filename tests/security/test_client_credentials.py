"""The SDK and the command at a node that requires credentials: given, from the environment, from a file, wrong."""

from pathlib import Path

import pytest
import trio

import ha
from ha.cli import run
from ha.client import AclCredentials, ClientOptions, Message, Producer, PullConsumer
from ha.client.credentials import environment_credentials
from ha.config.secret import SecretStr
from ha.errors import BrokerError
from tests.node.test_library import config

SECRET, TOKEN = "the-secret-of-alice", "a-token-of-the-operator"
ACCOUNTS = f"""
accounts:
  - accessKey: alice-key
    secretKey: {SECRET}
    defaultTopicPerm: PUB|SUB
    defaultGroupPerm: SUB
    topicPerms: [no=DENY]
"""


def node_config(folder: Path) -> ha.Config:
    """A node that requires credentials of clients and operators."""
    file = folder / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    return config(folder / "store", acl_enable=True, acl_file=str(file), admin_token=SecretStr(TOKEN))


async def test_the_sdk_signs_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ha.open_master(node_config(tmp_path)) as node:
        servers = node.name_server_address
        assert servers is not None
        alice = AclCredentials("alice-key", SECRET)
        async with Producer(servers, credentials=alice) as producer:
            await producer.send_oneway(Message("T", b"oneway"))
            await producer.send(Message("T", b"single"))
            await producer.send_batch([Message("T", b"a"), Message("T", b"b")])
            with pytest.raises(BrokerError, match="No default permission for topic:no"):
                await producer.send(Message("no", b"x"))
        async with PullConsumer(servers, options=ClientOptions(credentials=alice)) as consumer:
            found: list[bytes] = []
            for queue in await consumer.queues("T"):
                start = await consumer.min_offset(queue)
                found += [message.body for message in (await consumer.pull(queue, start)).messages]
                await consumer.commit(queue, await consumer.max_offset(queue))
                await consumer.committed_offset(queue)
                await consumer.offset_for_time(queue, 0)
            assert sorted(found) == [b"a", b"b", b"oneway", b"single"]
        async with Producer(servers) as producer:
            with pytest.raises(BrokerError, match="No accessKey is configured"):
                await producer.send(Message("T", b"x"))
        monkeypatch.setenv("HALOG_ACCESS_KEY", "alice-key")
        monkeypatch.setenv("HALOG_SECRET_KEY", SECRET)
        async with Producer(servers) as producer:
            await producer.send(Message("T", b"as the environment says"))
        async with Producer(servers, credentials=AclCredentials("alice-key", "another-secret")) as producer:
            with pytest.raises(BrokerError, match="Check signature failed"):
                await producer.send(Message("T", b"x"))


async def test_the_command_signs_and_shows_no_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, token = tmp_path / "key", tmp_path / "token"
    key.write_text(SECRET + "\n")
    token.write_text(TOKEN)

    async def command(*words: str) -> int:
        return await trio.to_thread.run_sync(run, words)

    async with ha.open_master(node_config(tmp_path)) as node:
        to = ("--servers", str(node.name_server_address))
        who = ("--access-key", "alice-key", "--secret-key-file", str(key))
        assert await command("produce", "T", "--body", "hello", *to) == 1
        assert "No accessKey is configured" in capfd.readouterr().err
        assert await command("produce", "T", "--body", "hello", *to, *who) == 0
        assert await command("consume", "T", *to, *who) == 0
        assert capfd.readouterr().out.endswith("hello\n")
        assert await command("produce", "T", "--body", "hello", *to, "--access-key", "alice-key") == 2
        assert "an access key without its secret key" in capfd.readouterr().err
        assert await command("produce", "T", "--body", "x", *to, *who[:2], "--secret-key-file", str(tmp_path)) == 2

        admin = ("status", "--admin", node.admin_address)
        assert await command(*admin) == 69
        assert "requires an adminToken" in capfd.readouterr().err
        assert await command(*admin, "--token-file", str(token)) == 0
        monkeypatch.setenv("HALOG_ADMIN_TOKEN", "a-token-of-somebody-else")
        assert await command(*admin) == 69
        assert "wrong adminToken" in capfd.readouterr().err
        monkeypatch.setenv("HALOG_ADMIN_TOKEN", TOKEN)
        assert await command(*admin, "--json") == 0
    shown = capfd.readouterr()
    assert not [secret for secret in (SECRET, TOKEN) if secret in shown.out + shown.err]


def test_credentials_from_the_environment(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("in-the-file\r\n")
    assert environment_credentials({}) is None
    both = {"HALOG_ACCESS_KEY": "a", "HALOG_SECRET_KEY": "b"}
    assert repr(environment_credentials(both)) == "AclCredentials('a', ***)"
    assert repr(environment_credentials(both, access_key="c")) == "AclCredentials('c', ***)"
    assert environment_credentials({"HALOG_ACCESS_KEY": "a", "HALOG_SECRET_KEY_FILE": str(key)}) is not None
    for environment, reason in (
        ({"HALOG_ACCESS_KEY": "a"}, "without its secret key"),
        ({"HALOG_SECRET_KEY": "b-secret"}, "without an access key"),
        ({"HALOG_ACCESS_KEY": "a", "HALOG_SECRET_KEY_FILE": "/nowhere"}, "No such file"),
    ):
        with pytest.raises(ValueError, match=reason) as caught:
            environment_credentials(environment)
        assert "b-secret" not in str(caught.value)
    for content in (b"", b"two\nlines", b"\xff", b"x" * 5000):
        key.write_bytes(content)
        with pytest.raises(ValueError, match="not one line of text"):
            environment_credentials({}, access_key="a", secret_key_file=str(key))

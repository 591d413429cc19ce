"""The examples and tables of docs/security.md are valid."""

import re
import shutil
from pathlib import Path

import msgspec
import pytest
import trio

import ha
from ha.acl.requirements import RULES, Needs
from ha.acl.yaml_file import parse_acl_file
from ha.config.loading import load_config, shown
from ha.node.status import describe
from ha.protocol.acl import AclCredentials
from ha.replication.progress import CloseReason
from scripts.permissions_table import render
from tests.broker.node import PULL, SEND_V2
from tests.node.test_library import config
from tests.security.brokers import Client, guarded_broker
from tests.security.test_acl_guard import refusal

DOCUMENT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
SECRET = "filled-in-by-the-reader"


def example() -> str:
    """The file of accounts, with secrets in place of the dots."""
    found: str
    [found] = re.findall(r"(?ms)^```yaml\n(.*?)^```", DOCUMENT)
    assert found.count('"…"') == 2
    return found.replace('"…"', SECRET)


def test_permission_tables_equal_the_code() -> None:
    assert render(DOCUMENT) == DOCUMENT, "run scripts/reference"


def test_every_answered_request_is_in_a_table() -> None:
    """Read from the page, so that a missing marker is noticed, too."""
    said = {
        int(code): (account, user)
        for account, user, codes in re.findall(
            r"(?m)^\| ([^|]+) \| ([^|]+) \| (\d+ [A-Z_\d]+(?:, \d+ [A-Z_\d]+)*) \|$", DOCUMENT
        )
        for code in re.findall(r"(?:^|, )(\d+) ", codes)
    }
    assert said.keys() == RULES.keys()
    assert said[37] == ("PUB on the topic of the half message", "Pub on the topic")
    assert said[205] == said[104] == said[3001] == (Needs.ADMIN_CHANGE.value, "Update on the cluster")
    assert said[215] == (Needs.ADMIN_CHANGE.value, "Delete on the topic")
    assert said[14][1] == "Sub or Get on the topic and the group"


async def test_example_accounts(tmp_path: Path) -> None:
    assert parse_acl_file(example().encode()).warnings == []
    async with guarded_broker(tmp_path, example()) as node:
        billing, tools = (Client(node, AclCredentials(name, SECRET)) for name in ("billing", "slaves-and-tools"))
        pull = {**PULL, "topic": "invoices", "consumerGroup": "billing"}
        assert await refusal(billing, 310, b"x", **{**SEND_V2, "b": "invoices"}) == ""
        assert await refusal(billing, 11, **pull) == ""
        assert await refusal(billing, 11, **{**pull, "topic": "%DLQ%billing"}) == ""
        assert await refusal(tools, 11, **{**pull, "topic": "letters", "consumerGroup": "readers"}) == ""
        topic, group = "No default permission for topic:letters", "No default permission for group:readers"
        assert await refusal(billing, 310, b"x", **{**SEND_V2, "b": "letters"}) == topic
        assert await refusal(billing, 11, **{**pull, "topic": "letters"}) == topic
        assert await refusal(billing, 11, **{**pull, "consumerGroup": "readers"}) == group
        assert "No accessKey is configured" in await refusal(Client(node, None), 11, **pull)


async def test_example_users(tmp_path: Path) -> None:
    """On a whole node: the users exist, the configuration and the state show no password, the broker registers."""
    [block] = re.findall(r"(?ms)^```properties\n(.*?)^```", DOCUMENT)
    settings = [line.replace("…", SECRET) for line in block.splitlines()]
    base = config(tmp_path / "store")
    loaded = load_config(ha.Config, settings=settings).config
    given = msgspec.structs.replace(
        base,
        **{
            name: getattr(loaded, name)
            for name in (
                "authentication_enabled",
                "authorization_enabled",
                "init_authentication_user",
                "inner_client_authentication_credentials",
            )
        },
    )
    async with ha.open_master(given) as master:
        assert sorted(master.broker.tables.users.table) == ["broker", "root"]
        assert all(user.is_super and user.password == SECRET for user in master.broker.tables.users.table.values())
        assert SECRET not in str(shown(given)) + str(msgspec.to_builtins(describe(master)))
    assert SECRET in (tmp_path / "store" / "config" / "users.json").read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
async def test_checklist_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    [command] = re.findall(r"`([^`]*openssl rand [^`]* > secret[^`]*)`", DOCUMENT)
    await trio.run_process(["bash", "-euc", command], cwd=tmp_path)
    async with ha.open_master(config(tmp_path / "store", ha_shared_secret_file=str(tmp_path / "secret"))):
        pass
    assert "config.secret_file_exposed" not in caplog.text


async def test_checklist_fields_are_in_the_status(tmp_path: Path) -> None:
    (tmp_path / "plain_acl.yml").write_text(example())
    [line] = [line for line in DOCUMENT.splitlines() if line.startswith("7. Watch")]
    given = config(tmp_path / "store", acl_enable=True, acl_file=str(tmp_path / "plain_acl.yml"))
    async with ha.open_master(given) as master:
        shown = msgspec.to_builtins(describe(master))
        for path in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", line):
            *parents, name = path.split(".")
            found = shown
            for parent in parents:
                found = found[parent]
            # A reason is only counted once it has occurred.
            assert name in found or name in {reason.value for reason in CloseReason}, path

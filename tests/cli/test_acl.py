"""`ha acl` against a real master with users."""

import json
from pathlib import Path
from typing import Any

import pytest

from ha.cli import run
from ha.client import Admin
from ha.errors import BrokerError
from ha.protocol.codes import ResponseCode
from tests.cli.cluster import cluster

pytestmark = pytest.mark.processes

FILE = """
accounts:
  - accessKey: billing
    secretKey: the-secret-of-billing
    whiteRemoteAddress: 10.0.0.1
    topicPerms: [orders=PUB|SUB]
    groupPerms: [billing=SUB]
"""


async def refuse(_: Admin, name: str, policies: object) -> None:
    raise BrokerError("127.0.0.1:10911", ResponseCode.SYSTEM_ERROR, f"no policies for {name}")


def test_users_are_created_changed_and_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("the-secret-of-alice\n")
    (tmp_path / "plain_acl.yml").write_text(FILE)
    monkeypatch.setenv("HALOG_ACCESS_KEY", "root")
    monkeypatch.setenv("HALOG_SECRET_KEY", "the-secret-of-root")
    init = json.dumps({"username": "root", "password": "the-secret-of-root"})
    with cluster(tmp_path) as nodes:
        nodes.master("authenticationEnabled=true", "authorizationEnabled=true", f"initAuthenticationUser={init}")

        def ha(*words: str, code: int = 0) -> str:
            found = run(["acl", *words, "--servers", nodes.name_server])
            captured = capsys.readouterr()
            assert found == code, captured
            assert "the-secret" not in captured.out + captured.err
            return captured.out + captured.err

        def listed() -> dict[str, Any]:
            return {user["user"]: user for user in json.loads(ha("list", "--json"))}

        assert ha("create", "alice", "--password-file", str(tmp_path / "password")) == "alice: created\n"
        assert "The user is existed" in ha("create", "alice", "--password-file", str(tmp_path / "password"), code=1)
        ha("grant", "alice", "Topic:a*", "Pub, get", "--source", "10.0.0.0/8")
        ha("grant", "alice", "Group:*", "Sub", "--deny", "--default")
        assert listed()["alice"] == {
            "user": "alice",
            "type": "Normal",
            "status": "enable",
            "policies": [
                {
                    "policyType": "Custom",
                    "entries": [
                        {
                            "resource": "Topic:a*",
                            "actions": ["Pub", "Get"],
                            "sourceIps": ["10.0.0.0/8"],
                            "decision": "Allow",
                        }
                    ],
                },
                {
                    "policyType": "Default",
                    "entries": [{"resource": "Group:*", "actions": ["Sub"], "sourceIps": None, "decision": "Deny"}],
                },
            ],
        }
        assert "Topic:a*" in ha("list")
        assert "The actions is empty." in ha("grant", "alice", "Topic:a", "Shout", code=1)
        still = "ha: alice still has a Default entry for Group:*: repeat it with --default"
        assert still in ha("revoke", "alice", "Group:*")
        assert "ha: no such entry was found; Custom entries are for Topic:a*" in ha("revoke", "alice", "Topic:a")
        assert still not in ha("revoke", "alice", "Group:*", "--default")
        assert [policy["policyType"] for policy in listed()["alice"]["policies"]] == ["Custom"]

        shown = ha("import", str(tmp_path / "plain_acl.yml"))
        assert "billing: would be created: Normal, 4 policy entries" in shown
        assert "not imported: billing: whiteRemoteAddress '10.0.0.1': every request needs a signature" in shown
        assert "billing" not in listed()
        with monkeypatch.context() as patch:
            patch.setattr(Admin, "update_policies", refuse)
            told = ha("import", str(tmp_path / "plain_acl.yml"), "--yes", code=1)
        assert "billing may be incomplete; before the next import: ha acl delete billing --yes" in told
        ha("delete", "billing", "--yes")
        ha("import", str(tmp_path / "plain_acl.yml"), "--yes")
        entries = [entry for policy in listed()["billing"]["policies"] for entry in policy["entries"]]
        assert [entry["resource"] for entry in entries] == ["Topic:orders", "Group:billing", "Topic:*", "Group:*"]
        assert "billing: exists already" in ha("import", str(tmp_path / "plain_acl.yml"), "--yes")

        assert "dry run" in ha("delete", "alice")
        for more in ((), ("--yes",)):
            assert ha("delete", "nobody", *more, code=2) == "ha: no user nobody; ha acl list shows the users\n"
        ha("delete", "alice", "--yes")
        assert listed().keys() == {"billing", "root"}

"""`ha switch`, and what `ha status` shows of members, against admin ports that answer as the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ha.cli import run
from tests.cli.test_status import MASTER as PLAIN_MASTER
from tests.cli.test_status import admin_port, raw_port

DONE = {"is_done": True, "master_id": 2, "epoch": 8, "seconds": 0.125, "why_not": "", "is_known": True}
REFUSED = {"is_done": False, "master_id": 1, "epoch": 7, "seconds": 2.0, "why_not": "member 2 is not there"}
UNKNOWN = REFUSED | {"why_not": "no answer within 1 s", "is_known": False}


def page(id_: int, **changes: Any) -> dict[str, Any]:
    """The status of member `id_`, whose master is 1."""
    is_master = id_ == 1
    member = {
        "state": "master" if is_master else "following",
        "epoch": 7,
        "master_id": 1,
        "reason": "",
        "state_age_s": 75.0,
        "lease_remaining_s": 1.75,
        "lease_ttl_s": 2.0,
        "agreement_fault": "",
        "sync_state_set": [1, 2, 3],
        "members": [1, 2, 3],
    }
    return {
        "role": "SYNC_MASTER" if is_master else "SLAVE",
        "cluster_name": "c",
        "broker_name": "broker-a",
        "broker_id": id_,
        "is_ready": True,
        "ha_client": {"state": "ready" if is_master else "transfer", "condition": "ok"},
        "ha": {"slaves": [{"identity": "member 2", "state": "transfer", "is_in_sync": True}] if is_master else []},
        "member": {**member, **changes},
    }


@dataclass
class Member:
    """An admin port."""

    page: dict[str, Any]
    answer: dict[str, Any] | str
    address: str = ""
    posts: list[tuple[str, str | None]] = field(default_factory=list)


@contextmanager
def group(*members: Member, code: int = 200) -> Iterator[list[str]]:
    """Serve them; yields their `--admin` flags."""
    with ExitStack() as stack:
        for member in members:
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _handler(member, code)))
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            member.address = f"127.0.0.1:{server.server_port}"
        yield [word for member in members for word in ("--admin", member.address)]


def _handler(member: Member, code: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, member.page)

        def do_POST(self) -> None:
            member.posts.append((self.path, self.headers["Authorization"]))
            self._say(code, member.answer)

        def _say(self, code: int, answer: dict[str, Any] | str) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(answer.encode() if isinstance(answer, str) else json.dumps(answer).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


def test_one_member_is_asked_with_the_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOG_ADMIN_TOKEN", "a-token-of-the-operator")
    first, second = Member(page(1), DONE), Member(page(3), DONE)
    with group(first, second) as flags:
        assert run(["switch", "--to", "2", "--reason", "a new disk", "--wait", "5", *flags]) == 0
    assert first.posts == [("/switch?reason=a+new+disk&wait_s=5.0&to=2", "Bearer a-token-of-the-operator")]
    assert not second.posts
    assert capsys.readouterr().out == "broker-a: member 2 is master, epoch 8, 0.12 s\n"


def test_whoever_has_trouble_with_the_agreement_is_asked_last() -> None:
    first, second = Member(page(1, agreement_fault="no answer"), DONE), Member(page(3), DONE)
    with group(first, second) as flags:
        assert run(["switch", *flags]) == 0
    assert (len(first.posts), [path for path, _ in second.posts]) == (0, ["/switch?reason=ha+switch&wait_s=10.0"])


@pytest.mark.parametrize(("answer", "exit_code"), [(REFUSED, 1), (UNKNOWN, 69)])
def test_why_not(answer: dict[str, Any], exit_code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with group(Member(page(1), answer), code=409) as flags:
        assert run(["switch", "--to", "2", *flags]) == exit_code
        assert run(["switch", "--to", "2", "--json", *flags]) == exit_code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == f"ha: broker-a: {answer['why_not']}; member 1 is master, epoch 7"
    assert json.loads(captured.out) == {"group": "broker-a", "is_known": True} | answer


@pytest.mark.parametrize(
    ("code", "text", "said", "exit_code"),
    [
        (403, "changes are disabled: adminToken is not set\n", "adminToken is not set", 1),
        (401, "adminToken required\n", "requires an adminToken: use --token-file or HALOG_ADMIN_TOKEN", 1),
        (429, "", "Too Many Requests", 1),
        (500, "", "Internal Server Error", 69),
        (200, "{}", "invalid response from the admin port", 69),
        (409, "{}", "invalid response from the admin port", 69),
    ],
)
def test_a_port_that_does_not_do_it(
    code: int, text: str, said: str, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The request was rejected, or its result is unknown."""
    with group(Member(page(1), text), code=code) as flags:
        assert run(["switch", *flags]) == exit_code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "said"),
    [("wrong", "wrong adminToken"), ("", "requires an adminToken: use --token-file or HALOG_ADMIN_TOKEN")],
)
def test_token_that_a_node_does_not_accept(
    token: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes with an adminToken require it for their status, too."""
    monkeypatch.setenv("HALOG_ADMIN_TOKEN", token)
    with raw_port(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n") as address:
        assert run(["switch", "--admin", address, "--admin", "127.0.0.1:1"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"ha: {address}: {said}", "ha: 127.0.0.1:1: not reachable: Connection refused"]


def test_nodes_of_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(PLAIN_MASTER).encode()) as address:
        assert run(["switch", "--admin", address]) == 1
    assert f"{address}: broker-a:0 is not in a failover group: etcdEndpoints is not set" in capsys.readouterr().err
    assert run(["switch", "--admin", "127.0.0.1:1"]) == 69
    assert "no node can be reached (127.0.0.1:1: Connection refused)" in capsys.readouterr().err


def test_members_of_two_groups_are_none_to_choose_from(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Member(page(1), DONE), Member(page(2) | {"broker_name": "broker-b"}, DONE)
    with group(first, second) as flags:
        assert run(["switch", *flags]) == 2
    assert "several groups" in capsys.readouterr().err
    assert not first.posts + second.posts


@pytest.mark.parametrize("words", [["--to", "0"], ["--to", "two"], ["--wait", "0"], ["--wait", "26"]], ids=" ".join)
def test_usage(words: list[str]) -> None:
    assert run(["switch", *words]) == 2


def test_status_shows_where_members_stand(capsys: pytest.CaptureFixture[str]) -> None:
    away = page(3, state="following", reason="", agreement_fault="etcd: no answer", lease_remaining_s=-0.5)
    with group(Member(page(1), DONE), Member(page(2), DONE), Member(away, DONE)) as flags:
        assert run(["status", *flags]) == 0
    rows = {
        line.split()[0]: " ".join(line.split()) for line in capsys.readouterr().out.splitlines() if "1, 2, 3" in line
    }
    assert rows["broker-a:1"] == "broker-a:1 master 1 min 7 1 1, 2, 3 1, 2, 3 1.8 of 2 s"
    assert rows["broker-a:2"] == "broker-a:2 following 1 min 7 1 1, 2, 3 1, 2, 3 1.8 of 2 s"
    assert rows["broker-a:3"] == "broker-a:3 following 1 min 7 1 1, 2, 3 1, 2, 3 expired etcd: no answer"


def test_a_member_that_is_master_is_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """It has a link to a master, too, which it has no use for now."""
    with group(Member(page(1), DONE)) as flags:
        assert run(["status", *flags]) == 0
    out = capsys.readouterr().out
    [row] = [line.split() for line in out.splitlines() if line.startswith(" member 2 ")]
    assert row[2] == "broker-a:1"
    assert "no master" not in out

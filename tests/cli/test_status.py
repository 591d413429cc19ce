"""`ha status` against admin ports that answer as the test says."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ha.cli import run
from ha.cli.admin_pages import NodeStatus, Page
from ha.cli.flow import Flow
from ha.cli.node_pages import NodePages
from ha.cli.status import nodes_table, show_status, slaves_table

MASTER = {
    "role": "SYNC_MASTER",
    "broker_name": "broker-a",
    "broker_id": 0,
    "is_ready": True,
    "uptime_s": 3700.5,
    "addresses": {"remoting": "127.0.0.1:10911", "embedded_name_server": None},
    "commitlog": {
        "min_offset": 0,
        "max_offset": 5_000_000,
        "flushed_offset": 4_999_000,
        "dispatched_offset": 5_000_000,
    },
    "ha": {
        "waiting_request_count": 12,
        "explanation": "",
        "slaves": [
            {
                "identity": "10.0.0.2",
                "state": "transfer",
                "ack_offset": 4_999_900,
                "lag_bytes": 100,
                "is_in_sync": True,
            },
            {"identity": "10.0.0.3", "state": "out_of_range", "why_not_in_sync": "it requests offset 7"},
        ],
    },
    "ha_client": None,
    "events": [{"time_s": 1.5, "level": "WARNING", "logger": "ha.x", "text": "disk_slow [red]x"}],
    "something_new": {"nobody": "reads"},
}
SLAVE = {
    "role": "SLAVE",
    "broker_name": "broker-a",
    "broker_id": 1,
    "is_ready": False,
    "not_ready_reason": "not connected to its master",
    "ha_client": {
        "state": "ready",
        "condition": "connect_failed",
        "detail": "Connection refused",
        "master_address": "h:1",
    },
}


@contextmanager
def admin_port(
    body: bytes,
    *,
    moved_to: str = "",
    tokens: list[str | None] | None = None,
    tls: ssl.SSLContext | None = None,
    date: str = "",
) -> Iterator[str]:
    """An HTTP server that answers /status with `body`, or says that it has moved; `tokens` are what it is shown."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if tokens is not None:
                tokens.append(self.headers["Authorization"])
            self.send_response((302 if moved_to else 200) if self.path == "/status" else 404)
            if moved_to:
                self.send_header("Location", f"http://{moved_to}/status")
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string(timestamp)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("year", ["x", "99999999999999", "99999999999999999999"])
def test_a_node_with_a_date_that_makes_no_sense(year: str, capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER).encode(), date=f"Mon, 01 Jan {year} 00:00:00 GMT") as address:
        assert run(["status", "--admin", address, "--timeout", "1"]) == 0
    assert "broker-a:0" in capsys.readouterr().out


def test_nodes_that_change_places_between_two_samples(capsys: pytest.CaptureFixture[str]) -> None:
    """They are listed by broker ID, which a failover changes. What one reports is not shown as the other's."""
    damage = {"log": {"open_count": 1, "open": [{"begin": 1, "end": 2, "file": "0"}]}}
    master = msgspec.convert(MASTER, NodeStatus)
    slave = msgspec.convert(SLAVE | {"broker_id": 2, "damage": damage}, NodeStatus)
    pages = {node.name: Page(b"", node, None) for node in (master, slave)}
    orders = [pages, dict(reversed(pages.items()))]
    show_status(lambda: NodePages(orders.pop(0), {}, {}), sample=0.01)
    out = capsys.readouterr().out
    assert not orders
    assert "broker-a:2 DAMAGED" in out


def test_a_master_and_its_slaves(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER).encode()) as address:
        assert run(["status", "--admin", address, "--events", "1"]) == 0
    out = capsys.readouterr().out
    for shown in ("broker-a:0", "SYNC_MASTER", "127.0.0.1:10911", "5,000,000", " 1,000 ", "1 h 1 min"):
        assert shown in out
    assert "broker-a:0: 12 sends are waiting for a slave" in out
    assert "no: it requests offset 7" in " ".join(out.split())
    assert "WARNING disk_slow [red]x" in out


def test_a_slave_that_is_behind_is_looked_at_twice(capsys: pytest.CaptureFixture[str]) -> None:
    slave = {"identity": "s", "state": "transfer", "ack_offset": 1_000, "lag_bytes": 4_000, "last_report_age_s": 0.25}
    page = dict(MASTER) | {"commitlog": {"max_offset": 5_000}, "ha": {"slaves": [slave]}}
    asked: list[str | None] = []
    with admin_port(json.dumps(page).encode(), tokens=asked) as address:
        assert run(["status", "--admin", address, "--sample", "0.1"]) == 0
    assert len(asked) == 2
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" s ")]
    assert row[1:] == ["broker-a:0", "transfer", "1,000", "4,000", "?", "0.0", "–", "0.2", "s", "ago", "no:"]


def test_the_members_of_all_groups_are_rows_of_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    pages: list[dict[str, Any]] = [
        MASTER,
        SLAVE | {"is_ready": True, "commitlog": {"max_offset": 4_999_000}},
        MASTER | {"broker_name": "broker-b", "commitlog": {"max_offset": 700}, "ha": {}},
        SLAVE | {"is_ready": True, "broker_name": "broker-b", "commitlog": {"max_offset": 700}},
        SLAVE | {"is_ready": True, "broker_name": "broker-c"},
    ]
    with ExitStack() as stack:
        admins = [stack.enter_context(admin_port(json.dumps(page).encode())) for page in pages]
        assert run(["status", "--sample", "0", *(word for admin in admins for word in ("--admin", admin))]) == 0
    head, *lines = capsys.readouterr().out.splitlines()

    def column(name: str) -> list[str]:
        return [line[head.index(name) :].split("  ")[0] for line in lines[: len(pages)]]

    assert column("node") == ["broker-a:0", "broker-a:1", "broker-b:0", "broker-b:1", "broker-c:1"]
    assert column("in sync") == ["1 of 2", "–", "–", "–", "–"]
    assert column("behind") == ["–", "1,000", "–", "0", "–"]  # the master of broker-c is not shown
    rows = [line.split() for line in lines]
    assert [row[:2] for row in rows if "transfer" in row] == [["10.0.0.2", "broker-a:0"]]
    assert [row[:2] for row in rows if "out_of_range" in row] == [["10.0.0.3", "broker-a:0"]]


def test_a_slave_that_is_not_ready_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER).encode()) as master, admin_port(json.dumps(SLAVE).encode()) as slave:
        assert run(["status", "--admin", master, "--admin", slave]) == 4
    out = capsys.readouterr().out
    assert "broker-a:1 is not ready: not connected to its master" in out
    assert "broker-a:1 ← h:1: ready (Connection refused)" in out


@pytest.mark.parametrize(
    "told",
    [
        {"name_servers": [{"address": "h:1"}, {"address": "h:2", "other_address": "10.0.0.9:10911"}]},
        {"member": {"state": "following", "id_taken_by": "10.0.0.9:10911"}},
    ],
    ids=["pair", "member"],
)
def test_a_node_that_is_not_the_only_one_of_its_id(told: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER | told).encode()) as address:
        assert run(["status", "--admin", address]) == 0
    assert "broker-a:0: another broker has the same name and ID: 10.0.0.9:10911" in capsys.readouterr().out


def test_json_is_what_the_nodes_say(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    with admin_port(json.dumps(MASTER).encode()) as master, admin_port(json.dumps(SLAVE).encode()) as slave:
        assert run(["status", "--json", "--admin", master, "--admin", slave]) == 4
        assert json.loads(capsysbinary.readouterr().out) == {master: MASTER, slave: SLAVE}


NO_NODE = (
    "ha: no node can be reached (127.0.0.1:1: Connection refused); start a node (ha master), or use --servers or "
    "--admin HOST:PORT\n"
)


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--admin", "127.0.0.1:1"]) == 69
    assert capsys.readouterr().err == NO_NODE


def test_one_of_two_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER).encode()) as address:
        assert run(["status", "--admin", address, "--admin", "127.0.0.1:1"]) == 69
    captured = capsys.readouterr()
    assert "broker-a:0" in captured.out
    assert "127.0.0.1:1" in captured.err


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"[]",
        b"{}",
        b'{"role": 5}',
        b"\xff" * 10,
        pytest.param(b'{"x":' + b"[" * 9000, id="deep"),
        json.dumps(MASTER | {"timers": {"pending_count": 1, "next_due_ms": 10**30}}).encode(),
        json.dumps(MASTER | {"timers": {"pending_count": 1, "next_due_ms": -(10**30)}}).encode(),
        json.dumps(MASTER | {"tls": {"credentials": {"x": {"is_expiring": True, "expires_at_ms": 10**30}}}}).encode(),
        json.dumps(MASTER | {"commitlog": {"max_offset": 10**400}}).encode(),
    ],
)
def test_somebody_else_on_the_port(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(body) as address:
        assert run(["status", "--admin", address]) == 69
    assert "invalid status page" in capsys.readouterr().err


@contextmanager
def raw_port(answer: bytes) -> Iterator[str]:
    """A server that answers each connection with these bytes, and closes it with an error."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 520 Whatever\r\nContent-Length: 0\r\n\r\n", "HTTP error: 520"),
        (b"HTTP/1.1 404 Whatever\r\nContent-Length: 0\r\n\r\n", "HTTP error: Not Found"),
        (b"HTTP/1.1 404 Whatever\r\nContent-Length: 5\r\n\r\n12", "Connection reset by peer"),
        (b"HTTP/1.1 404 Whatever\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not an admin port: IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12", "Connection reset by peer"),
    ],
)
@pytest.mark.parametrize("command", ["status", "switch"])
def test_errors_of_http(command: str, answer: bytes, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with raw_port(answer) as address:
        assert run([command, "--admin", address]) == 69
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["status", "--events", "1"], ["status", "--json"], ["top", "--once", "--interval", "0.1"]]
)
def test_a_nodes_text_does_not_control_the_terminal(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page: dict[str, Any] = hostile(MASTER) | {"uptime_s": 1.0}
    page["ha"]["slaves"][0]["is_in_sync"] = False
    damaged = {"begin": 0, "end": 1, "file": "x", "reason": "x", "found_by": "x", "heal_trouble": "x"}
    page["damage"] = {"log": {"open_count": 1, "open": [hostile(damaged)]}}
    held = {"certificate": "x", "is_expiring": True, "expires_at_ms": 1, "error": "x"}
    page["tls"] = {"credentials": {f"server{EVIL}": hostile(held)}}
    page["timers"] = {"pending_count": 1, "due_counts": {EVIL: 1}}
    page["not_ready_reason"] = EVIL
    slave = hostile(SLAVE) | {"role": "SLAVE", "member": {"state": EVIL, "reason": EVIL, "id_taken_by": EVIL}}
    with admin_port(json.dumps(page).encode()) as master, admin_port(json.dumps(slave).encode()) as other:
        run([*command, "--admin", master, "--admin", other])
    captured = capsys.readouterr()
    assert "\\u001b" in captured.out
    assert not set("\x1b\x07\x9b") & set(captured.out + captured.err)


EVIL = "x\x1b[2J\x07\x9b2J"


def hostile(page: Any) -> Any:
    """The same with control characters in each text."""
    match page:
        case dict():
            return {key: hostile(value) for key, value in page.items()}
        case list():
            return [hostile(value) for value in page]
        case str():
            return page + EVIL
    return page


def test_the_token_is_for_the_address_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for wherever that one points."""
    monkeypatch.setenv("HALOG_ADMIN_TOKEN", "a-token-of-the-operator")
    named: list[str | None] = []
    elsewhere: list[str | None] = []
    with (
        admin_port(json.dumps(MASTER).encode(), tokens=elsewhere) as other,
        admin_port(b"", moved_to=other, tokens=named) as address,
    ):
        assert run(["status", "--admin", address, "--sample", "0"]) == 0
    assert named == ["Bearer a-token-of-the-operator"]
    assert elsewhere == [None]


def test_a_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not reach a node on loopback, and the token is not for it."""
    tokens: list[str | None] = []
    monkeypatch.setenv("HALOG_ADMIN_TOKEN", "secret")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with admin_port(b"", tokens=tokens) as proxy, admin_port(json.dumps(MASTER).encode()) as address:
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        assert run(["status", "--json", "--admin", address]) == 0
    assert tokens == []


def test_a_token_can_have_any_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOG_ADMIN_TOKEN", "a-tökén-жизнь-for-us")
    tokens: list[str | None] = []
    with admin_port(json.dumps(MASTER).encode(), tokens=tokens) as address:
        assert run(["status", "--json", "--admin", address]) == 0
    [token] = tokens
    assert token is not None
    assert token.encode("latin-1") == "Bearer a-tökén-жизнь-for-us".encode()


@pytest.mark.parametrize(
    ("words", "says"), [(["--admin", "here"], "host:port"), (["--events", "-1"], "--events must not be negative")]
)
def test_usage_error(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", *words]) == 2
    assert says in capsys.readouterr().err


def test_damage_is_shown_with_what_to_do_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    page: dict[str, Any] = dict(MASTER)
    page["damage"] = {
        "log": {
            "found_count": 3,
            "healed_count": 2,
            "open_count": 1,
            "open_bytes": 32768,
            "open": [
                {
                    "begin": 65536,
                    "end": 98304,
                    "file": "00000000000000000000",
                    "reason": "the bytes don't have the checksum that they had when they were written",
                    "found_by": "scrub",
                    "heal_trouble": "no peer is known: on a master set healFrom to a slave's HA port",
                }
            ],
        },
        "scrub": {"queue_entries_mended_count": 7},
    }
    with admin_port(json.dumps(page).encode()) as address:
        assert run(["status", "--admin", address]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "DAMAGED: commitlog 00000000000000000000, offsets 65,536 to 98,304 (found by scrub:" in shown
    assert "repair failed: no peer is known: on a master set healFrom" in shown
    assert "repaired since start: 2 log ranges, 7 queue entries" in shown


def test_pending_timer_messages_are_shown_with_when_they_are_due(capsys: pytest.CaptureFixture[str]) -> None:
    page: dict[str, Any] = dict(MASTER)
    due_counts = {"1h": 1200, "24h": 34, "7d": 0, "later": 0}
    page["timers"] = {"pending_count": 1234, "next_due_ms": 1_741_503_901_250, "due_counts": due_counts}
    with admin_port(json.dumps(page).encode()) as address:
        assert run(["status", "--admin", address]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1,234 timer messages are pending, the next from 2025-03-09 07:05:01 UTC on (1h: 1,200, 24h: 34)" in shown


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"degraded_reason": ""}, ""),
        ({"degraded_reason": "nothing can be stored: the disk is full"}, "nothing can be stored: the disk is full"),
        (
            {"is_ready": False, "degraded_reason": "the node is not ready: it starts"},
            "the node is not ready: it starts",
        ),
    ],
)
def test_check_fails_if_sends_are_degraded(
    changes: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with admin_port(json.dumps(MASTER | changes).encode()) as address:
        assert run(["status", "--check", "--sample", "0", "--admin", address]) == (1 if reason else 0)
        assert capsys.readouterr().err == (f"ha: sends to broker-a:0 are degraded: {reason}\n" if reason else "")
        assert run(["status", "--sample", "0", "--admin", address]) == (4 if "is_ready" in changes else 0)


def test_check_fails_for_a_master_of_a_version_that_does_not_report_it(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER).encode()) as address:
        assert run(["status", "--check", "--sample", "0", "--admin", address]) == 1
    said = "ha: can't tell whether sends to broker-a:0 are degraded: its version does not report it\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("reported", [{}, {"degraded_reason": ""}], ids=["older version", "this version"])
def test_check_ignores_slaves_but_not_nodes_that_are_gone(reported: dict[str, str]) -> None:
    with admin_port(json.dumps(SLAVE | {"is_ready": True} | reported).encode()) as slave:
        assert run(["status", "--check", "--admin", slave]) == 0
        assert run(["status", "--check", "--admin", slave, "--admin", "127.0.0.1:1"]) == 69


def test_nothing_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Not from long names, nor in `ha top` on a terminal of 80 columns."""
    page = MASTER | {"broker_name": "b" * 127, "addresses": {"remoting": "h" * 200 + ":10911"}}
    with admin_port(json.dumps(page).encode()) as address:
        assert run(["status", "--admin", address]) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if " SYNC_MASTER " in line]
    assert row[:3] == ["b" * 127 + ":0", "SYNC_MASTER", "h" * 200 + ":10911"]
    flows = Flow().add(0.0, [msgspec.convert(MASTER, NodeStatus)])
    shown = StringIO()
    console = Console(file=shown, width=80)
    console.print(nodes_table(flows))
    console.print(slaves_table(flows))
    assert "…" not in shown.getvalue()

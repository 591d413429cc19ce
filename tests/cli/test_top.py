"""`ha top` in a terminal and without one, and what it computes."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from typing import Any

import msgspec
import pytest

from ha.cli import run
from ha.cli.admin_pages import MasterSide, NodeStatus, Slave
from ha.cli.exits import UsageError
from ha.cli.flow import Flow, SlaveFlow
from ha.cli.node_pages import NodePages
from ha.cli.top import _watch
from tests.cli.test_status import MASTER, SLAVE, admin_port


def master(max_offset: int, **acks: int) -> NodeStatus:
    slaves = [
        {"identity": name, "ack_offset": ack, "lag_bytes": max_offset - ack, "is_in_sync": True}
        for name, ack in acks.items()
    ]
    told = {"role": "SYNC_MASTER", "broker_name": "b", "broker_id": 0, "is_ready": True}
    told |= {"commitlog": {"max_offset": max_offset}, "ha": {"slaves": slaves}}
    return msgspec.convert(told, NodeStatus)


def slave_of(flow: Flow, at_s: float, node: NodeStatus) -> SlaveFlow:
    [found] = flow.add(at_s, [node])
    return found.slaves[0]


def test_lag_in_seconds_is_the_age_of_the_first_byte_that_is_missing() -> None:
    flow = Flow()
    assert slave_of(flow, 0, master(1000, a=1000)).lag_s == 0
    found = slave_of(flow, 2, master(3000, a=2000))
    assert (found.lag_s, found.ack_bytes_per_s) == (1, 500)  # byte 2000 was written at 1 s
    assert found.eta_s is None  # it falls behind further
    found = slave_of(flow, 3, master(3000, a=2500))
    assert found.lag_s == 1.5
    found = slave_of(flow, 4, master(3000, a=3000))
    assert (found.lag_s, found.eta_s) == (0, 0)


def test_beyond_what_was_seen_lag_is_told_by_the_rate() -> None:
    flow = Flow()
    assert slave_of(flow, 0, master(10_000, a=1000)).lag_s is None
    found = slave_of(flow, 1, master(11_000, a=6000))
    assert found.lag_s == 5
    assert found.eta_s == 5000 / (5000 - 1000)


def test_the_rate_of_a_slave_begins_with_its_connection() -> None:
    flow = Flow()
    for at_s, ack, rate in (
        (0, 9000, None),
        (1, 9500, 500),
        (2, -1, None),  # connected again, and has not acknowledged anything
        (3, 9600, None),
        (4, 9700, 100),
        (5, 0, None),  # copies the log from its beginning
        (6, 2000, 2000),
    ):
        found = slave_of(flow, at_s, master(10_000, a=ack))
        assert (found.ack_bytes_per_s, found.eta_s) == (rate, rate and (10_000 - ack) / rate), at_s


def test_a_slave_can_be_ahead_of_the_log_end_that_was_read_before_it() -> None:
    """A remoting port reports both in separate responses."""
    flow = Flow()
    slave_of(flow, 0, master(1000, a=1000))
    seen = master(2000)
    behind = Slave(identity="a", ack_offset=2500, lag_bytes=500, is_in_sync=True)
    found = slave_of(flow, 1, msgspec.structs.replace(seen, ha=MasterSide(slaves=[behind])))
    assert (found.lag_bytes, found.lag_s) == (500, 0)


@pytest.mark.parametrize(
    ("condition", "detail", "shown"),
    [
        ("no_master", "no master address is known yet", "transfer (no data yet)"),
        ("connected", "from offset 0", "transfer (from offset 0)"),
        ("out_of_range", "the master's log begins at 9", "transfer (the master's log begins at 9)"),
    ],
)
def test_an_open_link_is_not_described_by_the_end_of_the_last_one(condition: str, detail: str, shown: str) -> None:
    link = {"state": "transfer", "condition": condition, "detail": detail}
    told = {"role": "SLAVE", "broker_name": "b", "broker_id": 1, "is_ready": True, "ha_client": link}
    [found] = Flow().add(0, [msgspec.convert(told, NodeStatus)])
    assert found.link == shown


def test_a_log_that_was_made_anew_begins_anew() -> None:
    flow = Flow()
    flow.add(0, [master(10_000, a=9000)])
    [found] = flow.add(1, [master(100, a=100)])
    assert found.written_bytes_per_s is None


def test_once_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER).encode()) as one, admin_port(json.dumps(SLAVE).encode()) as other:
        words = ["top", "--once", "--json", "--interval", "0.1", "--admin", one, "--admin", other]
        assert run(words) == 4
        shown: Any = json.loads(capsys.readouterr().out)
    first, second = shown["nodes"]
    assert (first["name"], first["written_bytes_per_s"], first["waiting_sends"]) == ("broker-a:0", 0, 12)
    assert [slave["counts"] for slave in first["slaves"]] == [True, False]
    assert first["slaves"][1]["why_not"] == "it requests offset 7"
    assert (second["link"], second["is_ready"]) == ("ready (Connection refused)", False)


def test_once_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_port(json.dumps(MASTER).encode()) as address:
        assert run(["top", "--once", "--interval", "0.1", "--admin", address]) == 0
        assert run(["top", "--once", "--interval", "0.1", "--admin", address, "--admin", "127.0.0.1:1"]) == 69
    captured = capsys.readouterr()
    assert "broker-a:0" in captured.out
    assert "no: it requests offset 7" in " ".join(captured.out.split())
    assert "127.0.0.1:1: not reachable" in captured.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "requires a terminal"),
        (["--json"], "--json requires --once"),
        (["--interval", "0"], "--interval must be from"),
        (["--once", "--admin", "here"], "host:port"),
    ],
)
def test_usage_errors(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_view_that_can_not_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would show old figures as current ones."""
    answers = iter([NodePages({}, {}, {"127.0.0.1:1": "refused"})])

    def fetch() -> NodePages:
        if (answer := next(answers, None)) is None:
            raise UsageError("--token-file: no such file")
        return answer

    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        with pytest.raises(UsageError, match="no such file"):
            _watch(fetch, 0.01)


@pytest.mark.processes
@pytest.mark.parametrize("way", ["q", "Ctrl-C", "SIGTERM"])
def test_in_a_terminal_it_shows_the_nodes_until_it_is_ended(way: str) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with admin_port(json.dumps(MASTER).encode()) as address:
        command = [sys.executable, "-m", "ha.cli", "top", "--interval", "0.2", "--admin", address]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
            os.close(theirs)
            shown = b""
            while shown.count(b"broker-a:0") < 3:
                shown += os.read(ours, 65536)
            if way == "q":
                os.write(ours, b"q")
            elif way == "Ctrl-C":
                process.send_signal(signal.SIGINT)
            else:
                process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            # Its last output has to go somewhere, or it waits for the terminal.
            rest = shown
            while True:
                try:
                    chunk = os.read(ours, 65536)
                except OSError:
                    break
                if not chunk:
                    break
                rest += chunk
            errors = process.stderr.read()
            code = process.wait(30)
    after = termios.tcgetattr(ours)
    os.close(ours)
    assert b"Traceback" not in errors
    assert code == (128 + signal.SIGTERM if way == "SIGTERM" else 0), errors
    assert after == before
    assert b"\x1b[?1049l" in rest  # the normal screen

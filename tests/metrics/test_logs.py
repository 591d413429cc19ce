"""Log lines as JSON with the fields that they have, and levels that change while a node runs."""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ha.admin.logs import LEVELS
from ha.json_log import JsonFormatter
from ha.node import open_node
from tests.metrics.nodes import ask, settings


def formatted(message: str, *arguments: object, level: int = logging.INFO, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord("ha.somewhere", level, "", 0, message, arguments, more.get("exc_info"))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    ("message", "arguments", "fields"),
    [
        (
            "ha.slave_disconnected peer=%s identity=%s reason=%s ack=%d end=%d%s",
            ("10.0.0.2:5", "10.0.0.2", "slave_closed", 7, 9, " detail='x'"),
            {
                "event": "ha.slave_disconnected",
                "peer": "10.0.0.2:5",
                "identity": "10.0.0.2",
                "reason": "slave_closed",
                "ack": 7,
                "end": "9 detail='x'",
            },
        ),
        (
            "remoting.connection_closed peer=%s:%d cause=%r detail=%r times=%d",
            ("1.2.3.4", 80, "end of stream", "it's over", 1),
            {
                "event": "remoting.connection_closed",
                "peer": "1.2.3.4:80",
                "cause": "end of stream",
                "detail": "it's over",
                "times": 1,
            },
        ),
        (
            "ha.client_%s master=%s detail=%s",
            ("connected", None, "all is well = fine"),
            {"event": "ha.client_connected", "master": None, "detail": "all is well = fine"},
        ),
        (
            'process.shutdown_timed_out timeout_s=%g hint="the next start recovers"',
            (2.5,),
            {"event": "process.shutdown_timed_out", "timeout_s": 2.5, "hint": "the next start recovers"},
        ),
        (
            'node.plaintext_port port=%s hint="set %s=enforcing" other="%s" last=%d',
            ("ha", "haTls", "two words", 3),
            {
                "event": "node.plaintext_port",
                "port": "ha",
                "hint": "set haTls=enforcing",
                "other": "two words",
                "last": 3,
            },
        ),
        (
            "admin.request_refused method=%.4r share=100%%",
            ("DELETE",),
            {"event": "admin.request_refused", "method": "DELE", "share": "100%"},
        ),
        (
            "a level=%s time=%s logger=%s message=%s event=%s exception=%s",
            (1, 2, 3, 4, 5, 6),
            {"event": "a", "level_": 1, "time_": 2, "logger_": 3, "message_": 4, "event_": 5, "exception_": 6},
        ),
        ("process.stopped", (), {"event": "process.stopped"}),
        ("retrying share=95% failed", (), {"event": "retrying", "share": "95% failed"}),
        ("is_full=%s", (True,), {}),
        ("HTTP Request: %s %s", ("GET", "/"), {}),
        ("%s", ("anything",), {"event": "anything"}),
        ("", (), {}),
    ],
)
def test_fields_are_the_arguments(message: str, arguments: tuple[object, ...], fields: dict[str, object]) -> None:
    found = formatted(message, *arguments)
    text = message % arguments if arguments else message
    assert {key: found.pop(key) for key in ("level", "logger", "message")} == {
        "level": "INFO",
        "logger": "ha.somewhere",
        "message": text,
    }
    assert found.pop("time").endswith("Z")
    assert found == fields


def test_an_exception_and_what_is_no_text() -> None:
    try:
        raise ValueError("no\nsuch thing")
    except ValueError:
        found = formatted("failed at=%s", object, exc_info=sys.exc_info())
    assert found["at"] == "<class 'object'>"
    assert found["exception"].endswith("ValueError: no\nsuch thing")
    assert formatted("said text=%s", "\udcff line\n break")["text"] == "\udcff line\n break"


def test_a_message_that_is_no_text() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, {"not": "text"}, None, None)
    assert "event" not in json.loads(JsonFormatter().format(record))


@pytest.mark.processes
@pytest.mark.parametrize("given", [["--log-format", "json"], ["--set", "logFormat=json"]])
def test_a_process_logs_json(given: list[str]) -> None:
    command = [sys.executable, "-m", "ha.namesrv", "--set", "listenPort=0", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("READY")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    lines = [json.loads(line) for line in said.splitlines()]
    assert [(line["event"], line.get("signal")) for line in lines] == [
        ("process.stopping", "SIGTERM"),
        ("process.stopped", None),
    ]


@pytest.fixture
def levels_restored() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in ("", "ha", "ha.replication.connection")}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


async def test_levels_change_while_a_node_runs(tmp_path: Path, levels_restored: None) -> None:
    token = "Authorization: Bearer sixteen letters!!"
    one = "/log-level?logger=ha.replication.connection&level="
    async with open_node(settings(tmp_path, "ASYNC_MASTER", "adminToken=sixteen letters!!")) as node:
        address = node.admin_address
        assert (await ask(address, one + "debug", method="POST"))[0] == 401
        status, _, body = await ask(address, one + "debug", token, method="POST")
        assert status == 200
        found = json.loads(body)
        assert found["ha.replication.connection"] == {"level": "DEBUG", "effective": "DEBUG"}
        assert logging.getLogger("ha.replication.connection").isEnabledFor(logging.DEBUG)
        assert json.loads((await ask(address, "/log-level", token))[2]) == found
        await ask(address, "/log-level?logger=ha&level=ERROR", token, method="POST")
        found = json.loads((await ask(address, one + "UNSET", token, method="POST"))[2])
        assert found["ha.replication.connection"] == {"level": "UNSET", "effective": "ERROR"}
        for path in (
            "/log-level?logger=nobody&level=INFO",
            one + "LOUD",
            "/log-level?logger=&level=UNSET",
            "/log-level",
        ):
            status, _, body = await ask(address, path, token, method="POST")
            assert status == 400, path
            assert body.count("\n") == 1
    assert "nobody" not in logging.root.manager.loggerDict
    assert {entry["effective"] for entry in found.values()} <= set(LEVELS)


async def test_nothing_can_be_set_without_a_token(tmp_path: Path) -> None:
    async with open_node(settings(tmp_path, "ASYNC_MASTER")) as node:
        assert (await ask(node.admin_address, "/log-level?logger=ha&level=DEBUG", method="POST"))[0] == 403
        assert (await ask(node.admin_address, "/log-level"))[0] == 200

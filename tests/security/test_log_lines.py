"""Values from peers never break a log record into several lines, or forge one."""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trio
import trio.testing

from ha.acl import AclPolicy
from ha.admin import AdminKey, AdminView, RecentEvents, open_admin
from ha.broker.options import BrokerRole
from ha.broker.slave_sync import SlaveSync
from ha.protocol.acl import ACCESS_KEY
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import BoundPort
from ha.text_log import TextFormatter, escape
from tests.broker.node import SEND_V2, Node, open_node, text
from tests.broker.test_headers import HEADERS
from tests.fuzz.broker import ADMIN_CODES, ADMIN_FIELDS
from tests.namesrv.brokers import open_site, register

FORGED = "2026-01-01T00:00:00.000Z ERROR ha.forged all_is_lost"
EVIL = f"x\r\n{FORGED}\n\x1b[2K\x00\x07\x7f\x85\u2028\u2029\x0b\x0c\u202e\tx"
"""Every character that a terminal, a pager or `str.splitlines` treats as the end of a line, or that moves a cursor"""


class Lines(logging.Handler):
    """Formats records like a process."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(TextFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def check(self) -> list[str]:
        """Checks that each record is one line; returns the events that contain the sent value, escaped."""
        for line in self.lines:
            assert len(line.splitlines()) == 1, line
            assert line.isprintable(), line
        return [line.split()[3] for line in self.lines if FORGED in line]


@pytest.fixture
def lines() -> Iterator[Lines]:
    found, logger = Lines(), logging.getLogger("ha")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(found)
    yield found
    logger.removeHandler(found)
    logger.setLevel(before)


def formatted(message: str, *arguments: object, **more: Any) -> str:
    record = logging.LogRecord("ha.somewhere", logging.INFO, "", 0, message, arguments, more.get("exc_info"))
    record.created, record.msecs = 1_767_225_600.25, 250.0
    return TextFormatter().format(record)


def test_line_has_time_level_logger_and_text() -> None:
    assert formatted("an_event of=%s", "飛 ü") == "2026-01-01T00:00:00.250Z INFO ha.somewhere an_event of=飛 ü"


@pytest.mark.parametrize("conversion", ["%s", "%r", "%.200s", "%s %s"])
def test_values_never_break_a_line(conversion: str) -> None:
    line = formatted(f"an_event value={conversion}", *([EVIL] * conversion.count("%")))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert FORGED in line


def test_every_control_character_is_escaped() -> None:
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0xFEFF, 0xD800):
        assert escape(f"a{chr(code)}b").isprintable()
    assert escape("a\nb\x1bc\u2028d\x85") == r"a\nb\x1bc\u2028d\x85"
    assert escape("a b/ü飛\\") == "a b/ü飛\\"


def test_traceback_lines_can_not_be_mistaken_for_records() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        text = formatted("a_bug", exc_info=sys.exc_info())
    first, *rest = text.splitlines()
    assert first.endswith(" a_bug")
    assert rest
    assert all(line.startswith("\t") and line[1:].isprintable() for line in rest)
    assert any(FORGED in line for line in rest)


def test_event_on_the_status_page_is_one_line() -> None:
    with RecentEvents().kept("ha.somewhere") as events:
        logging.getLogger("ha.somewhere").warning("an_event value=%s", EVIL)
    [event] = events.newest_first()
    assert event.text.isprintable()
    assert FORGED in event.text


# ---- from the network


async def test_requests_to_a_broker(tmp_path: Path, autojump_clock: object, lines: Lines) -> None:
    """Each name of each request, in header or body."""
    asked: dict[int, Mapping[str, object]] = dict(HEADERS)
    for code in ADMIN_CODES:
        asked.setdefault(code, ADMIN_FIELDS)
    async with open_node(tmp_path, channel_expired_s=60.0) as node:
        await node.send()
        for code, fields in asked.items():
            for name in [*fields, "unknown"]:
                evil = {key: text(value) for key, value in fields.items()} | {name: EVIL, "suspendTimeoutMillis": "1"}
                await ask(node, code, evil)
        names = ("KEYS", "UNIQ_KEY", "PGROUP", "REAL_TOPIC", "DELAY")
        properties = "".join(f"{name}\x01{EVIL}\x02" for name in names)
        await ask(node, 310, {key: text(value) for key, value in SEND_V2.items()} | {"i": properties})
        heartbeat = {
            "clientID": EVIL,
            "producerDataSet": [{"groupName": EVIL}],
            "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": EVIL, "subString": EVIL}]}],
        }
        await ask(node, 34, {}, json.dumps(heartbeat).encode())
        await ask(node, 34, {}, EVIL.encode())
        await ask(node, 25, {}, f"brokerName={EVIL}".encode())
        await node.dispatched()
        await trio.sleep(300)
    assert "clients.member_expired" in lines.check()


async def ask(node: Node, code: int, fields: dict[str, str], body: bytes = b"body") -> None:
    await node.client.invoke(node.address, RemotingCommand(code, ext_fields=fields, body=body, version=479), 60)


async def test_unauthenticated_requests(tmp_path: Path, autojump_clock: object, lines: Lines) -> None:
    async with open_node(tmp_path, acl_policy=AclPolicy()) as node:
        for number, name in enumerate("abci"):
            fields = {key: text(value) for key, value in SEND_V2.items()} | {name: EVIL, ACCESS_KEY: f"{EVIL}{number}"}
            await ask(node, 310, fields)
    assert "acl.refused" in lines.check()


async def test_requests_to_a_name_server(lines: Lines) -> None:
    async with open_site() as site:
        peer = site.connect()
        for request in (
            register(name=EVIL),
            register(address=EVIL),
            register(cluster=EVIL),
            register(ha=EVIL),
            register([EVIL]),
        ):
            await peer.ask(request)
        for code in (103, 104, 105, 106, 205, 206, 216, 217, 224, 304, 318, 327):
            for name in ("brokerName", "brokerAddr", "clusterName", "topic", "cluster", "namespace", "key", "value"):
                fields = {"brokerId": "0", "haServerAddr": "h:1", "brokerName": "b0", "brokerAddr": "h:2"}
                fields |= {"clusterName": "C", "topic": "T", "cluster": "C"}
                await peer.ask(RemotingCommand(code, ext_fields=fields | {name: EVIL}, version=479))
        named = {"brokerName": EVIL, "brokerAddr": "h:3", "clusterName": EVIL, "topic": EVIL}
        await peer.ask(register([EVIL, "T"], name=EVIL, address="h:3", cluster=EVIL))
        for code in (205, 216, 104):
            await peer.ask(RemotingCommand(code, ext_fields=named | {"brokerId": "0"}))
        await trio.aclose_forcefully(peer.stream)
        await trio.testing.wait_all_tasks_blocked()
    assert {
        "namesrv.broker_registered",
        "namesrv.broker_unregistered",
        "namesrv.write_permission_changed",
        "namesrv.topic_deleted",
    } <= set(lines.check())


class FalseMaster:
    """Answers a slave's requests to its master."""

    def __init__(self, answer: RemotingCommand) -> None:
        self._answer = answer

    async def invoke(self, address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        return self._answer


@pytest.mark.parametrize(
    "answer",
    [
        RemotingCommand(ResponseCode.SYSTEM_ERROR, remark=EVIL),
        RemotingCommand(ResponseCode.SUCCESS, body=EVIL.encode()),
        RemotingCommand(
            ResponseCode.SUCCESS,
            body=json.dumps(
                {
                    "dataVersion": {"counter": 9, "stateVersion": 0, "timestamp": 1},
                    "topicConfigTable": {EVIL * 9: {"topicName": EVIL}},
                    "subscriptionGroupTable": {EVIL * 9: {"groupName": EVIL}},
                    "offsetTable": {},
                }
            ).encode(),
        ),
    ],
    ids=["remark", "body", "tables"],
)
async def test_answers_of_a_false_master(tmp_path: Path, answer: RemotingCommand, lines: Lines) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as slave:
        master: Any = FalseMaster(answer)
        await SlaveSync(master, lambda: EVIL, slave.broker.tables, slave.broker.options).sync_once()
    assert {"slave_sync.failed", "slave_sync.name_refused"} & set(lines.check())


async def test_requests_to_the_admin_port(lines: Lines) -> None:
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        view = AdminView(status=dict, not_ready=lambda: "")
        async with open_admin(view, port.listen(), key=AdminKey("a token")):
            for evil in (
                f"GET /{quote(EVIL)}?q={quote(EVIL)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                f"GET / HTTP/1.1\r\n{EVIL}",
                EVIL,
            ):
                async with await trio.open_tcp_stream("127.0.0.1", port.port) as stream:
                    await stream.send_all(evil.encode())
                    with trio.fail_after(20):
                        async for _ in stream:
                            pass
    lines.check()
    assert any("admin.request_refused" in line for line in lines.lines)

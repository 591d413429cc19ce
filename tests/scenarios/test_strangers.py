"""Unknown protocols at every port of a running master under load: closed, logged, and without lasting effect."""

from __future__ import annotations

import itertools
import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.ha_frame import encode_report, encode_transfer_header
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.load.footprint import footprint, own_bytes
from tests.scenarios.brokers import Broker, assert_copy, eventually, slave_of, wait_in_sync
from tests.scenarios.producing import Client, Load, assert_stored, send_command

pytestmark = pytest.mark.processes

SEED = 3_141_592
PORTS = ("remoting", "embedded_name_server", "ha", "admin")
CLOSE_TIMEOUT_S = 20.0
GROWTH_MAX = 48 << 20
IDLE_COUNT = 200
BATCH_COUNT = 50
"""Concurrent strangers, within the limits of every port."""
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))


def hopeless(chance: random.Random) -> Iterator[bytes]:
    """Texts that start no valid message on any port: the server must close the connection."""
    yield TLS_HELLO
    yield b"\xff" * 7 + b"\xfe" + b"\xff" * 57
    yield struct.pack(">iI", 2**31 - 1, 2**31 - 1) + b"x" * 1000
    yield struct.pack(">i", -2147483648) * 16
    yield b"SSH-2.0-OpenSSH_9.6\r\n" * 4
    for _ in range(10):
        yield b"\x7f" + chance.randbytes(chance.randrange(64, 5000))


def doubtful(chance: random.Random) -> Iterator[bytes]:
    """Texts that may become valid, or are valid on some port: closed when the stranger closes."""
    frame = encode_command(send_command(1))
    yield b""
    yield b"\x00"
    yield frame[: len(frame) // 2]
    yield struct.pack(">iI", 16_777_215, 100) + b"{" * 100
    yield struct.pack(">iI", 15 << 20, 0x7FFFFF) + bytes(1 << 20)
    yield encode_transfer_header(2**62, 2**31 - 1)
    yield encode_report(2**63 - 1)
    yield b"\xff" * 24  # the question that a halog slave asks, and a third time
    yield b"\xff" * 7
    yield b"GET /status HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n"
    yield b"GET / HTTP/1.1\r\n" + b"X-Header: y\r\n" * 3000
    yield b"POST /ready HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n"
    for _ in range(20):
        yield chance.randbytes(chance.randrange(1, 3000))
    for code in RequestCode:
        # Queries that need no permission are answered; the others fail without their fields.
        fields = {"topic": "\x00/../x", "queueId": "-7", "a": chance.choice(["", "9" * 400])}
        yield encode_command(RemotingCommand(code, opaque=1, ext_fields=fields, body=chance.randbytes(200)))
    yield encode_command(RemotingCommand(999_999, opaque=-1, flag=3))


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=CLOSE_TIMEOUT_S)


def read_to_end(stranger: socket.socket) -> None:
    """Read until the other side closes. TimeoutError if it doesn't."""
    give_up = time.monotonic() + CLOSE_TIMEOUT_S
    try:
        while stranger.recv(65536):
            if time.monotonic() > give_up:
                raise TimeoutError("still open")
    except ConnectionError:
        pass


def say(stranger: socket.socket, text: bytes) -> None:
    try:
        stranger.sendall(text)
    except ConnectionError:
        pass


def test_unknown_protocols_at_every_port(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    with (
        Broker(tmp_path / "m", "SYNC_MASTER").start() as master,
        Client(master.addresses["remoting"]) as client,
    ):
        client.send_all(range(100_000, 100_100))
        addresses = master.status()["addresses"]
        # Use every port once before measuring. It logs its first stranger; repetitions by one address are logged once a
        # minute.
        firsts = expose(addresses, [b"\xff" * 64])
        wait_gone(master)
        assert [name for name in firsts if f"peer={name} " not in master.log()] == []
        memory, descriptors, _ = footprint(master.pid, master.root)
        load = Load(master.addresses["remoting"], 0, random.Random(1), window=4)

        names = expose(addresses, list(hopeless(chance)))
        log = master.log()
        assert sum(f"peer={name} " in log for name in names) < len(names) / 2
        assert_untouched(master)
        texts = list(doubtful(chance))
        expose(addresses, texts, hangs_up=True)
        assert_untouched(master)
        crowd(addresses, texts, load)
        assert_untouched(master)

        answers = load.stop()
        assert load.error is None
        assert {answer.code for answer in answers} == {ResponseCode.SLAVE_NOT_AVAILABLE}
        remarks = {re.sub(r"\d+", "N", answer.remark) for answer in answers}
        alone = re.compile(r"no slave is connected(; the last one, .*)?|N connected, not yet reported an offset")
        assert [remark for remark in remarks if not alone.fullmatch(remark)] == []
        wait_gone(master)
        eventually(
            "every descriptor is back", lambda: footprint(master.pid, master.root).descriptor_count <= descriptors
        )
        grown = own_bytes(master.pid) - memory
        print(f"{len(answers)} answers meanwhile, {grown >> 10} KiB grown")
        assert grown < GROWTH_MAX
        assert "Traceback" not in master.log()
        assert "ha.transfer_started" not in master.log()

        # A restart is not needed: a real slave can connect.
        with slave_of(master, tmp_path / "s", haStartFrom="first") as slave:
            slave.start()
            wait_in_sync(master)
            assert client.send(200_000).code == ResponseCode.SUCCESS
            slave.stop()
        master.stop()
        assert_stored(master.commitlog, answers)
        assert_copy(slave, master)


def expose(addresses: dict[str, str], texts: list[bytes], *, hangs_up: bool = False) -> list[str]:
    """Send every text to every port, and wait until each is closed; return those whose end must be logged.

    `hangs_up`: the stranger closes its side first.
    """
    names = []
    for port, first in itertools.product(PORTS, range(0, len(texts), BATCH_COUNT)):
        with ExitStack() as stack:
            strangers = []
            for text in texts[first : first + BATCH_COUNT]:
                stranger = stack.enter_context(connect(addresses[port]))
                strangers.append((stranger, text))
                if port != "admin":  # whose bad requests are answered in HTTP
                    names.append("{}:{}".format(*stranger.getsockname()))
                say(stranger, text)
                if hangs_up:
                    with suppress(OSError):
                        stranger.shutdown(socket.SHUT_WR)
            for stranger, text in strangers:
                try:
                    read_to_end(stranger)
                except TimeoutError:
                    pytest.fail(f"{port} has not closed after {text[:40]!r}")
    return names


def crowd(addresses: dict[str, str], texts: list[bytes], load: Load) -> None:
    """Many silent connections, and some that send single bytes, while the producer sends."""
    with ExitStack() as stack:
        drips = [(stack.enter_context(connect(addresses[port])), text) for port in PORTS for text in texts[:10]]
        for port in PORTS:
            for _ in range(IDLE_COUNT):
                stack.enter_context(connect(addresses[port]))
        count = len(load.answers)
        for position in range(30):
            for stranger, text in drips:
                say(stranger, text[position : position + 1])
            load.wait_answers(count + 10 * position)


def wait_gone(master: Broker) -> None:
    eventually("no stranger is left at the HA port", lambda: master.status()["ha"]["slaves"] == [])


def assert_untouched(master: Broker) -> None:
    assert master.process.popen.poll() is None
    ha = eventually("the admin port has room again", lambda: status_if_any(master))["ha"]
    assert (ha["slave_count"], ha["in_sync"], ha["push2_slave_max_offset"]) == (0, 0, 0)


def status_if_any(master: Broker) -> dict[str, Any]:
    try:
        return master.status()
    except OSError:  # its limit is so low that strangers keep us out while they stay
        return {}


def test_unknown_protocols_are_closed_without_effect_on_others(tmp_path: Path) -> None:
    """Valid requests among invalid ones on other connections: each gets its own answer."""
    chance = random.Random(SEED)
    with Broker(tmp_path / "m", "ASYNC_MASTER").start() as master:
        with Client(master.addresses["remoting"]) as client, connect(master.addresses["remoting"]) as stranger:
            for number in range(50):
                say(
                    stranger,
                    encode_command(RemotingCommand(chance.randrange(0, 500), opaque=number, body=b"\x00" * 99)),
                )
                assert client.send(number).code == ResponseCode.SUCCESS
            parser = RemotingParser()
            opaques: set[int] = set()
            while len(opaques) < 50:
                opaques |= {answer.opaque for answer in parser.feed(stranger.recv(65536))}
            assert opaques == set(range(50))
        master.stop()

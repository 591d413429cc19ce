"""Runs the programs of docs/recipes.md against a master."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import anyio
import pytest

from ha.client import Admin, Message, Producer, PullConsumer
from ha.testing import Master, running_master
from scripts.recipes import EXAMPLES, named
from tests.docs.pages import DOCS

pytestmark = pytest.mark.processes
TIMEOUT_S = 120


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with running_master(tmp_path) as master:
        yield master


def start(*command: str, name_server: str = "", stderr: int | None = None) -> subprocess.Popen[str]:
    """Starts `python -m …` or `python FILE` in the directory of the programs."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=EXAMPLES,
        env={**os.environ, "NAMESRV_ADDR": name_server, "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def test_every_program_is_on_the_page() -> None:
    assert sorted(named((DOCS / "recipes.md").read_text())) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("worker", ["asyncio", "trio"])
def test_web_service(master: Master, worker: str) -> None:
    command = ("-m", "hypercorn", "-k", worker, "--bind", "127.0.0.1:0", "web:app")
    with start(*command, name_server=master.name_server_address, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            running = next(found for line in server.stderr if (found := re.search(r"Running on http://(\S+)", line)))
            answers = []
            with closing(HTTPConnection(running[1], timeout=TIMEOUT_S)) as connection:
                for body in ("42 EUR", ""):
                    connection.request("POST", "/orders", body)
                    response = connection.getresponse()
                    answers.append((response.status, b"SEND_OK" in response.read()))
            assert answers == [(201, True), (400, False)]
            assert server.stdout.readline() == "billed 42 EUR\n"
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
            assert server.wait(TIMEOUT_S) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # Hypercorn serves in a process below this one


async def in_flight(name_server: str) -> int:
    async with Admin(name_server) as admin:
        progress = await admin.consumer_progress("billing")
    assert progress.lag == 0
    return sum(queue.in_flight for queue in progress.queues)


@pytest.mark.parametrize("name", ["asyncio", "trio"])
def test_worker(master: Master, name: str) -> None:
    async def send() -> None:
        async with Producer(master.name_server_address) as producer:
            for body in (b"42 EUR", b"1 BTC"):
                await producer.send(Message("orders", body))

    anyio.run(send)
    with start(f"worker_{name}.py", name_server=master.name_server_address) as worker:
        assert worker.stdout is not None
        try:
            lines = sorted(worker.stdout.readline() for _ in range(2))
            assert lines == ["billed 42 EUR\n", "not billed: no exchange rate for '1 BTC'\n"]
            worker.send_signal(signal.SIGTERM)
            assert worker.stdout.read() == "stopped\n"
            assert worker.wait(TIMEOUT_S) == 0
            assert anyio.run(in_flight, master.name_server_address) == 1, "the one that was given back"
        finally:
            worker.kill()


@pytest.mark.parametrize("name", ["asyncio", "trio"])
def test_json(master: Master, name: str) -> None:
    with start(f"json_{name}.py", name_server=master.name_server_address) as program:
        output, _ = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == 0
    *events, rest = sorted(output.splitlines())
    assert events == ["7 is cancelled", "Ada ordered 7 for 42.00 EUR"]
    assert rest.startswith("dead letter: Expected `int`, got `str`")

    async def dead_letters() -> list[bytes]:
        async with (
            PullConsumer(master.name_server_address, group="test") as consumer,
            consumer.reading("%DLQ%json") as reading,
        ):
            return [message.body async for stretch in reading for message in stretch.messages]

    assert anyio.run(dead_letters) == [b'{"type": "order", "order_id": "seven"}']


def test_test() -> None:
    plugin = ("-p", "no:halog", "-p", "ha.pytest_plugin")  # without a new installation
    with start("-m", "pytest", *plugin, "-p", "no:cacheprovider", "-v", "test_events.py") as run:
        output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, output
    assert "[asyncio] PASSED" in output
    assert "[trio] PASSED" in output

"""Runs pytest with the fixtures that halog has for it, and `ha.testing` without pytest."""

import os
import resource
import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from ha.client import Message, Producer, SendStatus
from ha.testing import running_master

pytestmark = pytest.mark.processes

# Blocks the entry point and loads the same module by its name, so that the test does not need a new installation.
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:halog", "-p", "ha.pytest_plugin", "-p", "no:cacheprovider", "-q"]

SAMPLE = """
import asyncio
import json
import re
from urllib.request import urlopen

import pytest
import trio

from ha.client import Message, Producer, PullConsumer


async def sent_and_read(name_server, name):
    async with Producer(name_server) as producer, PullConsumer(name_server, group=name) as consumer:
        await producer.send(Message(name, b"hello"))
        async with consumer.reading(name) as reading:
            return [message.body async for stretch in reading for message in stretch.messages]


@pytest.mark.parametrize("run", [asyncio.run, trio.run], ids=["a/sync io", "trio"])
def test_programs(halog, halog_name, run):
    if run is trio.run:
        assert trio.run(sent_and_read, halog.name_server_address, halog_name) == [b"hello"]
    else:
        assert asyncio.run(sent_and_read(halog.name_server_address, halog_name)) == [b"hello"]


def test_plain(halog, halog_name):
    with urlopen(f"http://{halog.admin_address}/status") as answer:
        status = json.load(answer)
    assert status["addresses"]["remoting"] == halog.remoting_address
    assert re.fullmatch("test_plain-[0-9a-f]{8}", halog_name)


def test_another_name(halog_name):
    assert halog_name.startswith("test_another_name-")
"""


def run_sample(folder: Path, sample: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(sample)
    return subprocess.run(
        [*PYTEST, f"--basetemp={folder / 'temp'}", "test_sample.py"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def masters_in(folder: Path) -> list[int]:
    """The process ids of masters whose store is below `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if b"\0-m\0ha.testing\0" in command and os.fsencode(folder) in command:
            found.append(int(process.name))
    return found


def test_fixture_works_with_asyncio_trio_and_plain_tests(tmp_path: Path) -> None:
    """The environment's settings, which may be those of real brokers, have no effect."""
    elsewhere = {"HA_namesrvAddr": "127.0.0.1:1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    done = run_sample(tmp_path, SAMPLE, **elsewhere)
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert masters_in(tmp_path) == []
    [directory] = (tmp_path / "temp").glob("halog*[0-9]")
    assert [path.name for path in directory.iterdir()] == ["master.log"]
    assert "process.stopped" in (directory / "master.log").read_text()


def test_settings_are_a_fixture_and_mistakes_are_shown(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n\n@pytest.fixture(scope='session')\n"
        "def halog_settings():\n    return {'brokerRole': 'BOSS'}\n"
    )
    done = run_sample(tmp_path, "def test_it(halog):\n    pass\n")
    assert "1 error" in done.stdout
    assert "the master did not start: exit code 78" in done.stdout
    assert "brokerRole: 'BOSS' is not one of them" in done.stdout
    assert masters_in(tmp_path) == []


def test_plugin_loads_nothing_until_it_is_used(tmp_path: Path) -> None:
    sample = (
        "import sys\n\n\ndef test_it():\n    assert not {'ha.testing', 'ha.node', 'ha.client'} & sys.modules.keys()\n"
    )
    done = run_sample(tmp_path, sample)
    assert "1 passed" in done.stdout, done.stdout


def test_a_master_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, ha.testing\n"
        f"with ha.testing.running_master(pathlib.Path({str(tmp_path)!r})):\n"
        "    print(flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        [master] = masters_in(tmp_path)
        descriptor = os.pidfd_open(master)
        parent.kill()
    try:
        assert select.select([descriptor], [], [], 60)[0], "the master still runs"
    finally:
        os.close(descriptor)
    assert not (tmp_path / "store" / "abort").exists(), "it was stopped cleanly"


def test_a_directory_keeps_its_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the working directory, which may be a project of any kind, are not those of the master."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trio.py").write_text("raise ImportError\n")

    async def send(name_server: str) -> tuple[SendStatus, int]:
        async with Producer(name_server) as producer:
            [queue, *_] = await producer.queues("t")
            result = await producer.send(Message("t", b"x"), queue=queue)
        return result.status, result.queue_offset

    for queue_offset in range(2):
        with running_master(Path("master"), {"brokerRole": "SYNC_MASTER"}) as master:
            sent = anyio.run(send, master.name_server_address)
        assert sent == (SendStatus.SLAVE_NOT_AVAILABLE, queue_offset)


def test_a_program_with_more_than_1024_open_files(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1024):
            files.enter_context(open(os.devnull))
        with running_master(tmp_path) as master:
            assert master.remoting_address

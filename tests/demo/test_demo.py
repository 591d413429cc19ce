"""scripts/demo, run small: it shows what it promises, and ends its processes however it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo import DemoError, commitlog_digest, flights
from tests.demo.interruption import ROOT, interrupt, processes_below

COMMAND = [sys.executable, "-m", "scripts.demo"]


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.processes
def test_without_java_the_rest_of_the_demo_runs(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    arguments = ("--messages", "50", "--in-flight", "8", "--directory", str(directory))
    done = demo(*arguments, PATH=str(tmp_path), JAVA_HOME="")
    assert done.returncode == 0, done.stdout
    assert "skipped: no Java" in done.stdout
    assert not (directory / "archive").exists()


@pytest.mark.processes
def test_a_short_demo_shows_every_step(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    done = demo("--messages", "500", "--in-flight", "32", "--directory", str(directory))
    out = done.stdout
    assert done.returncode == 0, out
    assert "500 SEND_OK" in out
    digests = re.findall(r"SHA-256 ([0-9a-f]{64})", out)
    assert len(digests) == 4
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert out.count("byte-identical") == 2
    assert re.search(r"now gets: SLAVE_NOT_AVAILABLE\n  because: +\S+", out)
    assert re.search(r"now gets: SEND_OK", out)
    assert re.search(r"651 flights in \d+ micro-batches, .*results are correct", out)
    assert re.search(r"651 flights archived .*second run: no rows", out)
    assert (directory / "delays.png").read_bytes().startswith(b"\x89PNG")
    assert "551 messages" in out  # 500, a tenth of them without a slave, and one with it back
    assert out.count("exit code 0") == 4
    assert processes_below(directory) == []
    assert not re.search(r"Traceback", "".join(log.read_text() for log in directory.glob("*.log")))
    again = demo("--messages", "1", "--directory", str(directory))
    assert again.returncode == 0, again.stdout


@pytest.mark.processes
def test_a_node_that_does_not_start_ends_the_demo_with_its_reason(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    done = demo("--messages", "5", "--directory", str(directory), HA_flushDiskType="SOMETIMES")
    assert done.returncode == 1, done.stdout
    assert "The demo failed: master did not start (exit code 78)" in done.stdout
    assert "flushDiskType" in done.stdout
    assert "Traceback" not in done.stdout
    assert processes_below(directory) == []


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupted_it_ends_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "demo"
    interrupt([*COMMAND, "--directory", str(directory)], "sent:", number, directory)


@pytest.mark.parametrize("arguments", [["--messages", "0"], ["--messages", "336777"], ["--in-flight", "0"]])
def test_usage_errors(arguments: list[str]) -> None:
    done = demo(*arguments)
    assert done.returncode == 2
    assert "usage" in done.stdout


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("years of work")
    done = demo("--messages", "1", "--directory", str(tmp_path))
    assert done.returncode == 2
    assert "not made by this demo" in done.stdout
    assert (tmp_path / "thesis").read_text() == "years of work"


def test_every_flight_is_a_message() -> None:
    messages = flights(10**9)
    assert len(messages) == 336_776
    first = messages[0]
    assert (first.topic, first.tags, first.keys) == ("flights", "UA", "UA1545-2013-01-01")
    assert json.loads(first.body) == {
        "year": 2013,
        "month": 1,
        "day": 1,
        "dep_time": 517,
        "sched_dep_time": 515,
        "dep_delay": 2,
        "arr_time": 830,
        "sched_arr_time": 819,
        "arr_delay": 11,
        "carrier": "UA",
        "flight": 1545,
        "tailnum": "N14228",
        "origin": "EWR",
        "dest": "IAH",
        "air_time": 227,
        "distance": 1400,
        "hour": 5,
        "minute": 15,
        "time_hour": "2013-01-01T10:00:00Z",
    }
    assert sum(b'"dep_time":null' in message.body for message in messages) == 8_255  # cancelled flights of that year
    assert not any(b'"NA"' in message.body or b"NaN" in message.body for message in messages)


def test_the_digest_is_over_the_range_asked_for_and_says_what_is_missing(tmp_path: Path) -> None:
    log = tmp_path / "commitlog"
    log.mkdir()
    (log / f"{0:020}").write_bytes(b"a" * 100)
    (log / f"{100:020}").write_bytes(b"b" * 100)
    whole = commitlog_digest(tmp_path, 0, 150)
    (log / f"{100:020}").write_bytes(b"b" * 50 + b"c" * 50)
    assert commitlog_digest(tmp_path, 0, 150) == whole != commitlog_digest(tmp_path, 0, 151)
    assert commitlog_digest(tmp_path, 90, 110) != commitlog_digest(tmp_path, 91, 110)
    with pytest.raises(DemoError, match="up to 200, not 201"):
        commitlog_digest(tmp_path, 0, 201)
    with pytest.raises(DemoError):
        commitlog_digest(tmp_path, 300, 301)

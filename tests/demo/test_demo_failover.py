"""scripts/demo --failover, run short: it shows what it promises, and ends its processes however it ends."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demo.interruption import ROOT, interrupt, processes_below
from tests.failover.etcd_servers import require_etcd

COMMAND = [sys.executable, "-m", "scripts.demo_failover"]


def run(command: list[str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.processes
def test_a_short_demo_shows_every_step(tmp_path: Path) -> None:
    require_etcd()
    directory = tmp_path / "demo"
    done = run(COMMAND, "--pause", "0", "--in-flight", "8", "--directory", str(directory))
    out = done.stdout
    assert done.returncode == 0, out
    killed = int(re.findall(r"Killing member (\d), the master", out)[0])
    assert f"broker-a: member {killed} is master, epoch 3" in out
    assert len(re.findall(r"for \d+\.\d\d s nothing was acknowledged", out)) == 3
    acknowledged, found = re.findall(r"([\d,]+) sends were acknowledged, ([\d,]+) messages found", out)[0]
    assert int(found.replace(",", "")) >= int(acknowledged.replace(",", "")) >= 400
    assert "not at the acknowledged position: 0; acknowledged by two masters: 0" in out
    digests = re.findall(r"member \d  [\d,]+ bytes  SHA-256 ([0-9a-f]{64})", out)
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert out.count("exit code 0") == 5  # the three members and the name server, and the master before that
    assert processes_below(directory) == []


@pytest.mark.processes
def test_interrupted_it_ends_its_processes(tmp_path: Path) -> None:
    require_etcd()
    directory = tmp_path / "demo"
    interrupt([*COMMAND, "--directory", str(directory)], "Sending flights", signal.SIGTERM, directory)


def test_without_etcd_it_says_what_to_install(tmp_path: Path) -> None:
    done = run(COMMAND, "--directory", str(tmp_path / "demo"), PATH=str(tmp_path))
    assert done.returncode == 69
    assert "apt-get install etcd-server" in done.stdout
    for program in ("bash", "id"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    done = run([str(ROOT / "scripts" / "etcd")], PATH=str(tmp_path))
    assert done.returncode == 69
    assert "apt-get install etcd-server" in done.stdout


@pytest.mark.parametrize("arguments", [["--in-flight", "0"], ["--pause", "-1"], ["--messages", "5"]])
def test_usage_errors(arguments: list[str], tmp_path: Path) -> None:
    done = run(COMMAND, *arguments, "--directory", str(tmp_path / "demo"))
    assert done.returncode == 2
    assert "usage: scripts/demo --failover" in done.stdout


@pytest.mark.parametrize(
    ("given", "started"),
    [
        (["--pause", "0", "--failover"], "-m scripts.demo_failover --pause 0"),
        (["--messages", "5"], "-m scripts.demo --messages 5"),
    ],
)
def test_the_flag_chooses_the_demo(given: list[str], started: str, tmp_path: Path) -> None:
    """With a Python in the environment that only says what it is started with."""
    require_etcd()  # which is there, so that nothing is installed
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    compiled = [str(path.relative_to(ROOT)) for path in [*ROOT.glob("ha/**/*.pyx"), *ROOT.glob("ha/**/*.pxd")]]
    built_of = sorted(["hatch_build.py", "pyproject.toml", *compiled])
    project = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in built_of)).hexdigest()
    (tmp_path / ".halog-installed").write_text(f"{project} {ROOT}\n")
    done = run([str(ROOT / "scripts" / "demo")], *given, HALOG_VENV=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, started + "\n")

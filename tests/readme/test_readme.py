"""Runs the commands and the example of README.md, with ports that the system chooses."""

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ha.testing import running_master
from tests.node.processes import FREE_PORTS, Process

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()

pytestmark = pytest.mark.processes

#: Run by scripts/first-hour; tests/packaging tests what is installed.
INSTALLATION = [
    "apt update && apt install python3-venv",
    "python3 -m venv .venv && . .venv/bin/activate",
    "pip install .",
]


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", README)


def test_example_sends_and_receives(tmp_path: Path) -> None:
    [example] = code_blocks("python")
    assert "127.0.0.1:9876" in example
    with running_master(tmp_path) as master:
        command = [sys.executable, "-c", example.replace("127.0.0.1:9876", master.name_server_address)]
        for _ in range(2):  # the second run continues where the first one stopped
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
            assert done.stdout == "SEND_OK\nhello\n", done.stderr


def test_it_stays_short() -> None:
    assert len(README.splitlines()) < 110


def test_commands(tmp_path: Path) -> None:
    lines = [line.split("#")[0].strip() for block in code_blocks("sh") for line in block.splitlines()]
    others = [line for line in lines if line and not line.startswith("ha ")]
    assert others == INSTALLATION
    assert lines.index("ha master") < lines.index("ha slave")
    with Process("ha.cli", "master", *FREE_PORTS, directory=tmp_path) as master:
        ready = master.wait_ready()
        with urllib.request.urlopen(f"http://{ready['admin']}/status", timeout=10) as answer:
            name_server = json.load(answer)["addresses"]["embedded_name_server"]
        settings = ("--set", f"haMasterAddress={ready['ha']}", "--set", f"namesrvAddr={name_server}")
        with Process("ha.cli", "slave", *FREE_PORTS, *settings, directory=tmp_path) as slave:
            slave_ready = slave.wait_ready()
            admins = ["--admin", ready["admin"], "--admin", slave_ready["admin"]]
            outputs = []
            for line in lines:
                if line.startswith("ha ") and line not in ("ha master", "ha slave"):
                    words = shlex.split(line)[1:]
                    command = [sys.executable, "-c", "import ha.cli; ha.cli.main()", *words]
                    done = subprocess.run(
                        [*command, *(admins * (words == ["status"]))],
                        cwd=tmp_path,
                        env=os.environ | {"NAMESRV_ADDR": name_server},
                        capture_output=True,
                        text=True,
                        timeout=60,
                        check=False,
                    )
                    assert done.returncode == 0, done.stderr
                    outputs.append(done.stdout)
            assert len(outputs) == 3
            assert "hello" in outputs[1]
            assert "master" in outputs[2].lower()
            assert slave.stop() == 0
        assert master.stop() == 0

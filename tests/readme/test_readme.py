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

from tests.node.processes import FREE_PORTS, Process

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()

pytestmark = pytest.mark.processes

RUN_ELSEWHERE = {
    "scripts/demo": "tests/demo/test_demo.py",
    "scripts/demo --failover": "tests/demo/test_demo_failover.py",
    "scripts/test": "runs all tests",
    "python3 -m venv .venv && .venv/bin/pip install . && . .venv/bin/activate": "tests/packaging/test_packages.py",
    "pip install '.[spark]'": "scripts/venv",
}


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", README)


def test_library_example_stores_a_message(tmp_path: Path) -> None:
    [example] = code_blocks("python")
    assert "ha.Config()" in example
    done = subprocess.run(
        [sys.executable, "-c", example.replace("ha.Config()", "ha.Config(listen_port=0)")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "PutStatus.PUT_OK 0\n"
    assert (tmp_path / "data/master/commitlog/00000000000000000000").exists()


def test_commands(tmp_path: Path) -> None:
    lines = [line.split("#")[0].strip() for block in code_blocks("sh") for line in block.splitlines()]
    others = [line for line in lines if line and not line.startswith("ha ")]
    assert set(others) == RUN_ELSEWHERE.keys()
    assert all(os.access(REPOSITORY / name, os.X_OK) for name in ("scripts/demo", "scripts/test"))
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

"""Runs the examples of docs/sdk.md and docs/timers.md against a master of their own; only the port is changed."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.node.processes import FREE_PORTS, Process

PAGES = "".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in ("sdk.md", "timers.md"))

pytestmark = pytest.mark.processes


def test_documentation_examples_run(tmp_path: Path) -> None:
    examples = re.findall(r"(?ms)^```python\n(.*?)^```", PAGES)
    printed = []
    with Process("ha.master", *FREE_PORTS, directory=tmp_path) as master:
        with urllib.request.urlopen(f"http://{master.wait_ready()['admin']}/status", timeout=10) as answer:
            name_server = json.load(answer)["addresses"]["embedded_name_server"]
        for example in examples:
            assert "127.0.0.1:9876" in example
            command = [sys.executable, "-c", example.replace("127.0.0.1:9876", name_server)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stderr) == (0, "")
            printed.append(done.stdout.splitlines())
    send, consume, receive, read, transaction, admin, recall = printed
    assert send[0].startswith("SEND_OK ")
    assert consume == ["42 EUR ('invoice-7',)"]
    assert len(receive) == len({*receive}) == 2
    assert {"42 EUR open", "1 EUR None", "2 EUR None"} <= set(read)
    assert transaction == ["COMMIT True"]
    assert admin[0].endswith("] True")
    assert admin[1] == "[b'42 EUR']"
    assert recall == ["recalled"]

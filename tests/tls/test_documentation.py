"""docs/tls.md: what it tells to type works as it stands, but for port numbers, which the system chooses here."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.node.processes import FREE_PORTS, Process

DOCUMENT = (Path(__file__).parents[2] / "docs" / "tls.md").read_text()

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here"),
]


def run(script: str, directory: Path, **environment: str) -> str:
    """Run it with bash as it is, and return what it printed."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("HA_", "HALOG_"))}
    path = f"{Path(sys.executable).parent}:{inherited['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env={**inherited, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def status(address: str, directory: Path) -> dict[str, object]:
    """The page, by HTTPS."""
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    with urllib.request.urlopen(f"https://{address}/status", timeout=10, context=context) as answer:
        shown: dict[str, object] = json.load(answer)
    return shown


def wait_in_sync(address: str, directory: Path) -> None:
    """Until the master's slave is there and counts."""
    for _ in range(200):
        ha = status(address, directory)["ha"]
        assert isinstance(ha, dict)
        if ha["in_sync"]:
            return
        time.sleep(0.1)
    raise AssertionError(ha)


def test_the_commands_do_what_they_say(tmp_path: Path) -> None:
    certificates, configurations, use = re.findall(r"(?ms)^```bash\n(.*?)^```", DOCUMENT)
    configurations, *starts = configurations.split("python -m ")
    assert [start.split(" &")[0] for start in starts] == [
        "ha.master --config master.conf",
        "ha.slave --config slave.conf",
    ]
    run(certificates + configurations, tmp_path)
    for key in tmp_path.glob("*.key"):
        assert key.stat().st_mode & 0o077 == 0
    with Process("ha.master", "--config", "master.conf", *FREE_PORTS, directory=tmp_path) as master:
        ready = master.wait_ready()
        addresses = status(ready["admin"], tmp_path)["addresses"]
        assert isinstance(addresses, dict)
        servers = addresses["embedded_name_server"]
        follow = ("--set", f"namesrvAddr={servers}")
        with Process("ha.slave", "--config", "slave.conf", *follow, *FREE_PORTS, directory=tmp_path) as slave:
            slave_ready = slave.wait_ready()
            wait_in_sync(ready["admin"], tmp_path)
            admins = f"ha status --admin {ready['admin']} --admin {slave_ready['admin']}"
            printed = run(use.replace("ha status", admins), tmp_path, NAMESRV_ADDR=servers)
            assert "SEND_OK" in printed
            assert "\nhello\n" in printed
            assert "broker-a-1" in printed, "the slave is known by its certificate's name"
            example = re.findall(r"(?ms)^```python\n(.*?)^```", DOCUMENT)[0].replace("127.0.0.1:9876", servers)
            lines = "".join(f"    {line}\n" for line in example.splitlines())
            program = f"import trio\nasync def main():\n{lines}trio.run(main)"
            subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=30, check=True)
            assert run("ha consume greetings", tmp_path, NAMESRV_ADDR=servers, HALOG_TLS_CA="ca.pem",
                       HALOG_TLS_CERT="client.pem", HALOG_TLS_KEY="client.key").count("hello") == 2  # fmt: skip

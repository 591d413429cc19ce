"""Runs every command of docs/cli.md on a master and a slave and checks its exit code; the page has every command."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from ha.cli import application, run
from ha.cli.servers import SERVERS
from tests.cli.cluster import Cluster, cluster
from tests.failover.etcd_servers import require_etcd
from tests.failover.members import ADMIN_TOKEN, open_group, until

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
LINES = [line for block in re.findall(r"(?ms)^```sh\n(.*?)^```", TEXT) for line in block.splitlines() if line]
OF_A_GROUP = re.compile(r"127\.0\.0\.1:1([123])913")
"""Admin port of a member of the failover group that docs/failover.md starts; its brokerId."""
_IN_DOUBT = "it may have been executed, or may still be"
"""What a command says that a busy machine kept waiting for etcd: to be looked at, and given again."""
_ATTEMPT_COUNT_MAX = 3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.master("brokerRole=SYNC_MASTER")
        started.slave()
        yield started


def run_server(words: list[str]) -> int:
    """Checks the configuration only: tests/cli/test_all.py runs one."""
    command = [sys.executable, "-m", "ha.cli", *words, "--print-config"]
    return subprocess.run(command, check=False, timeout=60, stdout=subprocess.DEVNULL).returncode


@pytest.mark.processes
def test_every_command_does_what_the_page_says(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the page's order. Ports are this cluster's; a line that says `exits N` does."""
    monkeypatch.chdir(nodes.directory)
    monkeypatch.setenv("NAMESRV_ADDR", nodes.name_server)
    for line in LINES:
        if OF_A_GROUP.search(line) or line.startswith(("ha broker ", "ha cluster ")):  # the next tests
            continue
        command, _, remark = line.partition("#")
        for port, admin in zip(("10913", "10923"), nodes.admins, strict=True):
            command = command.replace(f"127.0.0.1:{port}", admin)
        words = shlex.split(command)
        assert words.pop(0) == "ha", line
        wanted = re.search(r"exits (\d+)", remark)
        code = run_server(words) if words[0] in SERVERS else run(words)
        captured = capfd.readouterr()
        assert code == (int(wanted[1]) if wanted else 0), line + "\n" + captured.out + captured.err


def test_the_page_s_commands_for_several_groups_are_valid() -> None:
    """tests/docs/test_commands.py runs those of docs/scaling.md, and test_cluster.py runs clusters."""
    lines = [line for line in LINES if line.startswith(("ha broker ", "ha cluster "))]
    assert len(lines) == 9
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        application(words).parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.processes
async def test_every_command_for_a_group_does_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    require_etcd()
    monkeypatch.setenv("HALOG_ADMIN_TOKEN", ADMIN_TOKEN)
    async with open_group(tmp_path, 1, 2, 3) as members:
        await members.wait_set(1, 2, 3)
        for line in filter(OF_A_GROUP.search, LINES):
            command, _, remark = line.partition("#")
            words = shlex.split(OF_A_GROUP.sub(lambda found: members.admin(int(found[1])), command))
            assert words.pop(0) == "ha", line
            wanted, *said = remark.partition("exits ")[2].split(": ", 1) if "exits" in remark else ["0"]
            master_id = members.master_id
            for _ in range(_ATTEMPT_COUNT_MAX):
                # A member is not ready in the first moment after it follows another master.
                await until("all are ready", lambda: all(members.status(id_)["is_ready"] for id_ in (1, 2, 3)))
                code = await trio.to_thread.run_sync(run, words)
                captured = capfd.readouterr()
                if _IN_DOUBT not in captured.err:
                    break
            assert code == int(wanted), line + "\n" + captured.out + captured.err
            assert all(text.strip() in captured.err for text in said), line + "\n" + captured.err
            if words[0] == "switch" and not code:
                to = int(words[2]) if words[1] == "--to" else None
                await until(line, lambda: members.master_id == to if to else members.master_id not in (None, master_id))  # noqa: B023


def commands() -> list[str]:
    found = []
    app = application()
    for name in sorted(app):
        if name.startswith("-"):
            continue
        command = app[name]
        inner = [each for each in command if not each.startswith("-")] if command.default_command is None else []
        found += [f"{name} {each}" for each in inner] or [name]
    return found


@pytest.mark.parametrize("command", commands())
def test_each_command_is_on_the_page(command: str) -> None:
    if not command.startswith("spark "):  # docs/spark.md
        assert any(line.startswith(f"ha {command} ") or line == f"ha {command}" for line in LINES), command

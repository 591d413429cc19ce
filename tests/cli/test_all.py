"""What holds for every command: exit codes, --json, deadlines, completion, a quick start."""

import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import cyclopts
import pytest

import ha.cli
from ha.cli import application, exits, run, status
from ha.cli.servers import SERVERS
from tests.cli.conftest import OneBroker
from tests.cli.test_log import Golden
from tests.cli.test_status import SLAVE, admin_port
from tests.node.processes import Process

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def commands(within: cyclopts.App, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], cyclopts.App]]:
    """Every command that does something, by its words."""
    for name in within:
        if not name.startswith("-"):
            inner = within[name]
            if inner.default_command is not None:
                yield (*words, name), inner
            yield from commands(inner, (*words, name))


COMMANDS = dict(commands(application()))
NAMES = [name for name in application() if not name.startswith("-")]
RUN_SERVERS = {(name,) for name in SERVERS}
LOCAL = {("log", "dump"), ("log", "verify"), ("log", "diff"), ("completion",)} | RUN_SERVERS


def flags(command: cyclopts.App) -> set[str]:
    return {name for argument in command.assemble_argument_collection() for name in argument.names}


def test_there_are_commands() -> None:
    assert {("status",), ("log", "verify"), ("topic", "list"), ("spark", "audit")} <= COMMANDS.keys()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_results_come_as_json(words: tuple[str, ...]) -> None:
    if words not in {("log", "dump"), ("completion",)} | RUN_SERVERS:  # JSON always, and a script
        assert "--json" in flags(COMMANDS[words])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_waits_have_a_deadline_that_can_be_chosen(words: tuple[str, ...]) -> None:
    if words not in LOCAL and words[0] != "spark":
        assert "--timeout" in flags(COMMANDS[words])


@pytest.fixture
def mute() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "words",
    [
        ["produce", "T", "--body", "x"],
        ["consume", "T"],
        ["consume", "T", "--group", "G"],
        ["topic", "list"],
        ["topic", "describe", "T"],
        ["group", "list"],
        ["offsets", "show", "G"],
        ["offsets", "reset", "G", "T", "--to", "first"],
        ["bench", "T"],
    ],
    ids=" ".join,
)
def test_a_name_server_that_says_nothing_is_not_waited_for_long(
    words: list[str], mute: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--servers", mute, "--timeout", "0.3"]) == 69
    assert mute in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status"], ["top", "--once", "--interval", "0.1"]], ids=" ".join)
def test_an_admin_port_that_says_nothing_is_not_waited_for_long(
    words: list[str], mute: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--admin", mute, "--timeout", "0.3"]) == 69
    assert f"{mute}: no response within 0.3 s" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["produce", "T", "--body", "x"], ["topic", "list"]], ids=" ".join)
def test_host_that_is_not_found_is_told_in_one_line(words: list[str]) -> None:
    """In a process of its own: there the SDK's log lines would reach standard error."""
    command = [sys.executable, "-m", "ha.cli", *words, "-n", "no-such-host.invalid:9876"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 69
    tried = "no name server can be reached (no-such-host.invalid:9876: host not found)"
    assert done.stderr == f"ha: {tried}; check --servers and NAMESRV_ADDR\n"


# ---- exit codes


def documented() -> set[int]:
    table = TEXT.partition("## Exit codes")[2].partition("\n## ")[0]
    return {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", table)}


def test_the_table_has_every_exit_code() -> None:
    assert documented() == {value for name, value in vars(exits).items() if name.startswith("EXIT_")}


def test_each_exit_code_is_what_the_table_says(
    broker: OneBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = Golden("5.5.0", tmp_path / "store")
    produce = ["produce", "T", "--body", "x", "--servers", broker.name_server, "--timeout", "60"]
    seen = {"completion": run(["completion", "bash"]), "completion of another shell": run(["completion", "tcsh"])}
    broker.send_code = 1
    seen["a refused message"] = run(produce)
    broker.send_code = 11
    seen["a message on no slave"] = run(produce)
    with admin_port(json.dumps(SLAVE).encode()) as address:
        seen["a cluster without a master"] = run(["status", "--admin", address])
    golden.flip(golden.pick(5)["offset"] + 90)
    seen["a damaged store"] = run(["log", "verify", str(golden.path)])
    seen["no store"] = run(["log", "verify", str(tmp_path)])
    seen["nobody there"] = run(["status", "--admin", "127.0.0.1:1"])

    def bug(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(status, "fetch_node_pages", bug)
    seen["a bug"] = run(["status"])
    assert "ZeroDivisionError" in capsys.readouterr().err

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "fetch_node_pages", interrupted)
    seen["Ctrl-C"] = run(["status"])
    assert set(seen.values()) == documented(), seen


def test_a_reader_that_is_gone_is_not_an_error(broker: OneBroker) -> None:
    """As in `ha … | head`, whether rich writes the output or Python at the end of the process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    readable, writable = os.pipe()
    os.close(readable)
    try:
        for words in (["status", "--help"], ["produce", "T", "--body", "x", "--servers", broker.name_server]):
            done = subprocess.run(
                [sys.executable, "-m", "ha.cli", *words], stdout=writable, stderr=subprocess.PIPE, env=environment,
                text=True, check=False, timeout=60,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, ""), words
    finally:
        os.close(writable)


def test_a_check_has_its_exit_code_although_nobody_reads_on(broker: OneBroker) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    sends = ["produce", "T", "--size", "10", "--count", "200", "--json", "--servers", broker.name_server]
    try:
        with admin_port(json.dumps(SLAVE).encode()) as address:
            status = ["status", "--admin", address]
            for words, code in ((status, 4), ([*status, "--json"], 4), (["nonsense"], 2), (sends, 0)):
                command = [sys.executable, "-m", "ha.cli", *words]
                done = subprocess.run(command, stdout=writable, stderr=writable, check=False, timeout=60)
                assert done.returncode == code, words
    finally:
        os.close(writable)
    assert len(broker.sends) == 200


def test_a_process_without_an_output() -> None:
    """As with `>&-` in a crontab."""
    with admin_port(json.dumps(SLAVE).encode()) as address:
        script = f"{sys.executable} -m ha.cli status --admin {address} --json >&- 2>&-"
        assert subprocess.run(["bash", "-c", script], check=False, timeout=60).returncode == 4


def test_a_process_without_an_input(broker: OneBroker) -> None:
    script = f"{sys.executable} -m ha.cli produce T --servers {broker.name_server} <&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.partition(" in ")[0]) == (0, "sent 0")


def test_a_terminal_need_not_have_all_characters() -> None:
    command = [sys.executable, "-m", "ha.cli", "doctor", "--servers", "127.0.0.1:1", "--admin", "127.0.0.1:1"]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (69, b"")
    assert b"\n  \\u2192 start the name server" in done.stdout


# ---- progress


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Standard error is a terminal; what was shown there, once it is closed."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # what a terminal says when nobody has it open any more
            while chunk := os.read(ours, 65536):
                shown.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with monkeypatch.context() as patch, open(theirs, "w", encoding="utf-8") as stderr:
            patch.setattr(sys, "stderr", stderr)
            patch.setenv("TERM", "xterm")
            yield shown
    finally:
        reader.join()
        os.close(ours)


def test_long_work_shows_how_far_it_is(
    broker: OneBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal; elsewhere nothing."""
    store = str(Golden("5.5.0", tmp_path / "store").path)
    servers = ["--servers", broker.name_server]
    for words, stage in (
        (["bench", "T", "--count", "50", "--json", *servers], "sending"),
        (["produce", "T", "--size", "10", "--count", "50", "--json", *servers], "sending"),
        (["log", "verify", store, "--json"], "verify"),
        (["log", "diff", store, store, "--json"], "compare"),
    ):
        with terminal(monkeypatch) as shown:
            assert run(words) == 0
        text = b"".join(shown).decode()
        assert stage in text, words
        assert "━━━" in text, words
        capsys.readouterr()
        assert run(words) == 0
        assert stage not in capsys.readouterr().err


# ---- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_commands(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("doctor", "verify", "--servers"))
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=30)


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    [function] = re.findall(r"(?m)^complete .*-F (\S+) ha$", script)
    ask = f'COMP_WORDS=(ha log ver); COMP_CWORD=2; COMP_LINE="ha log ver"; {function}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == ["verify"]


# ---- start


def test_version_tells_a_missing_extra_from_a_missing_compiler() -> None:
    program = "import sys, ha.cli\nsys.modules['pyarrow'] = None\nha.cli.run(['--version'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found = re.fullmatch(
        r"\S+ \((\d+) of (\d+) modules run compiled; needs pyarrow: (.*)\)", " ".join(done.stdout.split())
    )
    assert found, done.stdout
    assert found[1] == found[2]
    assert found[3] == "ha.arrow.slices"


def test_the_list_of_commands_needs_none_of_them() -> None:
    """What answers `ha --help` is the standard library, the command line's own libraries and the list."""
    program = "import sys, ha.cli; ha.cli.run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ha.cli.COMMANDS)
    modules = set(done.stderr.split())
    assert {module for module in modules if module.split(".")[0] == "ha"} == {
        *("ha", "ha.cli", "ha.cli.exits", "ha.cli.completion", "ha.errors", "ha.version"),
        *("ha.cli.pipes", "ha.cli.servers", "ha.cli.unreachable", "ha.cli.usage"),
    }
    heavy = {"numpy", "pyarrow", "pyspark", "pandas", "trio", "anyio", "msgspec", "hypercorn", "starlette", "httpx"}
    assert not modules & {*heavy, "ssl", "asyncio", "rich.progress", "rich.live"}


def test_no_command_needs_an_extra_to_tell_its_flags() -> None:
    extras = "pyarrow, pyspark, pandas, httpx, lz4, zstandard, opentelemetry, matplotlib"
    program = f"""
import sys, ha.cli
sys.modules |= dict.fromkeys("{extras}".split(", "))
sys.exit(any([ha.cli.run([name, "--help"]) for name in ha.cli.COMMANDS]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ha.cli.COMMANDS)
def test_the_list_says_of_a_command_what_its_page_begins_with(name: str) -> None:
    page = " ".join(application()[name].help.split())
    assert page.startswith(ha.cli.COMMANDS[name][1].removesuffix("."))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["staus"], f"ha: 'staus' is not a command; did you mean 'status'? ha has {', '.join(sorted(NAMES))}"),
        (["zzzz"], f"ha: 'zzzz' is not a command; ha has {', '.join(sorted(NAMES))}"),
        (["offsets", "rest"], "ha: 'rest' is not a command; did you mean 'reset'? ha offsets has reset, show"),
        (["status", "--adm", "x"], "ha: unknown option: --adm. Did you mean --admin?; see ha status --help"),
        (["produce"], 'ha: command "produce" parameter TOPIC requires an argument; see ha produce --help'),
        (["produce", "T", "a"], "ha: unexpected argument 'a'; see ha produce --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_error_is_one_line_that_says_what_is_accepted(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert capsys.readouterr().err == says + "\n"


def test_schema_file_in_a_folder_of_a_partition(capsys: pytest.CaptureFixture[str]) -> None:
    """Topics have no equals signs, but the paths of Spark's users have."""
    words = ["--to", "/no/archive", "--columns-from", "json", "--schema", "orders=/no/dt=1/orders.ddl"]
    assert run(["spark", "archive", "/no/store", *words]) == 2
    assert "directory: '/no/dt=1/orders.ddl'" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 120])
def test_help_fills_the_width_of_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A paragraph's lines are broken anew: each but the last has no room for the next line's first word."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["produce", "--help"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= width
    begin = next(number for number, line in enumerate(lines) if line.startswith("If it stops early"))
    paragraph = lines[begin : lines.index("", begin)]
    assert len(paragraph) > 1
    for line, following in pairwise(paragraph):
        assert len(f"{line} {following.split()[0]}") > width


# ---- servers


def test_server_commands_take_what_the_modules_take(tmp_path: Path) -> None:
    """All arguments reach `python -m ha.NAME`, --help included, and so does its exit code."""
    for words in (["slave", "--help"], ["namesrv", "--print-config"], ["proxy", "--bogus"], ["master", "--set", "x"]):
        ours, theirs = (
            subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
            for command in (
                [sys.executable, "-m", "ha.cli", *words],
                [sys.executable, "-m", f"ha.{words[0]}", *words[1:]],
            )
        )
        assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr), words
        assert ours.returncode == (0 if words[1] in ("--help", "--print-config") else 78 if words[1] == "--set" else 2)


@pytest.mark.processes
def test_server_command_becomes_the_server(tmp_path: Path) -> None:
    """In the same process, so that a signal to it reaches the server, and without modules of the command line."""
    with Process("ha.cli", "namesrv", "--set", "listenPort=0", directory=tmp_path) as process:
        assert "role=NAMESRV" in process.wait_ready()["line"]
        command = Path(f"/proc/{process.popen.pid}/cmdline").read_text().split("\0")
        assert command[1:4] == ["-P", "-m", "ha.namesrv"]
        assert process.stop() == 0

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
from pathlib import Path
from typing import Any

import cyclopts
import pytest

import ha.cli
from ha.cli import application, exits, run, status
from tests.cli.conftest import OneBroker
from tests.cli.test_log import Golden
from tests.cli.test_status import SLAVE, admin_port

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
LOCAL = {("log", "dump"), ("log", "verify"), ("log", "diff"), ("completion",)}


def flags(command: cyclopts.App) -> set[str]:
    return {name for argument in command.assemble_argument_collection() for name in argument.names}


def test_there_are_commands() -> None:
    assert {("status",), ("log", "verify"), ("topic", "list"), ("spark", "audit")} <= COMMANDS.keys()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_results_come_as_json(words: tuple[str, ...]) -> None:
    if words not in {("log", "dump"), ("completion",)}:  # JSON always, and a script
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

    monkeypatch.setattr(status, "fetch_answers", bug)
    seen["a bug"] = run(["status"])
    assert "ZeroDivisionError" in capsys.readouterr().err

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "fetch_answers", interrupted)
    seen["Ctrl-C"] = run(["status"])
    assert set(seen.values()) == documented(), seen


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


def test_the_list_of_commands_needs_none_of_them() -> None:
    """What answers `ha --help` is the standard library, the command line's own libraries and the list."""
    program = "import sys, ha.cli; ha.cli.run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ha.cli.COMMANDS)
    modules = set(done.stderr.split())
    assert {module for module in modules if module.split(".")[0] == "ha"} == {
        *("ha", "ha.cli", "ha.cli.exits", "ha.cli.completion", "ha.errors", "ha.version")
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


def test_a_mistyped_command_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prodce"]) == 2
    assert 'Did you mean "produce"?' in capsys.readouterr().err

"""Interrupts scripts that start processes, and looks for processes left behind."""

import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def processes_below(directory: Path) -> list[str]:
    """Command lines of running processes, scripts left out, that name `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(directory) in command and " -m scripts." not in command:
                found.append(command)
    return found


def interrupt(command: list[str], shown: str, number: signal.Signals, directory: Path) -> None:
    """Runs a command as a shell's background job, which ignores SIGINT; sends the signal once it has printed `shown`.

    Checks how it and its processes end.
    """
    with subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "-", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in iter(process.stdout.readline, ""):
            lines.append(line)
            if shown in line:
                break
        else:
            pytest.fail(f"the script ended with {process.wait(30)} before it printed {shown!r}:\n{''.join(lines)}")
        assert processes_below(directory)
        process.send_signal(number)
        out = "".join(lines) + process.stdout.read()
        assert process.wait(30) == 130, out
    assert "Traceback" not in out
    assert processes_below(directory) == []

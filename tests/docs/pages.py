"""Pages whose commands run as they stand: their fenced blocks of one language, in order, as one shell's script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

OWN_NETWORK = ("unshare", "--net", "--")
"""A command's own loopback, on which every port is free. Needs root."""


def blocks(page: str, language: str = "sh") -> list[str]:
    """The fenced blocks of docs/`page`, in order."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", (DOCS / page).read_text())


def run_script(
    script: str,
    directory: Path,
    *,
    prefix: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
) -> str:
    """What bash says to `script`, both streams; AssertionError with it if any command of it fails.

    The environment is a new user's: a home and a path, on which this project's commands are. What it leaves running is
    its process group's, which ends with it.
    """
    home = directory.with_name(f"{directory.name}-home")
    home.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    given = {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}
    with TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*prefix, "bash", "-euo", "pipefail", "-c", script],
            cwd=directory,
            env={"HOME": str(home), "PATH": path, **given, **(environment or {})},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process.pid)
            process.wait()
        said.seek(0)
        output = said.read()
    if code is None:
        raise AssertionError(f"not done within {timeout_s:g} s:\n{output}{_logs(directory)}")
    assert code == 0, f"exit code {code}:\n{output}{_logs(directory)}"
    return output


def _end_group(group: int) -> None:
    try:
        os.killpg(group, 9)
    except ProcessLookupError:
        return


def _logs(directory: Path) -> str:
    found = sorted(directory.glob("*.log"))
    return "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in found)


def traced(commands: list[str], change: Callable[[str], str] = lambda text: text) -> str:
    """One script of all blocks, each told before it runs, so that a failure shows where."""
    return "\n".join(f"echo '>>> block {number}'\n{change(block)}" for number, block in enumerate(commands))

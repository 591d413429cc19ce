"""Extracts commands from documentation pages and runs them in a shell."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

OWN_NETWORK = ("unshare", "--net", "--")
"""Prefix that runs a command in a new network namespace, where every port is free. Requires root."""


def blocks(page: str, language: str = "sh") -> list[str]:
    """Returns the fenced blocks of `page`, a path below docs/, in order."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", (DOCS / page).read_text())


def run_script(
    script: str,
    directory: Path,
    *,
    prefix: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
) -> str:
    """Runs `script` in bash; returns its output, stderr included. AssertionError with the output if a command fails.

    The environment is that of a new user, with this project's commands on the path. Background processes of the script
    are killed with its process group.
    """
    home = directory.with_name(f"{directory.name}-home")
    home.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    inherited = {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}
    code: int | None = None
    with TemporaryFile("w+") as stdout:
        process = subprocess.Popen(
            [*prefix, "bash", "-euo", "pipefail", "-c", script],
            cwd=directory,
            env={"HOME": str(home), "PATH": path, **inherited, **(environment or {})},
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        stdout.seek(0)
        output = stdout.read()
    logs = "".join(
        f"\n--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in sorted(directory.glob("*.log"))
    )
    assert code == 0, f"{'timeout' if code is None else f'exit code {code}'}:\n{output}{logs}"
    return output


def traced(commands: list[str], change: Callable[[str], str] = lambda text: text) -> str:
    """Joins blocks to one script that prints each block's number before it runs."""
    return "\n".join(f"echo '>>> block {number}'\n{change(block)}" for number, block in enumerate(commands))

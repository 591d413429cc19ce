"""Follows README.md and the tutorial as a new user does, in a bare Debian (see `scripts/first-hour`).

Runs the commands of the pages in their order and in one directory; servers, which the pages start in a terminal each,
run in the background. Containers have no network, so that the default ports are free; only installations use this
machine's network.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from scripts.demo import FLIGHT_COUNT
from tests.containers.daemon import Docker, DockerError, open_docker
from tests.containers.parts import CERTIFICATES, fetch_debian
from tests.docs import tutorial
from tests.docs.pages import blocks, traced

ROOT = Path(__file__).parents[1]
Origin = Literal["wheel", "source"]
RELEASES = {"12": "bookworm", "13": "trixie"}
MESSAGE_MAX_S: dict[Origin, int] = {"wheel": 60, "source": 180}
"""Seconds from the bare container to the first message consumed"""
COMPILER = "apt install gcc python3-dev"
STEP_TIMEOUT_S = 3600.0
ASSUME_YES = 'APT::Get::Assume-Yes "true";'
BASH = ("bash", "-euo", "pipefail", "-c")
HOME = "/root"
PREAMBLE = """
mark() { echo ">>> $1 $EPOCHREALTIME"; }
serve() {
  "$@" > $2.out 2> $2.log &
  until grep -q READY $2.out; do sleep 0.1; kill -0 $! || { cat $2.log; return 1; }; done
}
stop() { kill $(jobs -p); wait; }
"""
ACTIVATE = ". .venv/bin/activate"


@dataclass(frozen=True)
class Visit:
    """The results of one run through both pages. Durations are in seconds."""

    debian: str
    origin: Origin
    python: str
    modules: str
    """How many modules run compiled"""
    apt_s: float
    pip_s: float
    first_message_s: float
    """From the start of the master until the example of README.md has consumed its message"""
    readme_s: float
    """From the bare container to the end of README.md's commands"""
    tutorial_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the bare container to the first message consumed."""
        return self.apt_s + self.pip_s + self.first_message_s

    @property
    def is_in_time(self) -> bool:
        """Whether the first message was consumed within MESSAGE_MAX_S."""
        return self.total_s <= MESSAGE_MAX_S[self.origin]


def installing(block: str, origin: Origin) -> tuple[str, str]:
    """Splits a block that installs halog into the commands of apt and the others."""
    apt, others = block.split("\n", 1)
    assert " apt install " in apt, block
    if origin == "wheel":
        others, count = re.subn(r"pip install ('?)\.", r"pip install \1halog", others)  # as typed after a release
        assert count == 1, block
    else:
        apt += f"\n{COMPILER}"
    return apt, others


def readme_commands() -> str:
    """Returns README.md's commands that follow the installation: its example with a master, and its block of nodes."""
    _, nodes = blocks("../README.md")
    [example] = blocks("../README.md", "python")
    nodes = re.sub(r"(?m)^(?=ha (master|slave)\b)", "serve ", nodes)
    return f"serve ha master\npython3 - <<'END'\n{example}END\nmark message\nstop\n{nodes}stop\n"


@contextmanager
def bare_container(docker: Docker, image: str, mounts: dict[Path, str], environment: dict[str, str]) -> Iterator[str]:
    """Yields the name of a container that runs nothing, and removes the container at the end."""
    name = f"first-hour-{image.replace(':', '-')}"
    options = ["--network", "none", "--hostname", "localhost"]
    for source, target in mounts.items():
        options += ["--volume", f"{source}:{target}:ro"]
    for variable, value in environment.items():
        options += ["--env", f"{variable}={value}"]
    try:
        docker.run("run", "--detach", "--name", name, *options, image, "sleep", "infinity")
        yield name
    finally:
        docker.run("rm", "--force", name)


def visit(docker: Docker, debian: str, origin: Origin, sources: Path, flight_count: int) -> Visit:
    """Follows both pages in a new container. `sources` has the wheels or the clone.

    Raises DockerError if a command fails, AssertionError if one does not print what the pages say.
    """
    directory = f"{HOME}/halog" if origin == "source" else HOME
    environment = {"HOME": HOME, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    # Installations reach package indexes as this machine does.
    mounts = {Path("/etc/resolv.conf"): "/etc/resolv.conf"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment.pop("PIP_FIND_LINKS", None)
    if CERTIFICATES.exists():
        mounts[CERTIFICATES] = environment["PIP_CERT"] = "/run/certificates.crt"
    if origin == "wheel":
        mounts[sources] = environment["PIP_FIND_LINKS"] = "/wheels"

    def script(*parts: str) -> list[str]:
        return [*BASH, "\n".join([PREAMBLE, f"cd {directory}", *parts])]

    started = time.time()
    with bare_container(docker, f"debian:{debian}", mounts, environment) as name:

        def install(block: str) -> str:
            apt, others = installing(block, origin)
            command = script(apt, "mark apt", others, "mark pip")
            return docker.run_outside_network(name, command, timeout_s=STEP_TIMEOUT_S)

        def run(*parts: str) -> str:
            return docker.run("exec", name, *script(ACTIVATE, *parts), timeout_s=STEP_TIMEOUT_S)

        docker.run("exec", name, "sh", "-c", f"echo '{ASSUME_YES}' > /etc/apt/apt.conf.d/assume-yes")
        if origin == "source":
            docker.run("cp", str(sources), f"{name}:{directory}")
        output = install(blocks("../README.md")[0]) + run(readme_commands(), "mark readme")
        assert "SEND_OK\nhello\n" in output, output
        python = run("python3 --version").split()[-1]
        [modules] = re.findall(r"\((\d+ of \d+) modules", run("ha --version"))
        if origin == "wheel":
            run("! command -v cc")
        tutorial_install, *steps = tutorial.blocks_with(flight_count)
        tutorial_started = time.time()
        install(tutorial_install)
        tutorial.check(run(traced(steps)), flight_count)
        tutorial_s = time.time() - tutorial_started
    marks = {name: float(at) - started for name, at in re.findall(r"(?m)^>>> (\w+) ([\d.]+)$", output)}
    return Visit(
        debian,
        origin,
        python,
        modules,
        apt_s=marks["apt"],
        pip_s=marks["pip"] - marks["apt"],
        first_message_s=marks["message"] - marks["pip"],
        readme_s=marks["readme"],
        tutorial_s=tutorial_s,
    )


def cloned(folder: Path) -> Path:
    """Clones the current commit below `folder`, and returns the directory of the clone."""
    clone = folder / "halog"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(clone)], check=True)
    return clone


@contextmanager
def docker_with_images(debians: list[str]) -> Iterator[tuple[Docker, Path]]:
    """Yields a Docker daemon with an image `debian:N` for each release, and a folder for other files. At the end, stops
    the daemon and deletes the folder."""
    folder = Path(tempfile.mkdtemp(prefix="halog-first-hour-"))
    try:
        with open_docker(folder, network="host") as docker:
            for debian in debians:
                docker.run("import", str(fetch_debian(RELEASES[debian])), f"debian:{debian}")
            yield docker, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(visits: list[Visit]) -> Table:
    """Returns a table with a row for each visit."""
    table = Table("Debian", "Python", "from", "apt", "pip", "message", "total", "aim", "README", "tutorial", "modules",
                  title="Seconds to the first message", title_justify="left", box=None)  # fmt: skip
    for each in visits:
        seconds = (each.apt_s, each.pip_s, each.first_message_s, each.total_s, MESSAGE_MAX_S[each.origin],
                   each.readme_s, each.tutorial_s)  # fmt: skip
        table.add_row(each.debian, each.python, each.origin, *(f"{value:.1f}" for value in seconds), each.modules)
    return table


def main() -> int:
    """Runs all visits and prints the table. Returns 1 if a visit failed or took too long, else 0."""
    parser = argparse.ArgumentParser(prog="scripts/first-hour", description=__doc__)
    parser.add_argument("--debian", choices=RELEASES, help="Debian release (default: both)")
    parser.add_argument("--origin", choices=MESSAGE_MAX_S, help="what pip installs halog from (default: both)")
    parser.add_argument("--wheels", type=Path, help="directory with wheels (default: builds them by scripts/wheels)")
    parser.add_argument("--flights", type=int, default=FLIGHT_COUNT, help="flights of the tutorial (default: all)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes containers and files
    debians = [options.debian] if options.debian else list(RELEASES)
    origins: list[Origin] = [options.origin] if options.origin else list(MESSAGE_MAX_S)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    visits = []
    failed = False
    with docker_with_images(debians) as (docker, folder):
        for origin in origins:
            if origin == "source":
                sources = cloned(folder)
            elif options.wheels:
                sources = options.wheels.absolute()
            else:
                sources = folder / "wheels"
                subprocess.run([ROOT / "scripts" / "wheels", sources], check=True, stdout=subprocess.DEVNULL)
            for debian in debians:
                console.print(f"Debian {debian} from {origin}")
                try:
                    visits.append(visit(docker, debian, origin, sources, options.flights))
                except (AssertionError, DockerError) as error:
                    console.print(str(error), markup=False)
                    failed = True
    console.print(report(visits))
    return int(failed or not all(each.is_in_time for each in visits))


if __name__ == "__main__":
    sys.exit(main())

"""Runs the fuzz targets of tests/fuzz, optionally in parallel, and prints the results of each.

Each target is a separate process (`python -m tests.fuzz TARGET`) with a directory below the work directory:

    TARGET/seeds     the harness's seeds, the saved corpus and the regression inputs, rewritten on each run
    TARGET/corpus    inputs found by fuzzing, kept between runs
    TARGET/crashes   inputs that cause a crash
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import corpus, registry
from tests.fuzz.harness import Harness

ROOT = Path(__file__).parents[1]
TARGET_S_MIN = 5
KEPT_SIZE_MAX = 20_000
KEPT_COUNT_MAX = 60
"""Limits of bytes and inputs saved in the repository per target, so that thirty targets stay below 1 MB and their
replay takes seconds."""
_STATUS = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/")
_HEADER = "| target | s | executions | per s | edges | new inputs | crashes |"


@dataclass
class Outcome:
    """Results of a target."""

    target: str
    seconds: float = 0.0
    executions: int = 0
    edges: int = 0
    new_inputs: int = 0
    crashes: list[Path] = field(default_factory=list)
    trouble: str = ""

    def line(self) -> str:
        """Returns its row of the table."""
        per_s = self.executions / self.seconds if self.seconds else 0.0
        return (
            f"| {self.target} | {self.seconds:.0f} | {self.executions} | {per_s:.0f} | {self.edges} "
            f"| {self.new_inputs} | {len(self.crashes)} |"
        )


def write_inputs(folder: Path, inputs: Iterable[bytes]) -> None:
    """Replaces the contents of `folder` with these inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {hashlib.sha1(data, usedforsecurity=False).hexdigest(): data for data in inputs}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    for name, data in names.items():
        (folder / name).write_bytes(data)


def write_dictionary(path: Path, harness: Harness) -> None:
    """Writes the harness's words in libFuzzer's format."""
    lines = ["".join(f"\\x{byte:02x}" for byte in word) for word in harness.words]
    path.write_text("".join(f'"{line}"\n' for line in lines if line))


def fuzz(target: str, work: Path, seconds: float) -> Outcome:
    """Fuzzes a target for `seconds`, and continues after crashes."""
    folder = work / target
    harness = registry.load(target)
    write_inputs(folder / "seeds", [*harness.seeds(), *corpus.load(target), *corpus.regressions(target)])
    for name in ("corpus", "crashes"):
        (folder / name).mkdir(exist_ok=True)
    write_dictionary(folder / "words", harness)
    outcome = Outcome(target)
    began = time.monotonic()
    log = folder / "log"
    with log.open("wb"):
        pass
    while (left := seconds - (time.monotonic() - began)) > 1 or not outcome.executions:
        crashes_before = len(list((folder / "crashes").iterdir()))
        with log.open("r+b") as output:
            output.seek(0, 2)
            from_here = output.tell()
            subprocess.run(
                [
                    *(sys.executable, "-m", "tests.fuzz", target),
                    f"-max_total_time={max(1, int(left))}",
                    f"-artifact_prefix={folder / 'crashes'}/",
                    *([f"-dict={folder / 'words'}"] if harness.words else []),
                    "-print_final_stats=1",
                    "-reload=0",
                    str(folder / "corpus"),
                    str(folder / "seeds"),
                ],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=left + 120,
                check=False,
            )
        text = log.read_bytes()[from_here:].decode("utf-8", "replace")
        outcome.executions += _statistic(text, "number_of_executed_units")
        outcome.new_inputs += _statistic(text, "new_units_added")
        if found := _STATUS.findall(text):
            outcome.edges = max(outcome.edges, int(found[-1][0]))
        if "stat::number_of_executed_units" not in text:
            outcome.trouble = text.strip().splitlines()[-1] if text.strip() else "no output"
            break
        if len(list((folder / "crashes").iterdir())) == crashes_before and "ERROR: libFuzzer" in text:
            outcome.trouble = f"ended early, see {log}"
            break
    outcome.seconds = time.monotonic() - began
    outcome.crashes = sorted((folder / "crashes").iterdir())
    return outcome


def _statistic(text: str, name: str) -> int:
    found = re.findall(rf"stat::{name}:\s+(\d+)", text)
    return sum(map(int, found))


def keep(target: str, work: Path) -> int:
    """Saves the smallest inputs that reach more code than the seeds in the repository; returns their number."""
    folder = work / target
    merged = folder / "merged"
    write_inputs(merged, [])
    harness = registry.load(target)
    write_inputs(folder / "seeds", [*harness.seeds(), *corpus.regressions(target)])
    seeds = {path.name for path in (folder / "seeds").iterdir()}
    write_inputs(folder / "known", corpus.load(target))
    command = folder / "again"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.fuzz {target} "$@"\n')
    command.chmod(0o755)
    subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz", target),
            "-merge=1",
            *(str(folder / name) for name in ("merged", "seeds", "known", "corpus")),
        ],
        cwd=ROOT,
        env={**os.environ, "HALOG_FUZZ_SELF": str(command.resolve())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=900,
        check=False,
    )
    kept: list[bytes] = []
    size = 0
    for path in sorted(merged.iterdir(), key=lambda path: (path.stat().st_size, path.name)):
        content = path.read_bytes()
        has_room = len(kept) < KEPT_COUNT_MAX and size + len(content) <= KEPT_SIZE_MAX
        if path.name not in seeds and has_room:
            kept.append(content)
            size += len(content)
    corpus.save(target, kept)
    return len(kept)


def main() -> int:
    """Fuzzes the targets and prints the table; returns 1 after a crash or an error."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Fuzz every parser of untrusted bytes.")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="total duration in minutes, divided among the targets (default: 5)"
    )
    parser.add_argument(
        "--target", action="append", choices=sorted(registry.MODULES), help="fuzz only this target; can be repeated"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel targets (default: 1)")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".fuzz", help="directory for inputs and logs (default: .fuzz)"
    )
    parser.add_argument("--keep", action="store_true", help="save inputs that reach new code in tests/fuzz/corpus")
    options = parser.parse_args()
    targets = options.target or list(registry.MODULES)
    seconds = max(TARGET_S_MIN, options.minutes * 60 * options.jobs / len(targets))
    print(_HEADER + "\n|" + " --- |" * _HEADER.count(" | ") + " --- |", flush=True)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda target: fuzz(target, options.work, seconds), targets):
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
    total = Outcome("all", sum(o.seconds for o in outcomes), sum(o.executions for o in outcomes))
    total.new_inputs = sum(o.new_inputs for o in outcomes)
    total.crashes = [crash for o in outcomes for crash in o.crashes]
    print(total.line())
    for outcome in outcomes:
        for crash in outcome.crashes:
            print(f"{outcome.target}: {crash}")
        if outcome.trouble:
            print(f"{outcome.target}: {outcome.trouble}")
    if options.keep:
        for target in targets:
            print(f"{target}: {keep(target, options.work)} inputs kept")
    return 1 if total.crashes or any(outcome.trouble for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

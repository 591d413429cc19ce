"""The order of blocks, the blocks that are already done, and the format of a result file.

Rounds are outermost, then cases, then sides: halog, peer, halog, peer. A block is all points of one case for one
side, on servers started for it, so no other side's servers run at that time. Its results are written when it is
complete; an interrupted benchmark resumes with the interrupted block.

Each line of the file is JSON of one `kind`: `run` (round, case, peer, side, point, figures), `failed` and `skipped`
(round, case, peer, why), and `about` (terms, machine, versions, command; one for each start or continuation).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.cases import Case, Tools
from bench.clients import RunError
from bench.measure import hold_memory
from bench.sides import Side, Terms, say
from scripts.nodes import NodeError

Line = dict[str, Any]


class Block(NamedTuple):
    """One case on one side in one round."""

    round: int
    case: Case
    side: Side

    @property
    def key(self) -> tuple[int, str, str]:
        """The block's key in a file."""
        return self.round, self.case.name, self.side.name


def plan(cases: Sequence[Case], sides: Sequence[Side], rounds: int) -> Iterator[Block]:
    """Yields all blocks in order."""
    for number in range(rounds):
        for case in cases:
            for side in sides:
                if case.asks(side):
                    yield Block(number, case, side)


@dataclass
class File:
    """The lines of a result file; further lines are appended."""

    path: Path

    def lines(self) -> list[Line]:
        """Reads all lines; ignores an unfinished last one."""
        found: list[Line] = []
        text = self.path.read_text() if self.path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(json.loads(line))
        return found

    def append(self, lines: Sequence[Line]) -> None:
        """Appends lines with one write."""
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def done(self) -> set[tuple[int, str, str]]:
        """Returns the keys of the blocks whose runs are in the file."""
        return {(line["round"], line["case"], line["peer"]) for line in self.lines() if line["kind"] == "run"}

    def check(self, terms: Terms) -> None:
        """Raises SystemExit if existing runs used other terms."""
        now = msgspec.to_builtins(terms)
        for line in self.lines():
            if line["kind"] == "about" and line["terms"] != now:
                raise SystemExit(
                    f"{self.path} contains results with {line['terms']}; use the same options or another file"
                )


def run_blocks(blocks: Sequence[Block], tools: Tools, file: File, ballast: Path, no_java: str | None = None) -> None:
    """Runs all blocks that the file lacks. A failed block is recorded, and the next one runs."""
    done = file.done()
    told: set[tuple[str, str]] = set()
    for block in blocks:
        if block.key in done:
            continue
        why_not = (no_java if block.case.needs_java else None) or block.side.missing()
        head = {"round": block.round, "case": block.case.name, "peer": block.side.name}
        if why_not is not None:
            if (block.case.name, block.side.name) not in told:
                told.add((block.case.name, block.side.name))
                say(f"{block.case.name}: {block.side.name} skipped: {why_not}")
                file.append([{"kind": "skipped", **head, "why": why_not}])
            continue
        lines: list[Line] = []
        if tools.terms.ballast:
            hold_memory(ballast)
        try:
            for run in block.case.runs(tools, block.side):
                lines.append({"kind": "run", **head, "side": run.side, "point": run.point, **run.found})
                say(f"round {block.round}, {block.case.name}, {run.point}, {run.side}: {_shown(block.case, run.found)}")
        except (RunError, NodeError, OSError, subprocess.TimeoutExpired) as error:
            say(f"round {block.round}, {block.case.name}, {block.side.name} failed: {error}")
            lines = [{"kind": "failed", **head, "why": str(error)}]
        file.append(lines)


def _shown(case: Case, found: Line) -> str:
    figures = [
        f"{found[metric.key]:,.{metric.digits}f} {metric.heading}" for metric in case.metrics if metric.key in found
    ]
    if "foreign_cores" in found:
        figures.append(f"others {found['foreign_cores']:.2f} cores")
    return ", ".join(figures)

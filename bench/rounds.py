"""Which block comes when, what of it is there already, and what a file of runs holds.

Rounds are outermost, then cases, then sides: ours, theirs, ours, theirs. A block is all points of one case for one
side, on servers started for it, so nobody else's run meanwhile. Its runs are written when it is complete: a benchmark
that was cut goes on with the block in which it was.

A line of the file is JSON, of one `kind`: `run` (round, case, peer, side, point, figures), `failed` and `skipped`
(round, case, peer, why), `about` (terms, machine, versions, command; one for each time that it was begun or continued).
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
    """One side's turn at a case."""

    round: int
    case: Case
    side: Side

    @property
    def key(self) -> tuple[int, str, str]:
        """What names it in a file."""
        return self.round, self.case.name, self.side.name


def plan(cases: Sequence[Case], sides: Sequence[Side], rounds: int) -> Iterator[Block]:
    """Every block, in order."""
    for number in range(rounds):
        for case in cases:
            for side in sides:
                if case.asks(side):
                    yield Block(number, case, side)


@dataclass
class File:
    """The lines of a file, and where further ones go."""

    path: Path

    def lines(self) -> list[Line]:
        """All of them; an unfinished last one does not count."""
        found: list[Line] = []
        text = self.path.read_text() if self.path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(json.loads(line))
        return found

    def append(self, lines: Sequence[Line]) -> None:
        """With one write."""
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def done(self) -> set[tuple[int, str, str]]:
        """Blocks that have their runs."""
        return {(line["round"], line["case"], line["peer"]) for line in self.lines() if line["kind"] == "run"}

    def check(self, terms: Terms) -> None:
        """SystemExit if the runs that are there were taken on other terms."""
        now = msgspec.to_builtins(terms)
        for line in self.lines():
            if line["kind"] == "about" and line["terms"] != now:
                raise SystemExit(f"{self.path} was begun with {line['terms']}; give the same, or another file")


def run_blocks(blocks: Sequence[Block], tools: Tools, file: File, ballast: Path, no_java: str | None = None) -> None:
    """All blocks that the file does not have. One that fails is noted, and the next one is begun."""
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
                say(f"{block.case.name}: {block.side.name} is left out: {why_not}")
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

"""What is recorded of every run: history, statistics, broken promises."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import TYPE_CHECKING

import trio

from ha.errors import HalogError
from tests.checkers import tasks
from tests.checkers.history import Answered, Consumed, Crashed, History, Sent
from tests.checkers.violation import Violation
from tests.sim.process import leaves

if TYPE_CHECKING:
    from tests.sim.process import Machine
    from tests.sim.world import World

CRASH = "crash"
"""As a checker: a process ended by an unexpected exception"""
SIMULATOR = "simulator"
"""As a checker: the run itself failed"""
ENDED = "ended"
"""As a checker: a process ended with an error of halog's that reports a problem of its store or disk"""
VIOLATION_COUNT_MAX = 20
LINES_SHOWN = 8


class Observer:
    """Collects the history, the violations and the statistics of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.history = History()
        self.violations: list[Violation] = []
        self.statuses: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._texts: set[str] = set()

    def violate(self, checker: str, text: str) -> None:
        """Records a broken promise."""
        if text in self._texts:
            return  # the same again: a node that can't start is restarted repeatedly
        self._texts.add(text)
        if len(self.violations) < VIOLATION_COUNT_MAX:
            self.world.note(f"VIOLATION {checker} {text}")
            self.violations.append(Violation(checker, f"at {trio.current_time():.3f} s: {text}"))

    def judged(self, found: list[Violation]) -> None:
        """Records the findings of a checker."""
        for violation in found:
            self.violate(*violation)

    # ---- clients

    def on_sent(self, sent: Sent) -> None:
        """A client is about to send a message."""
        self.history.add(sent)

    def on_answer(self, answered: Answered) -> None:
        """A client was answered, or never will be."""
        self.history.add(answered)
        self.statuses[answered.status] += 1

    def on_consumed(self, event: Consumed, physical_offset: int) -> None:
        """A consumer received a message."""
        self.history.add(event)

    # ---- nodes

    def on_start(self, machine: Machine) -> None:
        """A node is about to start."""

    def on_open(self, machine: Machine) -> None:
        """A node has opened its store and serves."""

    def on_crash(self, machine: Machine, kind: str) -> None:
        """A node is killed, or loses power; its disk is still unchanged."""
        self.history.add(Crashed(trio.current_time(), machine.name, "power" if kind == "power" else "kill"))

    def on_power_lost(self, machine: Machine) -> None:
        """A node has lost power; its disk has its final state."""

    def on_end(self, machine: Machine, failure: BaseException | None, *, is_excused: bool) -> None:
        """A process ended on its own: it was stopped, or it failed."""
        if failure is not None:
            self.history.add(Crashed(trio.current_time(), machine.name, "kill"))
        if failure is not None and not is_excused:
            for leaf in leaves(failure):
                if not isinstance(leaf, HalogError):
                    places = "".join(traceback.format_exception(leaf)[-LINES_SHOWN:])
                    self.violate(CRASH, f"{machine.name} ended by its own fault: {leaf!r}\n{places}")
                else:
                    self.violate(ENDED, f"{machine.name} ended on its own: {type(leaf).__name__}: {leaf}")

    def on_converged(self) -> None:
        """All nodes have the same log and know it; from now on every put must be PUT_OK."""
        raise NotImplementedError

    def check_consumed(self) -> None:
        """Checks that a consumer that started at 0 has received everything."""
        raise NotImplementedError

    def on_node_stopped(self, name: str, left: list[str]) -> None:
        """A process has ended: none of its tasks may remain."""
        self.judged(tasks.report(name, left))

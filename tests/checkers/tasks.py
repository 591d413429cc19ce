"""No task outlives its node.

Promises: when a node has ended, however it did, no Trio task that it started runs any more: neither in its nursery nor
as a system task.
Fault model: stop, kill (cancellation of everything it runs), a failure that ends the node.
Does not look at: threads, tasks that a node cancelled and that end while it is still ending.

    watch = TaskWatch()
    with watch.of("m1"):            # what is started in here, and by it, is m1's
        nursery.start_soon(run_node)
    ...
    violations = watch.check("m1")  # after it has ended

Tasks are told apart by a context variable, which a task hands to those it starts; system tasks, which begin with a
context of their own, by the module that their coroutine comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import trio

from tests.checkers.violation import Violation

CHECKER = "tasks"
_OWNER: ContextVar[str] = ContextVar("owner of a task", default="")
_SHOWN_MAX = 5


class TaskWatch:
    """Knows which tasks belong to which node. For use within one Trio run."""

    @contextmanager
    def of(self, node: str) -> Iterator[None]:
        """Whatever the current task starts in this block belongs to `node`."""
        token = _OWNER.set(node)
        try:
            yield
        finally:
            _OWNER.reset(token)

    def left(self, node: str) -> list[str]:
        """Names of the tasks of a node that run."""
        return [task.name for task in all_tasks() if task.context.get(_OWNER) == node]

    def check(self, node: str) -> list[Violation]:
        """Judge a node that has ended."""
        return report(node, self.left(node))


def report(node: str, left: list[str]) -> list[Violation]:
    """Say that tasks were left behind; nothing if none were."""
    if not left:
        return []
    shown = ", ".join(left[:_SHOWN_MAX]) + (" …" if len(left) > _SHOWN_MAX else "")
    return [Violation(CHECKER, f"{node} has ended, but {len(left)} of its tasks still run: {shown}")]


def check_system_tasks(package: str = "ha.") -> list[Violation]:
    """Judge the whole run, when every node has ended: no task runs code of `package`."""
    left = [task.name for task in all_tasks() if _module(task).startswith(package)]
    return report("every node", left)


def all_tasks() -> list[trio.lowlevel.Task]:
    """Every task of the run, system tasks included."""
    root = trio.lowlevel.current_root_task()
    found: list[trio.lowlevel.Task] = []
    pending = [root] if root is not None else []
    while pending:
        task = pending.pop()
        found.append(task)
        for nursery in task.child_nurseries:
            pending.extend(nursery.child_tasks)
    return found


def _module(task: trio.lowlevel.Task) -> str:
    frame = getattr(task.coro, "cr_frame", None)
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""

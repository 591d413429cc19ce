"""No task outlives its node.

Promises: when a node has ended, however it did, no Trio task that it started is still running, neither in its nursery
nor as a system task.

Fault model: stop, kill (cancellation of all its tasks), a failure that ends the node.

Not checked: threads, and tasks that a node cancelled and that end while it is still ending.

    watch = TaskWatch()
    with watch.of("m1"):            # tasks started in this block, and by them, belong to m1
        nursery.start_soon(run_node)
    ...
    violations = watch.check("m1")  # after it has ended

Tasks are identified by a context variable, which they inherit; system tasks, which start with a context of their own,
by the module of their coroutine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import trio

from tests.checkers.violation import Violation

CHECKER = "tasks"
_OWNER: ContextVar[str] = ContextVar("owner of a task", default="")
_SHOWN_MAX = 5


class TaskWatch:
    """Tracks which tasks belong to which node. For use within one Trio run."""

    @contextmanager
    def of(self, node: str) -> Iterator[None]:
        """Tasks that the current task starts in this block belong to `node`."""
        token = _OWNER.set(node)
        try:
            yield
        finally:
            _OWNER.reset(token)

    def left(self, node: str) -> list[str]:
        """Names of the running tasks of a node."""
        return [task.name for task in all_tasks() if task.context.get(_OWNER) == node]

    def check(self, node: str) -> list[Violation]:
        """Checks a node that has ended."""
        return report(node, self.left(node))


def report(node: str, left: list[str]) -> list[Violation]:
    """Returns a violation for the remaining tasks, if any."""
    if not left:
        return []
    shown = ", ".join(left[:_SHOWN_MAX]) + (" …" if len(left) > _SHOWN_MAX else "")
    return [Violation(CHECKER, f"{node} has ended, but {len(left)} of its tasks still run: {shown}")]


def check_system_tasks(package: str = "ha.") -> list[Violation]:
    """Checks the whole run, when every node has ended: no task runs code of `package`."""
    left = [task.name for task in all_tasks() if _module(task).startswith(package)]
    return report("every node", left)


def all_tasks() -> list[trio.lowlevel.Task]:
    """Every task of the run, including system tasks."""
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

"""How several processes share the tests (pytest-xdist, `--dist loadgroup --no-loadscope-reorder`).

All of Spark's are one process's, and those of one file are: what they share is made once. What takes longest begins
first: Spark, then whatever starts other processes and waits for them.
"""

from __future__ import annotations

import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell does that to its jobs with &, and whatever tests start would ignore their Ctrl-C for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SPARK_FIXTURES = {"spark", "pushdown_spark"}


def _rank(item: pytest.Item) -> int:
    if "spark" in item.keywords or not _SPARK_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return 0
    return 1 if "interop" in item.keywords else 2 if "processes" in item.keywords else 3


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {item.nodeid.partition("::")[0]: 3 for item in items}
    for item in items:
        file = item.nodeid.partition("::")[0]
        files[file] = min(files[file], _rank(item))
    items.sort(key=lambda item: files[item.nodeid.partition("::")[0]])
    for item in items:
        file = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(file if files[file] else "spark"))

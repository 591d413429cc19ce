"""Virtual time for the tests of a folder: its `conftest.py` imports the hook."""

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any

import pytest
import trio
from trio.testing import MockClock


def run_in_virtual_time(
    call: Callable[[], Awaitable[object]], *, clock: trio.abc.Clock | None, **options: Any
) -> object:
    return trio.run(call, clock=clock or MockClock(autojump_threshold=0), **options)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Has a test run in virtual time, unless it is marked `real_time` for its threads or sockets."""
    if iscoroutinefunction(getattr(item, "obj", None)) and not item.get_closest_marker("real_time"):
        item.add_marker(pytest.mark.trio(run=run_in_virtual_time))

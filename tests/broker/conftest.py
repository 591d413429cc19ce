"""A broker for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.node import Node, open_node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """An asynchronous master; in virtual time if the test asks for `autojump_clock`."""
    async with open_node(tmp_path) as node:
        yield node

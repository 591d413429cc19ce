"""The tests of this folder run in virtual time; a broker for each that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.broker.node import Node, open_node
from tests.testing.virtual_time import pytest_itemcollected

__all__ = ["node", "pytest_itemcollected"]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """An asynchronous master."""
    async with open_node(tmp_path) as node:
        yield node

"""pytest fixtures for programs that use halog. pytest finds them through the entry point `pytest11`.

Imports no other module of halog until a fixture is used, so that it does not affect test runs that do not use them.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ha.testing import Master

_NAME_SIZE_MAX = 80
"""Maximum number of characters of a test's name in `halog_name`; brokers accept topics of up to 127."""


@pytest.fixture(scope="session")
def halog_settings() -> Mapping[str, str]:
    """Keys of broker.conf for the master of `halog`; override this fixture in conftest.py."""
    return {}


@pytest.fixture(scope="session")
def halog(halog_settings: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A running master (`ha.testing.Master`) with a name server, on free ports, shared by all tests of the session.

    Use `halog_name` for topics and groups, so that tests don't receive each other's messages."""
    from ha.testing import running_master

    directory = tmp_path_factory.mktemp("halog")
    with running_master(directory, halog_settings) as master:
        yield master
    shutil.rmtree(directory / "store", ignore_errors=True)  # keeps master.log


@pytest.fixture
def halog_name(request: pytest.FixtureRequest) -> str:
    """A name for topics and groups that no other test uses."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:_NAME_SIZE_MAX]
    return f"{name}-{uuid.uuid4().hex[:8]}"

"""A name server for each test that asks for one."""

from collections.abc import AsyncIterator

import pytest

from tests.namesrv.brokers import Site, open_site
from tests.remoting.wire import Peer


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with open_site() as site:
        yield site


@pytest.fixture
def peer(site: Site) -> Peer:
    """A connection to the name server."""
    return site.connect()

"""One etcd server for the tests that neither stop it nor have users."""

from collections.abc import AsyncIterator, Iterator

import pytest
from anyio.from_thread import start_blocking_portal

from tests.failover.etcd_servers import EtcdCluster, open_cluster, require_etcd


@pytest.fixture(scope="session")
def running_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    require_etcd()
    folder = tmp_path_factory.mktemp("etcd")
    with (
        start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(open_cluster(folder)) as cluster,
    ):
        yield cluster


@pytest.fixture
async def cluster(running_etcd: EtcdCluster) -> AsyncIterator[EtcdCluster]:
    """A cluster of one server, without keys and leases."""
    await running_etcd.clear()
    yield running_etcd
    running_etcd.resume()

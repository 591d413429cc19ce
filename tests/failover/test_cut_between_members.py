"""Only the network between a master and its slave is cut; both reach etcd. Runs in network namespaces."""

from pathlib import Path

import pytest
import trio

from tests.failover.etcd_servers import require_etcd
from tests.failover.failovers import placed
from tests.failover.members import Load, open_group
from tests.faults.switch import why_not

pytestmark = [pytest.mark.processes, pytest.mark.long]

NEVER_LATE = {"haMaxTimeSlaveNotCatchup": 600_000, "haHousekeepingInterval": 600_000}
"""Neither ends the wait for the slave within the test"""


async def test_sends_continue_without_the_slave_and_after_its_return(tmp_path: Path) -> None:
    require_etcd()
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with placed(has_network=True, seed=1) as (network, places):
        assert network is not None
        async with (
            open_group(tmp_path, 1, 2, places=places, keys=NEVER_LATE) as members,
            trio.open_nursery() as nursery,
        ):
            load = Load(members.name_server)
            nursery.start_soon(load.run, 4)
            await members.wait_set(1, 2)
            await load.go_on()
            master = members.master_id
            assert master is not None
            for path in network.between("m1", "m2"):
                path.is_open = False
            await members.wait_set(master)
            await load.go_on()
            assert members.master_id == master, "its lease lives, so there is no election"
            for path in network.between("m1", "m2"):
                path.is_open = True
            await members.wait_set(1, 2)
            await load.go_on()
            await load.stop()
            assert await load.lost() == set()
            await members.wait_equal(1, 2)
            nursery.cancel_scope.cancel()

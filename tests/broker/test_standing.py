"""The standing of a broker: storing, acknowledging, and notification of changes."""

import pytest
import trio
import trio.testing

from ha.broker.options import BrokerOptions, BrokerRole
from ha.broker.standing import FOREVER, Standing, fixed_standing
from ha.protocol.codes import ResponseCode


def elected() -> Standing:
    return Standing("b0", 2, is_slave=True, is_elected=True)


@pytest.mark.parametrize("role", BrokerRole)
async def test_configured_role(role: BrokerRole) -> None:
    standing = fixed_standing(BrokerOptions(role=role, broker_name="b0", broker_id=3 * (role is BrokerRole.SLAVE)))
    is_slave = role is BrokerRole.SLAVE
    assert (standing.is_slave, standing.broker_id, standing.epoch) == (is_slave, 3 if is_slave else 0, 0)
    assert standing.still_acknowledges(0) is not is_slave
    assert standing.why_not_stored() == ("this is a SLAVE of b0; send to its master" if is_slave else "")
    assert standing.refusal_code is ResponseCode.SYSTEM_BUSY
    with pytest.raises(AssertionError):
        standing.become_slave(1)


async def test_master_acknowledges_until_its_lease_ends() -> None:
    standing = elected()
    assert standing.broker_id == 2
    assert not standing.still_acknowledges(0)
    standing.become_master(7, trio.current_time() + 2)
    assert (standing.broker_id, standing.epoch, standing.why_not_stored()) == (0, 7, "")
    await trio.sleep(1.9)
    assert standing.still_acknowledges(7)
    assert not standing.still_acknowledges(6), "of another term"
    await trio.sleep(0.1)
    assert not standing.still_acknowledges(7)
    assert "lease ended" in standing.why_not_stored()
    standing.extend(trio.current_time() + 1)
    assert standing.still_acknowledges(7)


async def test_planned_switch_stores_nothing_but_still_acknowledges() -> None:
    standing = elected()
    standing.become_master(1)
    standing.stop_storing("b0 hands over to its member 3")
    assert standing.why_not_stored() == "b0 hands over to its member 3"
    assert standing.still_acknowledges(1)
    standing.store_again()
    assert standing.why_not_stored() == ""
    standing.become_slave(1)
    assert not standing.still_acknowledges(1)
    assert standing.refusal_code is ResponseCode.SERVICE_NOT_AVAILABLE, "4.9's clients retry no other"


async def test_subscribers_are_notified_of_changes() -> None:
    standing, told = elected(), []
    standing.subscribe(lambda: told.append(standing.broker_id))
    seen = standing.revision
    async with trio.open_nursery() as nursery:
        nursery.start_soon(standing.wait_changed, seen)
        await trio.testing.wait_all_tasks_blocked()
        standing.become_master(1)
    standing.extend(FOREVER)
    assert standing.revision == seen + 1, "a renewed lease is no change"
    standing.become_slave(2)
    standing.extend(FOREVER)
    assert not standing.still_acknowledges(2), "a slave has no lease"
    assert told == [0, 2]
    with pytest.raises(AssertionError):
        standing.become_slave(1)

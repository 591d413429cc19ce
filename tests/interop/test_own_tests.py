"""Some of RocketMQ's own integration tests, against halog; docs/compatibility.md has the results of all of them."""

import pytest

from tests.interop.own_tests import open_own_tests
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.sdk_cluster import HALOG

CLASSES = {
    "client.producer.querymsg.QueryMsgByKeyIT": 4,
    "client.producer.transaction.TransactionalMsgIT": 1,
    "client.producer.order.OrderMsgIT": 3,
}


@pytest.mark.parametrize("release", ["4.9.7"], indirect=True)
async def test_some_of_rocketmqs_own_tests_pass(children: Children, release: Release) -> None:
    """Tests of 4.9.7, which need the fewest jars."""
    async with open_own_tests(children, release.version, HALOG) as tests:
        for name, count in CLASSES.items():
            outcomes = await tests.run(name)
            assert [outcome for outcome in outcomes if outcome.outcome != "passed"] == []
            assert len(outcomes) == count, outcomes

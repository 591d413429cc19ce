"""A failover of each kind under load; scripts/failovers runs any number of them."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.demo.interruption import interrupt
from tests.failover.etcd_servers import require_etcd
from tests.failover.failovers import KINDS, run_failovers
from tests.failover.grpc_clients import LANGUAGES
from tests.faults.switch import NO_IPROUTE2, why_not
from tests.interop.releases import require_java

pytestmark = [pytest.mark.processes, pytest.mark.long]


def possible(*kinds: str) -> list[str]:
    """Leaves out cuts where there are no network namespaces."""
    require_etcd()
    missing = why_not()
    if missing == NO_IPROUTE2 and os.environ.get("CI", "").lower() == "true":
        pytest.fail(missing, pytrace=False)
    return [kind for kind in kinds if kind != "cut" or not missing]


async def test_nothing_acknowledged_is_lost_or_acknowledged_twice(tmp_path: Path) -> None:
    kinds = possible(*KINDS)
    said: list[str] = []
    outcome = await run_failovers(tmp_path, kinds, in_flight=16, seed=1, say=said.append)
    assert outcome.violations == [], said
    assert outcome.consumed >= outcome.acknowledged
    assert sorted(outcome.gaps) == sorted(kinds)


async def test_what_rocketmq_5s_clients_rely_on(tmp_path: Path) -> None:
    """With rocketmq-python-client and rocketmq-client-java at the members' own gRPC ports and at a front."""
    require_java()
    said: list[str] = []
    kinds = possible("kill", "freeze", "cut")
    outcome = await run_failovers(tmp_path, kinds, in_flight=1, seed=1, say=said.append, languages=LANGUAGES)
    assert outcome.violations == [], said
    assert outcome.grpc["acknowledgements answered OK"] > 0


def test_interrupted_the_script_ends_its_processes(tmp_path: Path) -> None:
    require_etcd()
    directory = tmp_path / "failovers"
    command = [sys.executable, "-m", "scripts.failovers", "--kinds", "kill", "--directory", str(directory)]
    interrupt(command, "kill", signal.SIGINT, directory)

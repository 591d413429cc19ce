"""Runs the commands of the tutorial, failover.md, scaling.md and upgrading.md, except for installations."""

import os
from pathlib import Path

import pytest

from ha.cli import run
from scripts.demo import FLIGHT_COUNT
from tests.docs import tutorial
from tests.docs.pages import OWN_NETWORK, blocks, run_script, traced
from tests.failover.etcd_servers import require_etcd

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may create network namespaces")

#: Waits until the group has a master that the others follow.
ELECTED = """
status() { ha status --admin 127.0.0.1:11913 --admin 127.0.0.1:12913 --admin 127.0.0.1:13913 --json 2> status.log; }
export HALOG_ADMIN_TOKEN=let-me-switch-it
until status | grep -q '"in_sync": 2'; do sleep 0.5; done
"""
#: Makes sure that member 2 is not the master, since the page's command makes it one.
NOT_2 = """
ha switch --to 3 --reason first --admin 127.0.0.1:11913 || true
until status | grep -q '"in_sync": 2'; do sleep 0.5; done
"""


def test_upgrading_page(tmp_path: Path) -> None:
    assert "fileReservedTime=48" in run_script(traced(blocks("upgrading.md")), tmp_path)


@pytest.mark.processes
@needs_root
def test_failover_page(tmp_path: Path) -> None:
    require_etcd()
    group, switch = blocks("failover.md")
    started = "".join(line for line in group.splitlines(True) if not line.startswith(("pip install", "apt install")))
    output = run_script(traced(["ip link set lo up", started, ELECTED, NOT_2, switch]), tmp_path, prefix=OWN_NETWORK)
    assert "broker-a: member 2 is master, epoch " in output.partition(">>> block 4")[2]


@pytest.mark.processes
def test_scaling_page(tmp_path: Path) -> None:
    """With a shorter time to settle: tests/cli/test_broker.py has producers, on a virtual clock."""
    start, grow, drain, undrain, stop = blocks("scaling.md")
    assert drain == "ha broker drain broker-c\n"
    show = "ha topic describe orders --json\n"
    steps = traced([start, grow, show, drain, undrain, stop])
    try:
        told = run_script(steps.replace(drain, "ha broker drain broker-c --settle 0 --wait 200\n"), tmp_path)
    finally:
        run(["cluster", "down", "--dir", str(tmp_path / "cluster")])
    assert "broker-c: 1 topics and 1 groups created" in told
    assert told.count('"broker": "broker-c"') == 4
    assert told.count("broker-c: drained; it can be stopped") == 2
    assert "broker-c: producers may send to its " in told


@pytest.mark.processes
@pytest.mark.spark
@needs_root
@pytest.mark.parametrize("count", [20_000, pytest.param(FLIGHT_COUNT, marks=pytest.mark.long)])
def test_tutorial(count: int, tmp_path: Path) -> None:
    """Runs tutorial.md with the first `count` flights."""
    install, *steps = tutorial.blocks_with(count)
    assert "pip install '.[spark,demo]'" in install  # tests/packaging tests the installation
    environment = {"SPARK_LOCAL_IP": "127.0.0.1"}
    script = traced(["ip link set lo up", *steps])
    tutorial.check(run_script(script, tmp_path, prefix=OWN_NETWORK, environment=environment, timeout_s=580), count)
    assert not list(tmp_path.iterdir()), "the last step removes everything"

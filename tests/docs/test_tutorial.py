"""docs/tutorial.md from its first command to its last, in an empty folder, but for what pip would fetch."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from scripts.demo import FLIGHT_COUNT, flights
from tests.docs.pages import OWN_NETWORK, blocks, run_script, traced

pytestmark = [
    pytest.mark.processes,
    pytest.mark.spark,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces, where every port is free"),
]


def latest(count: int) -> tuple[str, float]:
    """The airline whose first `count` flights left latest, and how many minutes on average."""
    delays = defaultdict(list)
    for message in flights(count):
        flight = json.loads(message.body)
        if flight["dep_delay"] is not None:
            delays[flight["carrier"]].append(flight["dep_delay"])
    return max(((carrier, mean(minutes)) for carrier, minutes in delays.items()), key=lambda each: each[1])


@pytest.mark.parametrize("count", [20_000, pytest.param(FLIGHT_COUNT, marks=pytest.mark.long)])
def test_the_tutorial_as_it_stands(count: int, tmp_path: Path) -> None:
    """With so many of the flights."""
    install, *steps = blocks("tutorial.md")
    assert "pip install '.[spark,demo]'" in install  # the tests' own environment has that; tests/packaging builds it
    assert sum("for row in rows\n" in step for step in steps) == 1
    script = traced(
        ["ip link set lo up", *steps],
        lambda text: text.replace("for row in rows\n", f"for row, _ in zip(rows, range({count}))\n"),
    )
    output = run_script(
        script, tmp_path, prefix=OWN_NETWORK, environment={"SPARK_LOCAL_IP": "127.0.0.1"}, timeout_s=580
    )
    assert f"{{'SEND_OK': {count}}}" in output
    assert '"carrier": "HA"' in output
    assert "SLAVE_NOT_AVAILABLE" in output
    assert "exit code 3" in output
    carrier, minutes = latest(count)
    table = output.partition("late_minutes")[2]
    first = re.search(r"\| +(\w\w)\| *(\d+)\| *([\d.]+)\|", table)
    assert first, table
    assert first[1] == carrier
    assert float(first[3]) == pytest.approx(minutes)
    if count == FLIGHT_COUNT:
        assert (carrier, round(minutes)) == ("F9", 20), "as the page says"
    assert not list(tmp_path.iterdir()), "the last step leaves nothing"

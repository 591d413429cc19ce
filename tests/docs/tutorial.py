"""The commands of the tutorial, with as many flights as a test has time for, and what they must print."""

import json
import re
from collections import defaultdict
from statistics import mean

from scripts.demo import FLIGHT_COUNT, flights
from tests.docs.pages import blocks


def blocks_with(count: int) -> list[str]:
    """Returns the tutorial's blocks in order; they send the first `count` flights. The first block installs."""
    found = blocks("tutorial.md")
    assert sum("for row in rows\n" in block for block in found) == 1
    return [block.replace("for row in rows\n", f"for row, _ in zip(rows, range({count}))\n") for block in found]


def check(output: str, count: int) -> None:
    """Checks what the blocks printed. AssertionError."""
    for expected in (f"{{'SEND_OK': {count}}}", '"carrier": "HA"', "SLAVE_NOT_AVAILABLE", "exit code 3"):
        assert expected in output, expected
    carrier, minutes = _latest(count)
    table = output.partition("late_minutes")[2]
    first = re.search(r"\| +(\w\w)\| *(\d+)\| *([\d.]+)\|", table)
    assert first, table
    assert first[1] == carrier
    assert abs(float(first[3]) - minutes) < 1e-6
    if count == FLIGHT_COUNT:
        assert (carrier, round(minutes)) == ("F9", 20), "as the page says"


def _latest(count: int) -> tuple[str, float]:
    """Returns the airline with the highest mean delay of the first `count` flights, and that delay in minutes."""
    delays = defaultdict(list)
    for message in flights(count):
        flight = json.loads(message.body)
        if flight["dep_delay"] is not None:
            delays[flight["carrier"]].append(flight["dep_delay"])
    return max(((carrier, mean(minutes)) for carrier, minutes in delays.items()), key=lambda each: each[1])

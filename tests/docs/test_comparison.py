"""Figures of the comparison with other systems, and of README.md, are those of docs/benchmarks.md."""

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from scripts.demo import FLIGHT_COUNT
from tests.docs.pages import DOCS, ROOT

BENCHMARKS = (DOCS / "benchmarks.md").read_text()
README = (ROOT / "README.md").read_text()
FIGURE = re.compile(r"(?<![\w.])\d+\.\d\d(?![\w.])| \d+ MiB")
SOURCE = re.compile(r"\[[^]]+\]\(https://[^)]+\)")
"""A link to another system's documentation, whose text can have a version."""


@pytest.mark.parametrize("page", [DOCS / "comparison.md", ROOT / "README.md"], ids=lambda page: page.name)
def test_figures_are_those_of_the_benchmarks(page: Path) -> None:
    figures = FIGURE.findall(SOURCE.sub("", page.read_text()))
    assert len(figures) > 1
    assert [figure for figure in figures if figure not in BENCHMARKS] == []


def table(text: str, heading: str) -> Iterator[dict[str, str]]:
    """Yields the rows, as column -> cell, of the table below a heading; a blank first cell repeats the last one."""
    lines = text.partition(f"\n## {heading}\n")[2].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|"))
    block = takewhile(lambda line: line.startswith("|"), lines[begin:])
    columns, _, *rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in block]
    first = ""
    for row in rows:
        first = row[0] or first
        yield dict(zip(columns, [first, *row[1:]], strict=True))


def measured() -> dict[tuple[str, str], str]:
    """(row of the comparison, system) -> halog's rate divided by the other's, from the benchmarks."""
    found = {}
    for row in table(BENCHMARKS, "Sends compared with RocketMQ"):
        found[f"sends, {row['in flight']} in flight", "RocketMQ"] = row["halog ÷ RocketMQ"]
    for row in table(BENCHMARKS, "Sends compared with Kafka, NATS, Redis and PostgreSQL"):
        found[f"sends, {row['in flight']} in flight", row["peer"].split()[0]] = row["halog ÷ peer"]
    for row in table(BENCHMARKS, "Consuming, copying, starting"):
        name = row["measurement"].partition(", MB/s")[0].partition(", messages/s")[0]
        found[name.replace("Java client, pulls", "consuming by pulls"), "RocketMQ"] = row["halog ÷ RocketMQ"]
    return found


def test_each_ratio_is_that_of_its_row_and_system() -> None:
    compared = {
        (row["measurement"], system.split()[0]): cell
        for row in table((DOCS / "comparison.md").read_text(), "Figures")
        for system, cell in row.items()
        if cell and system != "measurement"
    }
    assert len(compared) == 16
    assert compared == {place: measured()[place] for place in compared}


def test_statements_about_other_systems_name_their_source() -> None:
    rows = list(table((DOCS / "comparison.md").read_text(), "Properties"))
    assert len(rows) > 8
    for row in rows:
        if row[""] not in {"runs on", "clients"}:  # as the benchmarks start and use them
            for system in ("RocketMQ", "Kafka", "NATS JetStream", "Redis Streams"):
                assert row[system] == "–" or SOURCE.search(row[system]), f"{row['']}: {system}"


def test_the_demo_sends_as_many_flights_as_the_readme_says() -> None:
    assert f"{FLIGHT_COUNT:,} flight records" in README

"""Figures of the comparison with other systems, and of README.md, are those of docs/benchmarks.md."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

BENCHMARKS = (DOCS / "benchmarks.md").read_text()
FIGURE = re.compile(r"(?<![\w.])\d+\.\d\d(?![\w.])| \d+ MiB")


@pytest.mark.parametrize("page", [DOCS / "comparison.md", ROOT / "README.md"], ids=lambda page: page.name)
def test_figures_are_those_of_the_benchmarks(page: Path) -> None:
    figures = FIGURE.findall(page.read_text())
    assert [figure for figure in figures if figure not in BENCHMARKS] == []


def column(text: str, heading: str) -> dict[str, str]:
    """Row -> cell of the table of `text` with this column."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    for index, row in enumerate(rows):
        if heading in row:
            place, body = row.index(heading), rows[index + 2 :]
            return {each[0]: each[place] for each in body if len(each) == len(row)}
    raise AssertionError(heading)


def test_ratios_of_sends_are_in_their_rows() -> None:
    compared = {
        row.split()[1]: cell for row, cell in column(section("## Figures"), "RocketMQ 4.9.7").items() if "flight" in row
    }
    measured = column(BENCHMARKS, "halog ÷ RocketMQ")
    assert compared == {number: measured[number].strip("*") for number in compared}
    assert len(compared) == 4


def section(heading: str) -> str:
    return (DOCS / "comparison.md").read_text().partition(heading)[2]

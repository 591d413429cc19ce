"""docs/known-cases.md names exactly the tests of tests/known_cases."""

import re

from tests.docs.pages import DOCS, ROOT

KNOWN_CASES = ROOT / "tests" / "known_cases"
TEXT = (DOCS / "known-cases.md").read_text()
ROWS = re.findall(r"^\| ((?:#|PR )\d.*) \|$", TEXT, re.MULTILINE)
NAMED = set(re.findall(r"`(test_\w+\.py::\w+)`", TEXT))
DEFINITION = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


def test_every_known_case_is_named() -> None:
    found = {
        f"{path.name}::{name}"
        for path in KNOWN_CASES.glob("test_*.py")
        for name in DEFINITION.findall(path.read_text())
    }
    assert found == NAMED


def test_rows_match_the_numbers_of_their_tests() -> None:
    """A test's name contains the number of an issue of its row, and its file describes that issue."""
    assert ROWS
    for row in ROWS:
        issues, *_, tests = row.split(" | ")
        numbers = set(re.findall(r"\d+", issues))
        names = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert names or "`tests/" in tests, row
        for file, name in names:
            assert name.split("_")[1] in numbers, row
            assert f"#{name.split('_')[1]}" in (KNOWN_CASES / file).read_text(), row

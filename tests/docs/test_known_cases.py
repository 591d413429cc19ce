"""docs/known-cases.md: the tests that it names exist, and it names each test of tests/known_cases."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, ROOT

KNOWN_CASES = ROOT / "tests" / "known_cases"
TEXT = (DOCS / "known-cases.md").read_text()
ROWS = re.findall(r"^\| ((?:#|PR )\d.*) \|$", TEXT, re.MULTILINE)
NAMED = sorted(set(re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py::\w+)`", TEXT)))
DEFINITION = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


@pytest.mark.parametrize("name", NAMED)
def test_the_tests_exist(name: str) -> None:
    path, _, function = name.partition("::")
    file = ROOT / path if path.startswith("tests/") else KNOWN_CASES / path
    assert function in DEFINITION.findall(file.read_text())


def test_each_known_case_is_named() -> None:
    found = {
        f"{path.name}::{name}"
        for path in KNOWN_CASES.glob("test_*.py")
        for name in DEFINITION.findall(path.read_text())
    }
    assert found == {name for name in NAMED if "/" not in name}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_the_numbers_of_its_tests(row: str) -> None:
    """A test is called by the number of an issue of its row, and says in its file what that was."""
    issues, *_, tests = row.split(" | ")
    numbers = set(re.findall(r"\d+", issues))
    names = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
    assert names or "`tests/" in tests
    for file, name in names:
        assert name.split("_")[1] in numbers
        assert f"#{name.split('_')[1]}" in (KNOWN_CASES / file).read_text()

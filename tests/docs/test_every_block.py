"""Every fenced block of README.md and docs/ is run by a test that is named here, or says itself why not.

A block that is not run stands below a line `*Not run by a test: REASON.*`. One without a language is what something
prints, or a drawing; one of `console` shows how a command is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

RUN_BY = {
    ("README.md", "sh"): "tests/readme/test_readme.py",
    ("README.md", "python"): "tests/readme/test_readme.py",
    ("docs/attach-to-rocketmq.md", "sh"): "tests/interop/test_how_to.py",
    ("docs/cli.md", "sh"): "tests/cli/test_docs.py",
    ("docs/disaster-recovery.md", "sh"): "tests/interop/test_how_to.py",
    ("docs/failover.md", "sh"): "tests/docs/test_failover_page.py",
    ("docs/observability.md", "json"): "tests/metrics/test_documentation.py",
    ("docs/observability.md", "python"): "tests/metrics/test_documentation.py",
    ("docs/observability.md", "sh"): "tests/metrics/test_documentation.py",
    ("docs/observability.md", "yaml"): "tests/metrics/test_documentation.py",
    ("docs/sdk.md", "python"): "tests/client/test_documentation.py",
    ("docs/security.md", "yaml"): "tests/docs/test_snippets.py",
    ("docs/spark.md", "python"): "tests/spark/test_docs.py",
    ("docs/spark.md", "sh"): "tests/spark/test_docs.py",
    ("docs/tls.md", "bash"): "tests/tls/test_documentation.py",
    ("docs/tls.md", "python"): "tests/tls/test_documentation.py",
    ("docs/tutorial.md", "sh"): "tests/docs/test_tutorial.py",
    ("docs/upgrading.md", "sh"): "tests/docs/test_snippets.py",
}
REASON = re.compile(r"^\*Not run by a test: .+\.\*$", re.MULTILINE)
SHOWN = {"", "console", "text"}
COMMAND = re.compile(
    r"^(ha|python3?|pip|apt(-get)?|scripts/\w+|bench/run|docker|kubectl|curl|systemctl) ", re.MULTILINE
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fenced(page: Path) -> Iterator[tuple[str, int, str, str]]:
    """Language of each block, its line, its text, and the paragraph above it."""
    text = page.read_text()
    for match in re.finditer(r"(?ms)^```(\w*)[^\n]*\n(.*?)^```$", text):
        above = text[: match.start()].rstrip().rpartition("\n\n")[2]
        yield match[1], text.count("\n", 0, match.start()) + 1, match[2], above


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_is_run_or_says_why_not(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    assert page.read_text().count("\n```") == 2 * len(list(fenced(page))), "a block has no end"
    for language, line, block, above in fenced(page):
        if language == "":
            assert not COMMAND.search(block), f"{name}:{line}: commands are a block of sh"
        is_excused = language in SHOWN or REASON.search(above)
        assert is_excused or (name, language) in RUN_BY, f"{name}:{line}: no test runs this {language} block"


@pytest.mark.parametrize(("place", "test"), RUN_BY.items(), ids=str)
def test_the_test_that_is_named_reads_the_page(place: tuple[str, str], test: str) -> None:
    name, language = place
    assert any(found == language for found, *_ in fenced(ROOT / name)), "there is no such block any more"
    source = (ROOT / test).read_text()
    assert Path(name).name in source or f'"{Path(name).stem}.md"' in source

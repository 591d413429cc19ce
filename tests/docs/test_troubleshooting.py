"""Messages that docs/troubleshooting.md quotes are those of the code."""

import re

from tests.docs.pages import DOCS, ROOT

TEXT = (DOCS / "troubleshooting.md").read_text()
SOURCES = "".join(path.read_text() for path in (ROOT / "ha").rglob("*.py"))


def test_quoted_messages_are_those_of_the_code() -> None:
    seen = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| ")]
    quoted = [text for cell in seen for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 15
    assert [text for text in quoted if text.removesuffix("GROUP") not in SOURCES] == []

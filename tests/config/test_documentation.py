"""docs/configuration.md lists the keys as they are."""

from ha.config import Config
from ha.config.check import fields
from scripts.configuration_table import DOCUMENT, render


def test_the_tables_are_up_to_date() -> None:
    text = DOCUMENT.read_text()
    assert render(text) == text, "run: scripts/reference"
    assert all(f"| `{key}` |" in text for key in fields(Config))

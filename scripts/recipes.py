"""Copies the programs of examples/ into docs/recipes.md, below comments that name them."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"

_BLOCK = re.compile(r"(?ms)(^<!-- examples/(\w+\.py) -->\n+)```python\n.*?^```$")


def render(page: str) -> str:
    """Returns `page` with the current text of each named program in the block below its name."""
    return _BLOCK.sub(lambda match: f"{match[1]}```python\n{(EXAMPLES / match[2]).read_text()}```", page)


def named(page: str) -> list[str]:
    """Returns the names of the programs in `page`, in order."""
    return [match[2] for match in _BLOCK.finditer(page)]

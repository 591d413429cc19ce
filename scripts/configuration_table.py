"""Write the tables of docs/configuration.md anew from the fields of ha/config/model.py.

What stands outside the two marked tables is left as it is. A test fails while the file is not up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import pairwise
from pathlib import Path

from ha.config import Config, NameServerConfig
from ha.config.check import accepted, fields

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"


def notes(struct: type[Config] | type[NameServerConfig]) -> dict[str, str]:
    """Field name -> the docstring that stands below it in the source, on one line; inherited fields too."""
    found: dict[str, str] = {}
    for each in struct.__mro__:
        if each.__module__.startswith("ha."):
            module = ast.parse(Path(str(sys.modules[each.__module__].__file__)).read_text())
            body = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == each.__name__).body
            found |= _notes_of(body)
    return found


def _notes_of(body: list[ast.stmt]) -> dict[str, str]:
    found = {}
    for node, following in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant)
            found[node.target.id] = " ".join(str(following.value.value).split())
    return found


def table(struct: type[Config] | type[NameServerConfig]) -> str:
    """All keys of `struct` as a Markdown table, in the order of the source."""
    texts = notes(struct)
    lines = ["| key | accepted | default | |", "|---|---|---|---|"]
    for key, field in fields(struct).items():
        default = "" if field.default in ("", None, -1) else str(field.default)
        if isinstance(field.default, bool):
            default = default.lower()
        lines.append(f"| `{key}` | {accepted(field.type)} | {default} | {texts.get(field.name, '')} |")
    return "\n".join(lines)


def render(document: str) -> str:
    """`document` with the tables between its markers replaced."""
    for struct in (Config, NameServerConfig):
        begin, end = f"<!-- table {struct.__name__} -->", "<!-- end -->"
        document = re.sub(f"(?s){begin}.*?{end}", lambda _: f"{begin}\n{table(struct)}\n{end}", document, count=1)  # noqa: B023
    return document


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text()))

"""The tables of permissions in docs/security.md, made of the rules of ha/acl; `scripts/reference` writes them.

What stands outside the marked tables is left as it is. A test fails while the file is not up to date.
"""

from __future__ import annotations

from collections.abc import Mapping

from ha.acl import BROKER_RULES, NAME_SERVER_RULES, Rule
from ha.protocol.codes import RequestCode

TABLES: dict[str, Mapping[int, Rule]] = {
    "broker permissions": BROKER_RULES,
    "name server permissions": NAME_SERVER_RULES,
}
"""By the name in the marker."""


def table(rules: Mapping[int, Rule]) -> str:
    """Return the rules as a Markdown table: requests of one rule in one row, rows in the order of their first code."""
    by_text: dict[str, list[int]] = {}
    for code in sorted(rules):
        by_text.setdefault(rules[code].text, []).append(code)
    lines = ["| needs | request codes |", "|---|---|"]
    for text, codes in by_text.items():
        names = ", ".join(f"{code} {RequestCode(code).name}" for code in codes)
        lines.append(f"| {text.replace('|', '&#124;')} | {names} |")
    return "\n".join(lines)


def render(document: str) -> str:
    """Return `document` with the tables between its markers replaced."""
    for name, rules in TABLES.items():
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        head, _, tail = document.partition(begin)
        document = f"{head}{begin}\n{table(rules)}\n{end}{tail.partition(end)[2]}"
    return document

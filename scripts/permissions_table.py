"""Generates the permission tables of docs/security.md from the rules of ha/acl, for `scripts/reference`.

Text outside the marked tables is unchanged. A test fails if the file is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping

from ha.acl import BROKER_RULES, NAME_SERVER_RULES, Rule
from ha.protocol.codes import RequestCode

TABLES: dict[str, Mapping[int, Rule]] = {
    "broker permissions": BROKER_RULES,
    "name server permissions": NAME_SERVER_RULES,
}
"""Name in the marker -> rules."""


def table(rules: Mapping[int, Rule]) -> str:
    """Returns the rules as a Markdown table with one row per rule, in the order of the first request code."""
    by_text: dict[str, list[int]] = {}
    for code in sorted(rules):
        by_text.setdefault(rules[code].text, []).append(code)
    lines = ["| needs | request codes |", "|---|---|"]
    for text, codes in by_text.items():
        names = ", ".join(f"{code} {RequestCode(code).name}" for code in codes)
        lines.append(f"| {text.replace('|', '&#124;')} | {names} |")
    return "\n".join(lines)


def render(document: str) -> str:
    """Returns `document` with the tables between its markers replaced."""
    for name, rules in TABLES.items():
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        head, _, tail = document.partition(begin)
        document = f"{head}{begin}\n{table(rules)}\n{end}{tail.partition(end)[2]}"
    return document

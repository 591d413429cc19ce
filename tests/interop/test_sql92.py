"""SQL92 filters compared with RocketMQ's own: the table of the unit tests, and random expressions.

HALOG_WRITE_TABLES=1 rewrites the table, from 5.5.0.
"""

import os

from tests.broker.sql92_cases import PROPERTIES, SINGLE, Chance, verdicts_of
from tests.broker.test_sql92 import TABLE, table
from tests.interop.releases import Release
from tests.interop.sql92_filter import ask, verdicts

CHANCE_COUNT = 1500
# Only 5.x knows these.
TEXT_WORDS = ("CONTAINS", "STARTSWITH", "ENDSWITH")


def test_verdicts_of_a_filter(release: Release) -> None:
    """No difference, except for words that 4.9.7 does not know: it takes them for the end of the expression."""
    by_chance = Chance(92, has_texts=not release.is_4).expressions(CHANCE_COUNT)
    expressions = [*SINGLE, *by_chance]
    letters = ask(release, expressions, PROPERTIES)
    if os.environ.get("HALOG_WRITE_TABLES") and not release.is_4:
        rows = zip(SINGLE, letters, strict=False)
        TABLE.write_text("".join(f"{expression!a}\t{verdicts(row)}\n" for expression, row in rows))
    differing = {}
    for expression, row in zip(expressions, letters, strict=True):
        is_known = not (release.is_4 and any(word in expression.upper() for word in TEXT_WORDS))
        if is_known and verdicts(row) != (ours := verdicts_of(expression)):
            differing[expression] = row, ours
    assert differing == {}
    seen = set("".join(letters))
    assert seen == set("TFNXE"), "every kind of outcome was met"
    if not release.is_4:
        assert dict(table()) == {expression: verdicts(row) for expression, row in zip(SINGLE, letters, strict=False)}

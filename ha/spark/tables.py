"""Refuses permanent tables with options in CREATE TABLE, as Spark does not pass these on.

Spark (4.2 and 4.3) stores the options of a CREATE TABLE, but passes none of them to a Python data source that reads or
writes the table, only those of WITH (…) in the query itself. For a CREATE TABLE without columns it asks the data source
for the schema; the options of that call are recognized by Spark's own option `provider`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ha.errors import OptionError

_INSTEAD = (
    "CREATE TEMPORARY VIEW name USING halog OPTIONS (path '…', topic '…'), ha.spark.catalog_views(spark, path), or the "
    "options in each statement: FROM name WITH (path = '…')"
)


def refuse_table(options: Mapping[str, str]) -> None:
    """Raises OptionError if `options` are those of a CREATE TABLE, or empty.

    They are empty if a statement uses a permanent table without WITH (…).
    """
    reason = "Spark does not pass a permanent table's options to a Python data source"
    if not options:
        raise OptionError("path", f"there is no option at all; {reason}", _INSTEAD)
    if any(name.lower() == "provider" for name in options):
        raise OptionError("CREATE TABLE", reason, _INSTEAD)

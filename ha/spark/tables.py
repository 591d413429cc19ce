"""Refuses permanent tables, which can't be read.

Spark stores the options of a CREATE TABLE, but passes none of them to a Python data source that reads or writes the
table (4.2 and 4.3), only those of WITH (…) in the query itself. A CREATE TABLE without columns asks the data source for
its schema; its options are recognized by Spark's own `provider`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ha.errors import OptionError

_INSTEAD = (
    "CREATE TEMPORARY VIEW name USING halog OPTIONS (path '…', topic '…'), ha.spark.catalog_views(spark, path), or the "
    "options in each statement: FROM name WITH (path = '…')"
)


def refuse_table(options: Mapping[str, str]) -> None:
    """Raises OptionError for the options of a permanent table, and if there are none, as when such a table is used."""
    reason = "Spark does not pass a permanent table's options to a Python data source"
    if not options:
        raise OptionError("path", f"there is no option at all; {reason}", _INSTEAD)
    if any(name.lower() == "provider" for name in options):
        raise OptionError("CREATE TABLE", reason, _INSTEAD)

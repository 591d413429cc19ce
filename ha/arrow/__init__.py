"""Reads a store directory without its broker. Uses NumPy, but neither Spark nor Trio.

`LogReader` finds the records. ha/arrow/batches.py decodes them into Arrow record batches, which needs pyarrow;
ha/arrow/rows.py decodes them into rows of Python objects. The names below are imported on first use, so that programs
that use only rows don't need pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ha.arrow.decode import decode_batches, decode_pull_body
    from ha.arrow.log_reader import LogReader, QueueRange
    from ha.arrow.queues import QueueId
    from ha.arrow.read_options import DEFAULT_COLUMNS, ReadCounts, ReadOptions, RowFilter
    from ha.arrow.reading import read_arrow
    from ha.arrow.schema import COLUMNS, arrow_schema, check_columns
    from ha.arrow.walking import Damage

__all__ = [
    "COLUMNS",
    "DEFAULT_COLUMNS",
    "Damage",
    "LogReader",
    "QueueId",
    "QueueRange",
    "ReadCounts",
    "ReadOptions",
    "RowFilter",
    "arrow_schema",
    "check_columns",
    "decode_batches",
    "decode_pull_body",
    "read_arrow",
]

_HOMES = {
    "COLUMNS": "schema",
    "DEFAULT_COLUMNS": "read_options",
    "Damage": "walking",
    "LogReader": "log_reader",
    "QueueId": "queues",
    "QueueRange": "log_reader",
    "ReadCounts": "read_options",
    "ReadOptions": "read_options",
    "RowFilter": "read_options",
    "arrow_schema": "schema",
    "check_columns": "schema",
    "decode_batches": "decode",
    "decode_pull_body": "decode",
    "read_arrow": "reading",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ha.arrow.{_HOMES[name]}"), name)

"""Converts Spark's filters to a `RowFilter`.

A condition that a `RowFilter` expresses exactly is applied by the source only. A condition on brokers, or on keys (for
which a `RowFilter` also admits other rows), reduces what is read, and Spark applies it again to the rows. All other
conditions are applied by Spark only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from ha.arrow.read_options import RowFilter

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PLANNER = "pyspark.sql.worker.data_source_pushdown_filters"


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that the source applies while reading: `where` selects records; `brokers` holds the names of the
    brokers to read, None for all."""

    where: RowFilter = RowFilter()
    brokers: frozenset[str] | None = None


def pushdown_is_on() -> bool:
    """Returns whether this process plans a scan with filters.

    Spark refuses a reader that has `pushFilters` unless spark.sql.python.filterPushdown.enabled is set, and does not
    expose the setting to Python. But with the setting on, it plans in a process that runs the module _PLANNER.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PLANNER in sys.modules or (main is not None and main.name == _PLANNER)


def push(filters: Sequence[Filter], columns: tuple[str, ...]) -> tuple[Pushed, list[Filter]]:
    """Returns the conditions that the source applies while it reads `columns`, and those of `filters` that Spark must
    still apply."""
    names = {column.lower(): column for column in columns}
    pushed = Pushed()
    left: list[Filter] = []
    for condition in filters:
        attribute: tuple[str, ...] = getattr(condition, "attribute", ())
        column = names.get(attribute[0].lower()) if len(attribute) == 1 else None
        found = _narrow(column, condition) if column is not None else None
        if found is None:
            left.append(condition)
            continue
        narrowed, exact = found
        if not exact:
            left.append(condition)
        brokers = pushed.brokers if narrowed.brokers is None else narrowed.brokers
        if pushed.brokers is not None and narrowed.brokers is not None:
            brokers = pushed.brokers & narrowed.brokers
        if pushed.where.keys is not None and narrowed.where.keys is not None:
            continue  # a record may have a key of each: the two sets can't be intersected
        pushed = Pushed(where=pushed.where.restrict(narrowed.where), brokers=brokers)
    return pushed, left


def _narrow(column: str, condition: Filter) -> tuple[Pushed, bool] | None:
    values = _values(condition)
    if column in ("topic", "tags") and values is not None and all(isinstance(value, str) for value in values):
        texts = frozenset(values)
        return Pushed(where=RowFilter(topics=texts) if column == "topic" else RowFilter(tags=texts)), True
    if column == "queueId" and values is not None and all(_is_whole(value) for value in values):
        return Pushed(where=RowFilter(queue_ids=frozenset(values))), True
    if column == "brokerName" and values is not None:
        return Pushed(brokers=frozenset(values)), False
    if column == "uniqKey" and values is not None and all(isinstance(value, str) and value for value in values):
        return Pushed(where=RowFilter(keys=frozenset(values))), False
    if column == "keys" and isinstance(condition, EqualTo) and isinstance(condition.value, list | tuple):
        words = [word for word in condition.value if isinstance(word, str) and word]
        return (Pushed(where=RowFilter(keys=frozenset(words[:1]))), False) if words else None
    if column in ("queueOffset", "physicalOffset"):
        bounds = _bounds(condition, 1)
        if bounds is None:
            return None
        begin, end = bounds
        if column == "queueOffset":
            return Pushed(where=RowFilter(queue_offset_begin=begin, queue_offset_end=end)), True
        return Pushed(where=RowFilter(physical_begin=begin, physical_end=end)), True
    if column == "storeTimestamp":
        bounds = _bounds(condition, 1000)
        return (
            None
            if bounds is None
            else (Pushed(where=RowFilter(store_begin_ms=bounds[0], store_end_ms=bounds[1])), True)
        )
    return None


def _values(condition: Filter) -> tuple[Any, ...] | None:
    """Returns the values that the column may have; None for another kind of condition."""
    if isinstance(condition, EqualTo):
        return (condition.value,) if condition.value is not None else None
    if isinstance(condition, In):
        return tuple(value for value in condition.value if value is not None)
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bounds(condition: Filter, unit: int) -> tuple[int | None, int | None] | None:
    """Returns the range [begin, end) of column values that satisfy a comparison with a whole number or a time.

    A bound that the comparison does not set is None; the result is None for another kind of condition or value. `unit`:
    number of units of the filter's value in one unit of the column: 1000 for times (µs in a ms), 1 for numbers.

    Store times are whole milliseconds and Spark's are microseconds: t > 1.5 ms is t >= 2 ms, and so is t >= 1.5 ms.
    """
    value = getattr(condition, "value", None)
    if isinstance(value, datetime) and unit == 1000:
        aware = value if value.tzinfo is not None else None
        if aware is None:
            return None
        value = (aware - _EPOCH) // timedelta(microseconds=1)
    elif not _is_whole(value) or unit != 1:
        return None
    assert isinstance(value, int)
    at_or_after, after = -(-value // unit), value // unit + 1
    if isinstance(condition, GreaterThanOrEqual):
        return at_or_after, None
    if isinstance(condition, GreaterThan):
        return after, None
    if isinstance(condition, LessThan):
        return None, at_or_after
    if isinstance(condition, LessThanOrEqual):
        return None, after
    if isinstance(condition, EqualTo):
        return at_or_after, after
    return None

"""Options of a reader of the log: columns, filter, and the handling of damage and loss."""

from __future__ import annotations

from typing import Literal

import msgspec

from ha.arrow.schema import DEFAULT_COLUMNS
from ha.protocol.compression import BODY_SIZE_MAX

INFLATED_FACTOR_MAX = 4
"""Limit of a batch's decompressed bodies as a multiple of `batch_bytes`: text and JSON rarely exceed it."""


def _both(mine: frozenset[str] | None, others: frozenset[str] | None) -> frozenset[str] | None:
    if mine is None or others is None:
        return others if mine is None else mine
    return mine & others


def _later(mine: int | None, others: int | None) -> int | None:
    if mine is None or others is None:
        return others if mine is None else mine
    return max(mine, others)


def _earlier(mine: int | None, others: int | None) -> int | None:
    if mine is None or others is None:
        return others if mine is None else mine
    return min(mine, others)


class RowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the rows that pass all conditions; None is no condition. Ranges are [begin, end).

    Exact: tags are compared as text after their hash, keys (a word of KEYS, or UNIQ_KEY) after the index.
    """

    topics: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    queue_offset_begin: int | None = None
    queue_offset_end: int | None = None
    physical_begin: int | None = None
    physical_end: int | None = None
    store_begin_ms: int | None = None
    store_end_ms: int | None = None

    def restrict(self, other: RowFilter) -> RowFilter:
        """Return the filter of rows that pass both. ValueError if both have keys: a record may have a word of each."""
        if self.keys is not None and other.keys is not None:
            raise ValueError("two sets of keys can't be combined")
        ids = self.queue_ids if other.queue_ids is None else other.queue_ids
        if self.queue_ids is not None and other.queue_ids is not None:
            ids = self.queue_ids & other.queue_ids
        return RowFilter(
            topics=_both(self.topics, other.topics),
            queue_ids=ids,
            tags=_both(self.tags, other.tags),
            keys=other.keys if self.keys is None else self.keys,
            queue_offset_begin=_later(self.queue_offset_begin, other.queue_offset_begin),
            queue_offset_end=_earlier(self.queue_offset_end, other.queue_offset_end),
            physical_begin=_later(self.physical_begin, other.physical_begin),
            physical_end=_earlier(self.physical_end, other.physical_end),
            store_begin_ms=_later(self.store_begin_ms, other.store_begin_ms),
            store_end_ms=_earlier(self.store_end_ms, other.store_end_ms),
        )


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a reader. Sizes in bytes."""

    columns: tuple[str, ...] = DEFAULT_COLUMNS
    batch_rows: int = 16_384
    """Maximum rows of a batch"""
    batch_bytes: int = 32 << 20
    """Maximum record bytes of a batch (one record may be larger); its decompressed bodies take at most
    INFLATED_FACTOR_MAX times as much"""
    decompress: bool = True
    """Decompress `body`; a body that can't be decompressed is damaged"""
    message_size_max: int = BODY_SIZE_MAX
    """Maximum size of a decompressed body (the brokers' maxMessageSize); a longer one is damaged"""
    on_damage: Literal["report", "skip", "fail"] = "report"
    """report: a row with the known fields, crcOk=false and null elsewhere; skip: count it; fail: CorruptLog"""
    verify_crc: bool = False
    """Check each body's CRC; requesting the column crcOk does so as well"""
    fail_on_data_loss: bool = True
    """Raise RecordsGone for missing records, instead of skipping and counting them"""
    where: RowFilter = RowFilter()

    @property
    def inflated_bytes_max(self) -> int:
        """Maximum size of the decompressed bodies of a batch together (a single one may be larger)."""
        return INFLATED_FACTOR_MAX * self.batch_bytes

    @property
    def checks_crc(self) -> bool:
        """Whether bodies are checked against their CRC."""
        return self.verify_crc or "crcOk" in self.columns


class ReadCounts(msgspec.Struct):
    """Counts of damaged and missing records of a reader."""

    rows: int = 0
    damaged: int = 0
    """Records that were not sound, reported or skipped"""
    skipped: int = 0
    """Those of the damaged records that were skipped"""
    gone: int = 0
    """Queue offsets whose records were missing"""

    def add(self, other: ReadCounts) -> None:
        """Add the counts of another reader."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

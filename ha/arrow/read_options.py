"""Options of a reader of the log: columns, filter, and the handling of damage and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from ha.protocol.compression import BODY_SIZE_MAX

DEFAULT_COLUMNS: tuple[str, ...] = (
    "topic",
    "brokerName",
    "queueId",
    "queueOffset",
    "physicalOffset",
    "body",
    "tags",
    "keys",
    "bornTimestamp",
    "storeTimestamp",
    "flag",
    "sysFlag",
    "reconsumeTimes",
    "uniqKey",
)

T = TypeVar("T")

INFLATED_FACTOR_MAX = 4
"""Limit of a batch's decompressed bodies as a multiple of `batch_bytes`: text and JSON rarely exceed it."""


def _combined(choose: Callable[[T, T], T], one: T | None, other: T | None) -> T | None:
    """Combines two conditions; None is no condition."""
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)


class RowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the rows that pass all conditions; None is no condition. Ranges are [begin, end).

    The result is exact: queue entries and the index only preselect rows by the hashes of tags and keys. The tags, and
    the keys (a word of KEYS, or UNIQ_KEY), are then compared as text.
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
        """Returns a filter for the rows that pass both this filter and `other`. Raises ValueError if both have keys: a
        record may have one key of each, which a single set of keys can't express."""
        if self.keys is not None and other.keys is not None:
            raise ValueError("two sets of keys can't be combined")
        return RowFilter(
            topics=_combined(frozenset.__and__, self.topics, other.topics),
            queue_ids=_combined(frozenset.__and__, self.queue_ids, other.queue_ids),
            tags=_combined(frozenset.__and__, self.tags, other.tags),
            keys=_combined(frozenset.__and__, self.keys, other.keys),
            queue_offset_begin=_combined(max, self.queue_offset_begin, other.queue_offset_begin),
            queue_offset_end=_combined(min, self.queue_offset_end, other.queue_offset_end),
            physical_begin=_combined(max, self.physical_begin, other.physical_begin),
            physical_end=_combined(min, self.physical_end, other.physical_end),
            store_begin_ms=_combined(max, self.store_begin_ms, other.store_begin_ms),
            store_end_ms=_combined(min, self.store_end_ms, other.store_end_ms),
        )


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a reader. Sizes in bytes."""

    columns: tuple[str, ...] = DEFAULT_COLUMNS
    batch_rows: int = 16_384
    """Maximum rows of a batch"""
    batch_bytes: int = 32 << 20
    """Maximum record bytes of a batch (a single record may be larger); the batch's decompressed bodies take at most
    INFLATED_FACTOR_MAX times as much"""
    decompress: bool = True
    """Decompress `body`; a body that can't be decompressed is damaged"""
    message_size_max: int = BODY_SIZE_MAX
    """Maximum size in bytes of a decompressed body (the brokers' maxMessageSize); a longer one is damaged"""
    on_damage: Literal["report", "skip", "fail"] = "report"
    """What to do with a damaged record. "report": return a row with the known fields, crcOk=false and null elsewhere;
    "skip": only count it; "fail": raise CorruptLog"""
    verify_crc: bool = False
    """Check each body's CRC; requesting the column crcOk does so as well"""
    fail_on_data_loss: bool = True
    """Raise RecordsGone for missing records, instead of skipping and counting them"""
    where: RowFilter = RowFilter()

    @property
    def inflated_bytes_max(self) -> int:
        """Maximum total size of the decompressed bodies of a batch (a single body may be larger)."""
        return INFLATED_FACTOR_MAX * self.batch_bytes

    @property
    def checks_crc(self) -> bool:
        """Whether bodies are checked against their CRC."""
        return self.verify_crc or "crcOk" in self.columns


class ReadCounts(msgspec.Struct):
    """Counts of rows, and of damaged and missing records of a reader."""

    rows: int = 0
    """Number of rows returned"""
    damaged: int = 0
    """Number of damaged records: not sound, with a wrong body CRC (if checked), with a body that can't be decompressed,
    or an inner batch that can't be divided into its messages"""
    skipped: int = 0
    """Number of damaged records that were skipped"""
    gone: int = 0
    """Number of queue offsets whose records are missing; in reads by ranges, also the number of missing bytes of the
    log"""

    def add(self, other: ReadCounts) -> None:
        """Adds the counts of `other` to these."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

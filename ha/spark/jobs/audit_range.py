"""One physical range of all copies, examined: runs in the executors, returns facts of bounded size.

Level 1: the SHA-256 of each copy's bytes from the range's begin to the end of its last record. (Of the strong hashes
this is the fastest where the CPU has instructions for it: 1.4 GB/s a core against 0.66 of BLAKE2b.) Copies with equal
bytes are examined once. Level 2, where they differ: record by record. What is said of one copy alone (structure, CRC,
queue offsets) is checked in either case, and so is each copy's own consume queue.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ha.arrow import LogReader, ReadOptions, decode_batch
from ha.arrow.heads import Heads
from ha.arrow.queues import BLANK_SIZE, ENTRY_DTYPE, Entries
from ha.arrow.slices import Int64s
from ha.errors import RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.properties import INNER_NUM, SCHEDULE_TOPIC, decode_properties, tags_code
from ha.protocol.record import MessageRecord, decode_record
from ha.spark.jobs.audit_findings import HOUR_MS, Finding, Findings
from ha.spark.jobs.audit_queues import QueueFacts, queue_facts
from ha.spark.jobs.audit_walk import Damaged, RawLog, Walked, walk_range

_HASH_BYTES = 4 << 20
_ENTRY_GAP_MAX = 4096
"""Entries that are read though no record asked for them, rather than reading twice."""
_EXTENSION_CODE_MAX = -(1 << 31) - 1
"""Tags codes up to this are addresses in a consume-queue extension file, not hashes (RocketMQ: ConsumeQueueExt)."""


class CopyPlace(msgspec.Struct, frozen=True):
    """Where one copy is, and the physical range [begin, end) of it that is audited."""

    name: str
    path: str
    broker_name: str
    begin: int
    end: int


class RangeTask(msgspec.Struct, frozen=True):
    """Physical bytes [begin, end), which all of `copies` hold. `starts`: where the first record begins, if known."""

    begin: int
    end: int
    copies: tuple[CopyPlace, ...]
    starts: tuple[int | None, ...]
    examples_max: int
    audit_id: str
    """Readers of the stores are kept open by a process during one audit."""


class CopyFacts(msgspec.Struct):
    """What one copy's range says. See `Walked` for the starts; times in ms, 0 if there is no record."""

    copy: str
    digest: bytes
    first_start: int | None
    next_start: int | None
    record_count: int
    byte_count: int
    damaged: list[Damaged]
    queues: dict[tuple[str, int], QueueFacts]
    cells: dict[tuple[str, int], tuple[int, int]]
    """(topic, hour): records, bytes."""
    first_store_ms: int
    first_position: int
    highest_store_ms: int
    is_gone: bool = False
    """Retention deleted the range's begin before all of it was examined: nothing else here means anything."""


class RangeFacts(msgspec.Struct):
    """The facts of each copy, in the task's order, and what was found."""

    begin: int
    end: int
    copies: list[CopyFacts]
    findings: Findings


class Examined:
    """The records of one copy's range as arrays; rows as in `walked.positions`."""

    def __init__(self, walked: Walked, broker_name: str) -> None:
        self.walked = walked
        self.positions = walked.positions
        raw = np.frombuffer(walked.data, np.uint8)
        at = walked.positions - walked.begin
        heads = Heads(raw, at, None)
        options = ReadOptions(columns=("topic", "tags", "crcOk"), decompress=False)
        # Without a base offset: a misplaced record is read like any other.
        batch = decode_batch(walked.data, at, base_offset=None, broker_name=broker_name, options=options)
        encoded = batch.column("topic").dictionary_encode()
        self.topics: list[str] = encoded.dictionary.to_pylist()
        self.topic_codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        self.tags = batch.column("tags")
        self.crc_ok = batch.column("crcOk").to_numpy(zero_copy_only=False).astype(bool)
        self.sizes = heads.total_size
        self.queue_ids = heads.field("queue_id").astype(np.int64)
        self.queue_offsets = heads.field("queue_offset").astype(np.int64)
        self.store_ms = heads.field("store_ms").astype(np.int64)
        self.hours = self.store_ms // HOUR_MS
        kind = heads.sys_flag & SysFlag.TRANSACTION_MASK
        self.is_queued = (kind != SysFlag.TRANSACTION_PREPARED) & (kind != SysFlag.TRANSACTION_ROLLBACK)
        self.is_bad = ~self.crc_ok | np.isin(self.positions, walked.misplaced)
        self.steps = self._steps(heads.sys_flag)

    def _steps(self, sys_flag: npt.NDArray[np.int32]) -> Int64s | None:
        """Queue offsets that each record takes; None if each takes one."""
        rows = np.flatnonzero(sys_flag & SysFlag.INNER_BATCH)
        if not len(rows):
            return None
        steps = np.ones(len(self.positions), np.int64)
        for row in rows.tolist():
            number = decode_properties(self.record(row).properties).get(INNER_NUM, "1")
            steps[row] = int(number) if number.isdecimal() and len(number) < 10 else 1
        return steps

    def record(self, row: int) -> MessageRecord:
        """One record through the plain codec."""
        return decode_record(self.walked.data, int(self.positions[row]) - self.walked.begin, verify_crc=False)

    def raw(self, row: int) -> bytes:
        """One record's bytes."""
        at = int(self.positions[row]) - self.walked.begin
        return self.walked.data[at : at + int(self.sizes[row])]

    def finding(self, kind: str, copy: str, row: int, detail: str = "") -> Finding:
        """A finding about one record."""
        return Finding(
            kind=kind,
            copy=copy,
            physical_offset=int(self.positions[row]),
            topic=self.topics[self.topic_codes[row]],
            queue_id=int(self.queue_ids[row]),
            queue_offset=int(self.queue_offsets[row]),
            hour=int(self.hours[row]),
            detail=detail,
        )

    def groups(self, rows: Int64s) -> list[tuple[str, int, Int64s]]:
        """(topic, queue id, rows in physical order) of the given rows."""
        if not len(rows):
            return []
        keys = np.stack([self.topic_codes[rows], self.queue_ids[rows]])
        order = np.lexsort((rows, keys[1], keys[0]))
        rows, keys = rows[order], keys[:, order]
        cuts = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
        return [
            (self.topics[self.topic_codes[part[0]]], int(self.queue_ids[part[0]]), part)
            for part in np.split(rows, cuts)
        ]


def examine_range(task: RangeTask) -> RangeFacts:
    """Do all of the checks of one range. StoreUnreadable if a copy can't be read at all."""
    facts = _examine(task)
    # Asked afterwards: what was there until the end was there when it was read.
    is_gone = [RawLog(copy.path).min_offset > task.begin for copy in task.copies]
    if not any(is_gone):
        return facts
    kept = [index for index, gone in enumerate(is_gone) if not gone]
    copies = [CopyFacts(copy.name, b"", None, None, 0, 0, [], {}, {}, 0, -1, 0, True) for copy in task.copies]
    findings = Findings(task.examples_max)
    if kept:
        narrowed = msgspec.structs.replace(
            task,
            copies=tuple(task.copies[index] for index in kept),
            starts=tuple(task.starts[index] for index in kept),
        )
        rest = _examine(narrowed)
        findings = rest.findings
        for index, copy_facts in zip(kept, rest.copies, strict=True):
            copies[index] = copy_facts
    return RangeFacts(task.begin, task.end, copies, findings)


def _examine(task: RangeTask) -> RangeFacts:
    findings = Findings(task.examples_max)
    logs = [RawLog(copy.path) for copy in task.copies]
    first = _walk(task, logs, 0)
    stop = max(task.end, min(first.next_start or 0, *(copy.end for copy in task.copies)))
    digests = [_digest(log, task.begin, stop, first if log is logs[0] else None) for log in logs]
    groups: dict[tuple[bytes, int | None], list[int]] = {}
    for index, key in enumerate(zip(digests, task.starts, strict=True)):
        groups.setdefault(key, []).append(index)
    # Most copies decide what is right; of equally many, those with the first.
    members = sorted(groups.values(), key=lambda group: (-len(group), group[0]))
    examined: list[Examined] = []
    facts: dict[int, CopyFacts] = {}
    for group in members:
        walked = first if 0 in group else _walk(task, logs, group[0])
        view = Examined(walked, task.copies[group[0]].broker_name)
        examined.append(view)
        for index in group:
            facts[index] = _facts(view, task.copies[index].name, digests[index])
            _check_records(view, task.copies[index].name, findings)
            _check_entries(view, task.copies[index], _open_reader(task.copies[index], task.audit_id), findings)
    for group, view in zip(members[1:], examined[1:], strict=True):
        names = [task.copies[index].name for index in group]
        compare(examined[0], view, [task.copies[index].name for index in members[0]], names, findings)
    return RangeFacts(task.begin, task.end, [facts[index] for index in range(len(task.copies))], findings)


def _walk(task: RangeTask, logs: list[RawLog], index: int) -> Walked:
    return walk_range(logs[index], task.begin, task.end, task.copies[index].end, task.starts[index])


def _digest(log: RawLog, begin: int, end: int, read: Walked | None) -> bytes:
    """Of the bytes [begin, end), which `read` may hold already."""
    if read is not None and len(read.data) >= end - begin:
        return hashlib.sha256(memoryview(read.data)[: end - begin]).digest()
    digest = hashlib.sha256()
    while begin < end:
        stop = min(begin + _HASH_BYTES, end)
        digest.update(log.read(begin, stop))
        begin = stop
    return digest.digest()


def _facts(view: Examined, copy: str, digest: bytes) -> CopyFacts:
    queues = {}
    for topic, queue_id, rows in view.groups(np.flatnonzero(view.is_queued)):
        steps = None if view.steps is None else view.steps[rows]
        queues[topic, queue_id] = queue_facts(view.queue_offsets[rows], view.positions[rows], steps)
    cells: dict[tuple[str, int], tuple[int, int]] = {}
    if len(view.positions):
        hours, hour_codes = np.unique(view.hours, return_inverse=True)
        keys, inverse = np.unique(view.topic_codes * len(hours) + hour_codes, return_inverse=True)
        counts = np.bincount(inverse)
        sizes = np.bincount(inverse, weights=view.sizes)
        for key, count, size in zip(keys.tolist(), counts.tolist(), sizes.tolist(), strict=True):
            cells[view.topics[key // len(hours)], int(hours[key % len(hours)])] = (count, int(size))
    walked = view.walked
    return CopyFacts(
        copy,
        digest,
        walked.first_start,
        walked.next_start,
        len(view.positions),
        int(view.sizes.sum()),
        walked.damaged,
        queues,
        cells,
        int(view.store_ms[0]) if len(view.store_ms) else 0,
        int(view.positions[0]) if len(view.positions) else -1,
        int(view.store_ms.max()) if len(view.store_ms) else 0,
    )


def _check_records(view: Examined, copy: str, findings: Findings) -> None:
    """CRC, place, store times: what each record says by itself and beside its predecessor."""
    for row in np.flatnonzero(~view.crc_ok).tolist():
        findings.add(view.finding("crc", copy, row, f"body of a record of {view.sizes[row]} bytes"))
    for position in view.walked.misplaced.tolist():
        row = int(np.searchsorted(view.positions, position))
        own = view.record(row).physical_offset
        findings.add(view.finding("misplaced", copy, row, f"it says physical offset {own}"))
    for row in (np.flatnonzero(view.store_ms[1:] < view.store_ms[:-1]) + 1).tolist():
        back_ms = int(view.store_ms[row - 1] - view.store_ms[row])
        findings.add(view.finding("time_backwards", copy, row, f"stored {back_ms} ms before the record in front of it"))


# ---- consume queue

_readers: dict[tuple[str, str, str], LogReader] = {}
_READERS_MAX = 8


def _open_reader(place: CopyPlace, audit_id: str) -> LogReader:
    """A reader of this copy. It was opened after the audit took the copy's end, so it knows all entries up to there."""
    key = (audit_id, place.path, place.broker_name)
    reader = _readers.get(key)
    if reader is None:
        while len(_readers) >= _READERS_MAX:
            _readers.pop(next(iter(_readers))).close()
        reader = _readers[key] = LogReader(Path(place.path), broker_name=place.broker_name)
    return reader


def has_plain_entries(reader: LogReader, topic: str, queue_id: int) -> bool:
    """Whether entries stand at their queue offset: not so in batch queues (46 bytes, one for each batch)."""
    return bool(reader.entries(topic, queue_id, 0, 0).dtype == ENTRY_DTYPE)


def read_entries(reader: LogReader, topic: str, queue_id: int, begin: int, end: int) -> Entries:
    """The entries [begin, end) of a queue; zeros where a file is missing (which hides those in front of it, too)."""
    entries = reader.entries(topic, queue_id, begin, end)
    lacking = end - begin - len(entries)
    return entries if not lacking else np.concatenate([np.zeros(lacking, entries.dtype), entries])


def _check_entries(view: Examined, place: CopyPlace, reader: LogReader, findings: Findings) -> None:
    """Whether the consume queue of this copy has an entry for each queued record, saying the same."""
    is_plain = view.is_queued if view.steps is None else view.is_queued & (view.steps == 1)
    codes = _tags_codes(view.tags)
    topics = {queue.topic for queue in reader.queues()}
    for topic, queue_id, rows in view.groups(np.flatnonzero(is_plain)):
        if not has_plain_entries(reader, topic, queue_id):
            continue
        if topic not in topics:
            findings.add(view.finding("topic_without_queues", place.name, int(rows[0])), len(rows))
            continue
        known = reader.queue_range(topic, queue_id)
        offsets = view.queue_offsets[rows]
        inside = (offsets >= known.begin) & (offsets < known.end)
        for row in rows[~inside].tolist():
            reason = (
                f"its queue has entries [{known.begin}, {known.end})" if known.end else "there is no such consume queue"
            )
            findings.add(view.finding("entry_missing", place.name, row, reason))
        rows = rows[inside]
        order = np.argsort(view.queue_offsets[rows], kind="stable")
        rows = rows[order]
        cuts = np.flatnonzero(np.diff(view.queue_offsets[rows]) > _ENTRY_GAP_MAX) + 1
        for part in np.split(rows, cuts):
            if len(part):
                _check_run(view, reader, place.name, topic, queue_id, part, codes, findings)


def _check_run(
    view: Examined,
    reader: LogReader,
    copy: str,
    topic: str,
    queue_id: int,
    rows: Int64s,
    codes: Int64s,
    findings: Findings,
) -> None:
    offsets = view.queue_offsets[rows]
    begin, end = int(offsets[0]), int(offsets[-1]) + 1
    found = read_entries(reader, topic, queue_id, begin, end)[offsets - begin]
    sizes = found["size"].astype(np.int64)
    physical = found["physical_offset"].astype(np.int64)
    entry_codes = found["tags_code"].astype(np.int64)
    is_blank = (sizes == BLANK_SIZE) | (sizes == 0)
    code_matters = (entry_codes > _EXTENSION_CODE_MAX) & (topic != SCHEDULE_TOPIC)
    wrong_code = code_matters & (entry_codes != codes[rows])
    wrong = ~is_blank & ((physical != view.positions[rows]) | (sizes != view.sizes[rows]) | wrong_code)
    for row in rows[is_blank].tolist():
        findings.add(view.finding("entry_missing", copy, row, "the entry at its queue offset is blank"))
    for index in np.flatnonzero(wrong).tolist():
        row = int(rows[index])
        detail = (
            f"entry: physical offset {physical[index]}, {sizes[index]} bytes, tags code {entry_codes[index]}; "
            f"record: {view.positions[row]}, {view.sizes[row]} bytes, tags code {codes[row]}"
        )
        findings.add(view.finding("entry_wrong", copy, row, detail))


def _tags_codes(tags: pa.Array) -> Int64s:
    encoded = tags.dictionary_encode()
    hashes = np.array([*(tags_code(text) for text in encoded.dictionary.to_pylist()), 0], np.int64)
    indices = encoded.indices.fill_null(len(hashes) - 1).to_numpy(zero_copy_only=False)
    return np.asarray(hashes[indices])


# ---- copies against each other


def compare(
    right: Examined, other: Examined, right_names: list[str], other_names: list[str], findings: Findings
) -> None:
    """Record by record: what `other` lacks, has besides, or has otherwise than `right`."""
    in_right = np.isin(other.positions, right.positions)
    in_other = np.isin(right.positions, other.positions)
    is_damaged = in_damage(other.walked, right.positions)
    for row in np.flatnonzero(~in_other).tolist():
        for name in other_names:
            detail = f"{right_names[0]} has it" + ("; here its bytes are damaged" if is_damaged[row] else "")
            findings.add(right.finding("missing", name, row, detail))
    is_damaged = in_damage(right.walked, other.positions)
    for row in np.flatnonzero(~in_right).tolist():
        if is_damaged[row]:
            for name in right_names:
                detail = f"{other_names[0]} has it; here its bytes are damaged"
                findings.add(other.finding("missing", name, row, detail))
        else:
            for name in other_names:
                findings.add(other.finding("extra", name, row, f"{right_names[0]} has no record here"))
    rows = np.searchsorted(right.positions, other.positions[in_right])
    for right_row, other_row in zip(rows.tolist(), np.flatnonzero(in_right).tolist(), strict=True):
        if right.raw(right_row) != other.raw(other_row):
            is_right_bad = bool(right.is_bad[right_row]) and not bool(other.is_bad[other_row])
            detail = _difference(right, right_row, other, other_row)
            # What the record is said to be comes from the copy that is taken for right.
            blamed, view, row = (right_names, other, other_row) if is_right_bad else (other_names, right, right_row)
            against = other_names[0] if is_right_bad else right_names[0]
            for name in blamed:
                findings.add(view.finding("different", name, row, f"not as in {against}: {detail}"))
    _compare_padding(right.walked, other.walked, right_names[0], other_names, findings)


def _compare_padding(right: Walked, other: Walked, right_name: str, names: list[str], findings: Findings) -> None:
    for position, size in set(right.fillers) & set(other.fillers):
        at = position - right.begin
        mine, theirs = (np.frombuffer(walked.data[at : at + size], np.uint8) for walked in (right, other))
        width = min(len(mine), len(theirs))
        unequal = np.flatnonzero(mine[:width] != theirs[:width])
        if len(unequal):
            first = int(unequal[0])
            for name in names:
                detail = f"first of the bytes that differ from {right_name}"
                findings.add(Finding(kind="padding", copy=name, physical_offset=position + first, detail=detail))


def in_damage(walked: Walked, physical_offsets: Int64s) -> npt.NDArray[np.bool_]:
    """Which of the offsets lie in damaged bytes."""
    begins = np.array([span.begin for span in walked.damaged], np.int64)
    ends = np.array([-1, *(span.end for span in walked.damaged)], np.int64)
    return np.asarray(physical_offsets < ends[np.searchsorted(begins, physical_offsets, side="right")])


def _difference(right: Examined, right_row: int, other: Examined, other_row: int) -> str:
    """The fields that two records at one place do not share, in words."""
    try:
        one, two = right.record(right_row), other.record(other_row)
    except RemoteProtocolError as error:  # pragma: no cover - both were found sound
        return str(error)
    names = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(two, name)]
    return ", ".join(name.replace("_", " ") for name in names) or "bytes without meaning"

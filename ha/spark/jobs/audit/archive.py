"""Compares an archive, made by `archive`, with the store that it was made from, row by row.

For each physical range, the store's records are walked and decoded to the archive's columns, and the archive's rows of
that range are selected by the manifest and the row groups' statistics. The row groups of a topic with few messages span
many ranges, and are read again for each, which limits the memory needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from ha.arrow import COLUMNS, LogReader, ReadOptions, decode_batches
from ha.arrow.heads import Int64s
from ha.audit.examined import Examined
from ha.audit.findings import HOUR_MS, NO_HOUR, Finding, Findings
from ha.audit.range import CopyPlace, is_of_deleted_topic
from ha.audit.walk import RawLog, damage_at, walk_range
from ha.errors import ArchiveDamaged, OptionError
from ha.protocol.record import CRC_MASK
from ha.spark.jobs.archive.files import RAW_PROPERTIES
from ha.spark.jobs.archive.read import archive_states

ARCHIVE = "archive"
"""The archive's name in findings."""
_NOT_COMPARED = frozenset(
    {"topic", "date", "brokerName", "crcOk", "physicalOffset", "keys", "properties", RAW_PROPERTIES}
)
"""Columns that `_compare_rows` does not compare like the others. The topic, which comes from the manifest, and
RAW_PROPERTIES are compared separately. `_compare` uses crcOk, and matches rows by physicalOffset. The archiver chose
brokerName, date follows from the store timestamp, and keys and properties are in the property string.
"""


class ArchivePlace(msgspec.Struct, frozen=True):
    """One broker's part of an archive, which is complete for physical offsets [begin, end) of the broker's log."""

    path: str
    broker_name: str
    begin: int
    end: int
    files: tuple[tuple[str, str | None, int, int], ...]
    """(path, topic, physical offset of the first record, physical end of the last one) of each file."""
    topics: frozenset[str] | None
    left_out: frozenset[str]
    skips_damaged: bool
    erased_topics: tuple[tuple[str, int], ...] = ()
    """(topic, physical offset before which its rows were erased)"""
    erased: tuple[int, ...] = ()
    """Physical offsets of other erased rows"""


class ArchiveTask(msgspec.Struct, frozen=True):
    """Compare physical offsets [begin, end). The first record begins at `start`; None if that is unknown."""

    begin: int
    end: int
    start: int | None
    store: CopyPlace
    archive: ArchivePlace
    """The archive with the files of this range only"""
    examples_max: int


class ArchiveFacts(msgspec.Struct):
    """The result of comparing one range: number and bytes of the archived rows, and the findings."""

    begin: int
    end: int
    rows: int
    record_bytes: int
    findings: Findings


def open_archive(path: str, broker_name: str | None) -> ArchivePlace:
    """Returns the part of `broker_name` in the archive at `path`, or of the only broker if `broker_name` is None.

    Raises OptionError if there is no such archive or broker, or if there are several brokers and no name;
    ArchiveDamaged; ArchiveConflict as in `archive_states`.
    """
    folder = Path(path).absolute()
    states = {state.broker_name: state for state in archive_states(folder)}
    if broker_name is None and len(states) == 1:
        (broker_name,) = states
    if broker_name not in states:
        reason = (
            "the archive has several brokers" if broker_name is None else f"the archive has no broker {broker_name!r}"
        )
        raise OptionError("broker_name", reason, f"one of: {', '.join(sorted(states))}")
    state = states[broker_name]
    scope = state.scope
    return ArchivePlace(
        str(folder),
        broker_name,
        state.covered_begin or 0,
        state.covered_end or 0,
        tuple((file.path, file.topic, file.physical_begin, file.physical_end) for file in state.files.values()),
        None if scope is None or scope.topics is None else frozenset(scope.topics),
        frozenset() if scope is None else frozenset(scope.left_out),
        scope is not None and scope.on_damage == "skip",
        tuple(topic for erasure in state.erased for topic in sorted(erasure.topics.items())),
        tuple(sorted({place for erasure in state.erased for place in erasure.physical_offsets})),
    )


def archive_tasks(
    store: CopyPlace, archive: ArchivePlace, starts: dict[int, tuple[int, int | None]], examples_max: int
) -> list[ArchiveTask]:
    """Returns a task for each range of which the archive covers at least a part, limited to this part.

    `starts`: start of a range -> its end, and the physical offset of its first record (None if unknown).
    """
    tasks = []
    for begin, (end, start) in sorted(starts.items()):
        low, high = max(begin, archive.begin), min(end, archive.end)
        if low < high:
            known = start if low == begin else low
            tasks.append(ArchiveTask(low, high, known, store, _within(archive, low, high), examples_max))
    return tasks


def _within(archive: ArchivePlace, begin: int, end: int) -> ArchivePlace:
    """Returns the archive with the files and erased rows of physical offsets [begin, end) only."""
    files = tuple(file for file in archive.files if file[2] < end and file[3] > begin)
    erased = archive.erased[bisect_left(archive.erased, begin) : bisect_left(archive.erased, end)]
    return msgspec.structs.replace(archive, files=files, erased=erased)


def compare_archive(task: ArchiveTask) -> ArchiveFacts:
    """Compares one range; the facts are empty if retention deletes a part of the range meanwhile.

    If a file is missing because a merge or an erasure has replaced it, compares with the archive as it is now.
    Raises ArchiveDamaged if a file of the manifest is missing or can't be read; ArchiveConflict as in `archive_states`;
    StoreUnreadable.
    """
    while True:
        try:
            facts = _compare(task)
            break
        except FileNotFoundError as error:
            now = _within(open_archive(task.archive.path, task.archive.broker_name), task.begin, task.end)
            if now.files == task.archive.files:
                raise ArchiveDamaged(Path(now.path), f"{error.filename or error} is missing") from None
            task = msgspec.structs.replace(task, archive=now)
    if RawLog(task.store.path).min_offset > task.begin:  # retention deleted the range
        return ArchiveFacts(task.begin, task.end, 0, 0, Findings(task.examples_max))
    return facts


def _compare(task: ArchiveTask) -> ArchiveFacts:
    findings = Findings(task.examples_max)
    rows = _archived(task)
    walked = walk_range(RawLog(task.store.path), task.begin, task.end, task.store.end, task.start)
    view = Examined(walked, task.store.broker_name)
    wanted = view.is_queued if view.steps is None else view.is_queued & (view.steps == 1)
    topics, left_out = task.archive.topics, task.archive.left_out
    if topics is not None or left_out:
        chosen = [(topics is None or topic in topics) and topic not in left_out for topic in view.topics]
        wanted &= np.array(chosen, bool)[view.topic_codes]
    if task.archive.skips_damaged:
        wanted &= ~view.is_bad
    archived = rows.column("physicalOffset").to_numpy()
    marked_damaged = ~pc.fill_null(rows.column("crcOk"), False).to_numpy(zero_copy_only=False).astype(bool)
    facts = ArchiveFacts(
        task.begin, task.end, len(rows), pc.sum(pc.fill_null(rows.column("storeSize"), 0)).as_py() or 0, findings
    )
    again = np.zeros(len(archived), bool)
    again[1:] = archived[1:] == archived[:-1]
    for row in np.flatnonzero(again).tolist():
        findings.add(_row_finding("duplicate", ARCHIVE, rows, row, "the archive has this physical offset twice"))
    _check_bodies(rows, ~marked_damaged, findings)
    # A damaged record is correct in the archive if the archive marks it as damaged.
    known = np.isin(archived, view.positions)
    for row in np.flatnonzero(~known & ~marked_damaged & ~again).tolist():
        if damage_at(walked.damaged, archived[row : row + 1])[0] >= 0:
            detail = "the archive has it; here its bytes are damaged"
            findings.add(_row_finding("missing", task.store.name, rows, row, detail))
        else:
            findings.add(_row_finding("extra", ARCHIVE, rows, row, f"{task.store.name} has no record here"))
    is_erased = np.isin(view.positions, np.array(task.archive.erased, np.int64))
    is_erased |= _of_topics(view, dict(sorted(task.archive.erased_topics, key=lambda erased: erased[1])))
    missing = np.flatnonzero(wanted & ~np.isin(view.positions, archived))
    if len(missing):
        with LogReader(task.store.path, broker_name=task.store.broker_name) as reader:
            is_deleted = is_of_deleted_topic(view, reader)
    for row in missing.tolist():
        kind = "erased" if is_erased[row] else "topic_deleted" if is_deleted[row] else "missing"
        findings.add(view.finding(kind, ARCHIVE, row, f"{task.store.name} has it"))
    mine = np.searchsorted(view.positions, archived[known])
    theirs = np.flatnonzero(known)
    both_bad = view.is_bad[mine] & marked_damaged[theirs]
    _compare_rows(task, view, mine[~both_bad], rows, theirs[~both_bad], findings)
    return facts


def _of_topics(view: Examined, ends: Mapping[str, int]) -> np.ndarray:
    """Returns for each record whether its topic is in `ends` and its physical offset is before the end given there."""
    ends_by_code = np.array([ends.get(name, 0) for name in view.topics], np.int64)
    return np.asarray(view.positions < ends_by_code[view.topic_codes])


def _archived(task: ArchiveTask) -> pa.Table:
    """Returns the archive's rows of the range by physical offset, with their topic, and without the columns that were
    decoded from bodies. Raises FileNotFoundError if a file is missing, ArchiveDamaged if one can't be read."""
    parts = []
    condition = (pc.field("physicalOffset") >= task.begin) & (pc.field("physicalOffset") < task.end)
    for path, topic, _, _ in task.archive.files:
        try:
            part = pq.read_table(Path(task.archive.path, path), filters=condition, partitioning=None)
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise ArchiveDamaged(Path(task.archive.path), f"{path}: {error}") from None
        part = part.select([name for name in part.column_names if name in COLUMNS or name == RAW_PROPERTIES])
        parts.append(part.append_column("topic", pa.repeat(pa.scalar(topic, pa.string()), len(part))))
    if not parts:
        names = ("physicalOffset", "storeSize", "body", "bodyCRC", "crcOk", "topic")
        kinds = (pa.int64(), pa.int32(), pa.binary(), pa.int32(), pa.bool_(), pa.string())
        return pa.table({name: pa.array([], kind) for name, kind in zip(names, kinds, strict=True)})
    return pa.concat_tables(parts, promote_options="default").sort_by("physicalOffset").combine_chunks()


def _check_bodies(rows: pa.Table, chosen: np.ndarray, findings: Findings) -> None:
    bodies, crcs = rows.column("body"), rows.column("bodyCRC").to_pylist()
    for row in np.flatnonzero(chosen).tolist():
        body = bodies[row].as_py()
        if body is None or crc32(body) & CRC_MASK != crcs[row]:
            findings.add(_row_finding("crc", ARCHIVE, rows, row, "the archived body"))


def _compare_rows(
    task: ArchiveTask, view: Examined, mine: Int64s, rows: pa.Table, theirs: Int64s, findings: Findings
) -> None:
    if not len(mine):
        return
    names = [name for name in rows.column_names if name not in _NOT_COMPARED]
    options = ReadOptions(columns=("topic", *names), decompress=False)
    at = view.positions[mine] - view.walked.begin
    [batch] = decode_batches(view.walked.data, at, base_offset=None, broker_name="", options=options)
    index = pa.array(theirs)
    differing: dict[int, list[str]] = {}
    for name in ("topic", *names):
        ours, archived = batch.column(name), rows.column(name).take(index).combine_chunks()
        unequal = pc.or_(
            pc.fill_null(pc.not_equal(ours, archived.cast(ours.type)), False),
            pc.xor(pc.is_null(ours), pc.is_null(archived)),
        )
        for row in np.flatnonzero(unequal.to_numpy(zero_copy_only=False)).tolist():
            differing.setdefault(row, []).append(name)
    raw = rows.column(RAW_PROPERTIES).take(index) if RAW_PROPERTIES in rows.column_names else None
    if raw is not None:
        for row in np.flatnonzero(pc.is_valid(raw).to_numpy(zero_copy_only=False)).tolist():
            if raw[row].as_py() != view.record(int(mine[row])).properties:
                differing.setdefault(row, []).append(RAW_PROPERTIES)
    for row, columns in sorted(differing.items()):
        detail = f"not as in {task.store.name}: {', '.join(columns)}"
        is_store_bad = bool(view.is_bad[mine[row]])
        copy = task.store.name if is_store_bad else ARCHIVE
        findings.add(view.finding("different", copy, int(mine[row]), detail))


def _row_finding(kind: str, copy: str, rows: pa.Table, row: int, detail: str) -> Finding:
    def field(name: str) -> Any:
        return rows.column(name)[row].as_py() if name in rows.column_names else None

    stored_us = rows.column("storeTimestamp")[row].value  # Python's dates end with the year 9999
    found = {
        "kind": kind,
        "copy": copy,
        "physical_offset": field("physicalOffset"),
        "topic": field("topic") or "",
        "queue_id": -1 if field("queueId") is None else field("queueId"),
        "queue_offset": -1 if field("queueOffset") is None else field("queueOffset"),
        "hour": NO_HOUR if stored_us is None else stored_us // 1000 // HOUR_MS,
        "detail": detail,
    }
    return msgspec.convert(found, Finding)

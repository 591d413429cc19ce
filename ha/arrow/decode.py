"""Decodes the records of one buffer into a record batch: only the requested columns, each for all rows at once.

The reference is the codec of `ha.protocol.record`; this module reads the same layout column by column. Irregular values
(compressed bodies, IPv6 hosts, malformed property strings) are decoded row by row. If there are inner batches to divide
into their messages (`options.decompress`), the reference decodes all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from isal.isal_zlib import crc32

from ha.arrow.arrays import from_numpy, from_texts
from ha.arrow.heads import Heads, Int64s
from ha.arrow.places import Mask, Places, queue_mask
from ha.arrow.plain import MILLISECONDS_MAX, inflate, passes
from ha.arrow.properties import PropertyTable
from ha.arrow.read_options import ReadCounts, ReadOptions
from ha.arrow.rows import rows_at
from ha.arrow.schema import COLUMNS, PROPERTY_COLUMNS, QUEUE_COLUMNS, TIMESTAMP, arrow_schema
from ha.arrow.slices import as_text, patched, take_slices
from ha.errors import CorruptLog, RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.message_id import encode_message_id
from ha.protocol.record import CRC_MASK, RECORD_SIZE_MIN

_HEX = np.frombuffer(b"0123456789ABCDEF", np.uint8)


def decode_batches(
    buffer: pa.Buffer | bytes | memoryview,
    positions: Int64s,
    *,
    base_offset: int | None,
    broker_name: str,
    options: ReadOptions,
    places: Places | None = None,
    counts: ReadCounts | None = None,
    file: Path | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields the records at `positions` (bytes from the buffer's start) that pass `options.where`, one row each.

    `base_offset`: physical offset of the buffer's first byte, or None if the records' own offsets are not checked (pull
    responses). `places`: the consume-queue entry of each record; a record that disagrees with it is damaged. With
    `options.decompress`, an inner batch yields a row for each of its messages. Adds to `counts`.

    Yields a single batch, or several if the decompressed bodies of one would exceed `options.inflated_bytes_max`: a few
    bytes of the log may decompress to thousands of times as many.

    Raises CorruptLog naming `file` if a record is damaged and `options.on_damage` is "fail". Raises OptionError if
    `options.decompress` needs a package that is not installed.
    """
    if not isinstance(buffer, pa.Buffer):
        buffer = pa.py_buffer(buffer)
    pending = [(positions, places)]
    while pending:
        positions, places = pending.pop()
        attempt = ReadCounts()
        task = _Decoder(buffer, base_offset, broker_name, options, attempt, file)
        try:
            batch = task.decode(positions, places)
        except _BatchTooLargeError:
            # The rows can't be mapped to positions, as some were filtered out; so the positions are halved.
            for rows in np.array_split(np.arange(len(positions)), 2)[::-1]:
                pending.append((positions[rows], None if places is None else places.keep(rows)))
            continue
        if counts is not None:
            counts.add(attempt)
        yield batch


def decode_pull_body(
    raw: bytes, *, broker_name: str, options: ReadOptions, counts: ReadCounts | None = None
) -> Iterator[pa.RecordBatch]:
    """Returns the records of a pull response's body as `decode_batches` does, with the same errors, and adds to
    `counts`. Raises RemoteProtocolError if the sizes of the records don't add up to that of the body."""
    positions = []
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "big", signed=True)
        if size < RECORD_SIZE_MIN or at + size > len(raw):
            raise RemoteProtocolError(f"a record of {size} bytes at byte {at} of a response of {len(raw)}")
        positions.append(at)
        at += size
    at_all = np.array(positions, np.int64)
    return decode_batches(raw, at_all, base_offset=None, broker_name=broker_name, options=options, counts=counts)


class _BatchTooLargeError(Exception):
    """The bodies of a batch of several records decompress to more than the limit."""


class _Decoder:
    """Decodes records of one buffer into one record batch."""

    def __init__(
        self,
        buffer: pa.Buffer,
        base_offset: int | None,
        broker_name: str,
        options: ReadOptions,
        counts: ReadCounts,
        file: Path | None,
    ) -> None:
        self.buffer = buffer
        self.raw = np.frombuffer(buffer, np.uint8)
        self.base_offset = base_offset
        self.broker_name = broker_name
        self.options = options
        self.counts = counts
        self.file = file
        where = options.where
        self.schema = arrow_schema(options.columns)
        needed = set(options.columns)
        if where.tags is not None:
            needed.add("tags")
        if where.keys is not None:
            needed |= {"keys", "uniqKey"}
        if where.topics is not None:
            needed.add("topic")
        self.needed = needed

    def decode(self, positions: Int64s, places: Places | None) -> pa.RecordBatch:
        is_in_queue = places is not None and not places.is_batch and self._is_in_the_queue_alone()
        if places is not None and is_in_queue and ("topic" not in self.needed or bool(np.all(places.is_strict))):
            chosen = queue_mask(self.options.where, places)
            places = places if chosen is None else places.keep(chosen)
            self.counts.rows += len(places)
            return self._from_places(places)
        # Properties follow topic and body: another cold cache line for each record, read only if requested.
        check_parts = (
            places is None
            or bool(self.needed & PROPERTY_COLUMNS)
            or self.options.on_damage != "report"
            or self.options.checks_crc
            or not bool(np.all(places.is_strict))
        )
        heads = Heads(self.raw, positions, self.base_offset, check_parts=check_parts)
        if places is not None:
            places.check(heads)
        if self.options.checks_crc:
            heads.has_wrong_crc = self._wrong_crcs(heads)
        is_damaged = ~heads.sound | heads.has_wrong_crc
        if is_damaged.any():
            heads, places = self._handle_damage(heads, places, is_damaged)
        heads, places = self._filter_heads(heads, places)
        if (heads.sound & ((heads.sys_flag & SysFlag.INNER_BATCH) != 0)).any() and self.options.decompress:
            return self._unwrap(heads, places)
        return self._build(heads, places)

    def _is_in_the_queue_alone(self) -> bool:
        where = self.options.where
        return (
            self.needed <= QUEUE_COLUMNS
            and self.options.on_damage == "report"
            and not self.options.checks_crc
            and where.store_begin_ms is None
            and where.store_end_ms is None
        )

    def _handle_damage(self, heads: Heads, places: Places | None, is_damaged: Mask) -> tuple[Heads, Places | None]:
        count = int(is_damaged.sum())
        self.counts.damaged += count
        if self.options.on_damage == "fail":
            row = int(np.flatnonzero(is_damaged)[0])
            reason = "body CRC is wrong" if heads.sound[row] else "no sound record where the log should have one"
            offset = self._physical_offset(heads, places, row)
            raise CorruptLog(
                self.file or Path("response"), int(heads.positions[row]), f"{reason} (physical offset {offset})"
            )
        if self.options.on_damage == "skip":
            self.counts.skipped += count
            return _kept(heads, places, ~is_damaged)
        return heads, places

    def _physical_offset(self, heads: Heads, places: Places | None, row: int) -> int:
        if places is not None:
            return int(places.physical_offsets[row])
        return int(heads.positions[row]) + (self.base_offset or 0)

    def _wrong_crcs(self, heads: Heads) -> Mask:
        view = memoryview(self.buffer)
        begins = heads.body_at.tolist()
        ends = (heads.body_at + heads.body_size).tolist()
        crcs = [
            crc32(view[begin:end]) & CRC_MASK if is_sound else -1
            for begin, end, is_sound in zip(begins, ends, heads.sound.tolist(), strict=True)
        ]
        wrong: Mask = heads.sound & (np.array(crcs, np.int64) != heads.field("body_crc"))
        return wrong

    def _filter_heads(self, heads: Heads, places: Places | None) -> tuple[Heads, Places | None]:
        """Drops rows by their fixed fields. As in SQL, an unknown value passes no condition."""
        where = self.options.where
        masks: list[Mask] = []
        stored_ms = heads.field("store_ms")
        if where.store_begin_ms is not None:
            begin_ms = max(where.store_begin_ms, -MILLISECONDS_MAX)
            masks.append((stored_ms >= begin_ms) & (stored_ms <= MILLISECONDS_MAX) & heads.sound)
        if where.store_end_ms is not None:
            end_ms = min(where.store_end_ms, MILLISECONDS_MAX + 1)
            masks.append((stored_ms < end_ms) & (stored_ms >= -MILLISECONDS_MAX) & heads.sound)
        if places is not None:
            by_place = queue_mask(where, places, has_batches=places.is_batch and self.options.decompress)
            if by_place is not None:
                masks.append(by_place)
        else:
            # The messages of an inner batch have their own queue offsets, which `_unwrap` compares.
            is_batch = ((heads.sys_flag & SysFlag.INNER_BATCH) != 0) & self.options.decompress
            if where.queue_offset_begin is not None:
                masks.append(((heads.field("queue_offset") >= where.queue_offset_begin) | is_batch) & heads.sound)
            if where.queue_offset_end is not None:
                masks.append(((heads.field("queue_offset") < where.queue_offset_end) | is_batch) & heads.sound)
            at = heads.field("physical_offset") if self.base_offset is None else heads.positions + self.base_offset
            if where.physical_begin is not None:
                masks.append(at >= where.physical_begin)
            if where.physical_end is not None:
                masks.append(at < where.physical_end)
            if where.queue_ids is not None:
                masks.append(np.isin(heads.field("queue_id"), list(where.queue_ids)) & heads.sound)
        if not masks:
            return heads, places
        kept = np.logical_and.reduce(masks)
        return (heads, places) if bool(kept.all()) else _kept(heads, places, kept)

    def _build(self, heads: Heads, places: Places | None) -> pa.RecordBatch:
        is_whole = bool(heads.sound.all())
        columns = self._columns(*((heads, places) if is_whole else _kept(heads, places, heads.sound)))
        if not is_whole:
            columns = self._with_damaged_rows(columns, heads, places)
        names = list(columns)
        batch = pa.RecordBatch.from_arrays([columns[name] for name in names], names)
        batch = self._filter_text(batch)
        self.counts.rows += len(batch)
        return pa.RecordBatch.from_arrays([batch.column(name) for name in self.options.columns], schema=self.schema)

    def _with_damaged_rows(
        self, columns: dict[str, pa.Array], heads: Heads, places: Places | None
    ) -> dict[str, pa.Array]:
        """Inserts a row for each damaged record, with the fields that its queue entry has, and null elsewhere."""
        sound = heads.sound
        index = from_numpy(np.cumsum(sound, dtype=np.int64) - 1, nulls=~sound)
        wide = {name: column.take(index) for name, column in columns.items()}
        known: dict[str, pa.Array] = {"brokerName": _constant(self.broker_name, len(sound)), "crcOk": from_numpy(sound)}
        if places is not None:
            known["topic"] = _topic_array(places)
            known["queueId"] = from_numpy(places.queue_ids.astype(np.int32))
            known["queueOffset"] = from_numpy(places.queue_offsets)
            known["physicalOffset"] = from_numpy(places.physical_offsets)
            known["storeSize"] = from_numpy(places.sizes.astype(np.int32))
        elif self.base_offset is not None:
            known["physicalOffset"] = from_numpy(heads.positions + self.base_offset)
        mask = from_numpy(sound)
        for name, column in known.items():
            if name in wide:
                wide[name] = pc.if_else(mask, wide[name], column)
        return wide

    def _filter_text(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        where = self.options.where
        if where.topics is not None:
            batch = _chosen(batch, pc.is_in(batch.column("topic"), from_texts(sorted(where.topics))))
        if where.tags is not None:
            batch = _chosen(batch, pc.is_in(batch.column("tags"), from_texts(sorted(where.tags))))
        if where.keys is not None:
            wanted = where.keys
            rows = zip(batch.column("keys").to_pylist(), batch.column("uniqKey").to_pylist(), strict=True)
            batch = batch.filter(
                pa.array([unique in wanted or not wanted.isdisjoint(words or ()) for words, unique in rows], pa.bool_())
            )
        return batch

    def _from_places(self, places: Places) -> pa.RecordBatch:
        known: dict[str, Callable[[], pa.Array]] = {
            "topic": lambda: _topic_array(places),
            "brokerName": lambda: _constant(self.broker_name, len(places)),
            "queueId": lambda: from_numpy(places.queue_ids.astype(np.int32)),
            "queueOffset": lambda: from_numpy(places.queue_offsets),
            "physicalOffset": lambda: from_numpy(places.physical_offsets),
            "storeSize": lambda: from_numpy(places.sizes.astype(np.int32)),
        }
        return pa.RecordBatch.from_arrays([known[name]() for name in self.options.columns], schema=self.schema)

    # ---- columns of sound records

    def _columns(self, heads: Heads, places: Places | None) -> dict[str, pa.Array]:
        count = len(heads)
        properties: PropertyTable | None = None
        if self.needed & PROPERTY_COLUMNS:
            strings = take_slices(self.buffer, heads.properties_at, heads.properties_size)
            properties = PropertyTable(strings, has_maps="properties" in self.needed)
        built: dict[str, pa.Array] = {}
        for name in COLUMNS:
            if name not in self.needed:
                continue
            if name == "topic":
                built[name] = self._topics(heads, places)
            elif name == "brokerName":
                built[name] = _constant(self.broker_name, count)
            elif name == "queueOffset" and places is not None:
                built[name] = from_numpy(places.queue_offsets)
            elif name == "queueId" and places is not None:
                built[name] = from_numpy(places.queue_ids.astype(np.int32))
            elif name in _FIELDS:
                field, kind = _FIELDS[name]
                built[name] = from_numpy(heads.field(field).astype(kind))
            elif name in ("bornTimestamp", "storeTimestamp"):
                ms = heads.field("born_ms" if name == "bornTimestamp" else "store_ms").astype(np.int64)
                built[name] = _timestamps(ms)
            elif name == "body":
                built[name] = self._bodies(heads)
            elif name in ("bornHost", "storeHost"):
                built[name] = self._hosts(heads, name)
            elif name == "msgId":
                built[name] = self._message_ids(heads)
            elif name == "crcOk":
                built[name] = from_numpy(~heads.has_wrong_crc)
            else:
                assert properties is not None
                built[name] = _PROPERTIES[name](properties)
        return built

    def _topics(self, heads: Heads, places: Places | None) -> pa.Array:
        if places is not None and bool(np.all(places.is_strict)):
            return _topic_array(places)
        return as_text(take_slices(self.buffer, heads.topic_at, heads.topic_size))

    def _bodies(self, heads: Heads) -> pa.Array:
        bodies = take_slices(self.buffer, heads.body_at, heads.body_size)
        if not self.options.decompress:
            return bodies
        rows = np.flatnonzero(heads.sys_flag & SysFlag.COMPRESSED)
        if not len(rows):
            return bodies
        inflated: list[bytes | None] = []
        size = 0
        for row in rows.tolist():
            try:
                body = inflate(bodies[row].as_py(), int(heads.sys_flag[row]), self.options.message_size_max)
                size += len(body)
                self._check_inflated(size, len(heads))
                inflated.append(body)
            except RemoteProtocolError as error:
                self._handle_damaged_body(heads, row, str(error))
                inflated.append(None)
        return patched(bodies, rows, inflated)

    def _handle_damaged_body(self, heads: Heads, row: int, reason: str) -> None:
        """Counts a body that can't be decompressed, or divided into messages, as damaged, unless its CRC is wrong: then
        it is counted already. Raises CorruptLog if `options.on_damage` is "fail"."""
        if not heads.has_wrong_crc[row]:
            self.counts.damaged += 1
        if self.options.on_damage == "fail":
            raise CorruptLog(self.file or Path("response"), int(heads.positions[row]), reason) from None

    def _check_inflated(self, size: int, record_count: int) -> None:
        """Raises _BatchTooLargeError if decompressed bodies of `size` bytes exceed the limit of one batch."""
        if size > self.options.inflated_bytes_max and record_count > 1:
            raise _BatchTooLargeError

    def _hosts(self, heads: Heads, name: str) -> pa.Array:
        field, bit = ("born_host", SysFlag.BORNHOST_V6) if name == "bornHost" else ("store_host", SysFlag.STOREHOST_V6)
        packed = np.ascontiguousarray(heads.field(field)).view(np.uint64)
        distinct, index = np.unique(packed, return_inverse=True)
        texts = from_texts([_host_text(value.tobytes()) for value in distinct])
        array = texts.take(from_numpy(index.astype(np.int64)))
        rows = np.flatnonzero(heads.sys_flag & bit)
        if len(rows):
            array = patched(array, rows, [_host_text(self._wide_host(heads, row, field)) for row in rows.tolist()])
        return array

    def _wide_host(self, heads: Heads, row: int, field: str) -> bytes:
        """Returns the 20 bytes of an IPv6 host of one record."""
        at = int(heads.positions[row]) + 48
        if field == "store_host":
            at += (20 if heads.sys_flag[row] & SysFlag.BORNHOST_V6 else 8) + 8
        return self.raw[at : at + 20].tobytes()

    def _message_ids(self, heads: Heads) -> pa.Array:
        count = len(heads)
        packed = np.empty((count, 16), np.uint8)
        packed[:, :8] = np.ascontiguousarray(heads.field("store_host")).view(np.uint8).reshape(count, 8)
        packed[:, 8:] = np.ascontiguousarray(heads.field("physical_offset")).view(np.uint8).reshape(count, 8)
        text = np.empty((count, 32), np.uint8)
        text[:, 0::2] = _HEX[packed >> 4]
        text[:, 1::2] = _HEX[packed & 15]
        offsets = np.arange(0, 32 * (count + 1), 32, dtype=np.int32)
        array = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
        rows = np.flatnonzero(heads.sys_flag & SysFlag.STOREHOST_V6)
        if len(rows):
            physical = heads.field("physical_offset")
            hosts = [self._wide_host(heads, row, "store_host") for row in rows.tolist()]
            ids = [encode_message_id(host, int(at)) for host, at in zip(hosts, physical[rows], strict=True)]
            array = patched(array, rows, ids)
        return array

    # ---- inner batches, row by row

    def _unwrap(self, heads: Heads, places: Places | None) -> pa.RecordBatch:
        """Decodes the records of a buffer with inner batches, whose messages become a row each.

        Inner batches are rare, so the reference codec decodes all rows.
        """
        where = self.options.where
        rows: list[dict[str, object]] = []
        size = 0
        for row in range(len(heads)):
            found = rows_at(row, self.buffer, heads, places, self.base_offset, self.broker_name, self.options)
            if heads.sound[row] and found[0]["body"] is None:
                if heads.sys_flag[row] & SysFlag.INNER_BATCH:
                    self._handle_damaged_body(heads, row, "an inner batch can't be divided into its messages")
                    if self.options.on_damage == "skip":
                        self.counts.skipped += 1
                        continue
                elif "body" in self.needed:
                    self._handle_damaged_body(heads, row, "a compressed body is damaged or too long")
            elif heads.sound[row] and heads.sys_flag[row] & SysFlag.COMPRESSED:
                size += sum(len(each["body"]) for each in found if isinstance(each["body"], bytes))
                self._check_inflated(size, len(heads))
            rows.extend(row for row in found if passes(where, row))
        self.counts.rows += len(rows)
        columns = [pa.array([row.get(name) for row in rows], COLUMNS[name]) for name in self.options.columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


_FIELDS = {
    "queueId": ("queue_id", np.int32),
    "queueOffset": ("queue_offset", np.int64),
    "physicalOffset": ("physical_offset", np.int64),
    "storeSize": ("total_size", np.int32),
    "bodySize": ("body_size", np.int32),
    "bodyCRC": ("body_crc", np.int32),
    "sysFlag": ("sys_flag", np.int32),
    "flag": ("flag", np.int32),
    "reconsumeTimes": ("reconsume_times", np.int32),
    "preparedTransactionOffset": ("prepared_offset", np.int64),
}
_PROPERTIES: dict[str, Callable[[PropertyTable], pa.Array]] = {
    "tags": lambda table: table.find(b"TAGS"),
    "keys": PropertyTable.keys,
    "properties": PropertyTable.maps,
    "propertiesString": PropertyTable.text,
    "uniqKey": lambda table: table.find(b"UNIQ_KEY"),
}


def _kept(heads: Heads, places: Places | None, rows: Mask) -> tuple[Heads, Places | None]:
    return heads.keep(rows), None if places is None else places.keep(rows)


def _topic_array(places: Places) -> pa.Array:
    """Returns the topic of each entry's queue."""
    return from_texts(places.topics).take(from_numpy(places.topic_numbers))


def _timestamps(ms: Int64s) -> pa.Array:
    """Converts times in ms to timestamps; null if µs overflow, as they may in a damaged head, which no CRC covers."""
    beyond = (ms > MILLISECONDS_MAX) | (ms < -MILLISECONDS_MAX)
    return from_numpy(ms * 1000, TIMESTAMP, nulls=beyond if bool(beyond.any()) else None)


def _chosen(batch: pa.RecordBatch, mask: pa.BooleanArray) -> pa.RecordBatch:
    """Returns the rows where `mask` is true. If all are, as is usual for rows chosen by queue, nothing is copied."""
    return batch if mask.true_count == len(batch) else batch.filter(mask)


def _constant(text: str, count: int) -> pa.Array:
    return from_texts([text]).take(from_numpy(np.zeros(count, np.int64)))


def _host_text(raw: bytes) -> str:
    return f"{ip_address(raw[:-4])}:{int.from_bytes(raw[-4:], 'big', signed=True)}"

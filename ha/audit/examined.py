"""Decodes the records of a range of one copy into arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ha.arrow import ReadOptions, decode_batches
from ha.arrow.heads import Heads, Int64s
from ha.audit.findings import HOUR_MS, Finding
from ha.audit.walk import Walked
from ha.protocol.codes import SysFlag
from ha.protocol.properties import INNER_NUM, decode_properties
from ha.protocol.record import MessageRecord, decode_record


class Examined:
    """The records of a range of one copy as arrays; row n is the record at `walked.positions[n]`."""

    def __init__(self, walked: Walked, broker_name: str) -> None:
        self.walked = walked
        self.positions = walked.positions
        raw = np.frombuffer(walked.data, np.uint8)
        at = walked.positions - walked.begin
        heads = Heads(raw, at, None)
        options = ReadOptions(columns=("topic", "tags", "crcOk"), decompress=False)
        # No base offset, so that a misplaced record is decoded like any other.
        [batch] = decode_batches(walked.data, at, base_offset=None, broker_name=broker_name, options=options)
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
        """Returns how many queue offsets each record takes; None if each takes one."""
        rows = np.flatnonzero(sys_flag & SysFlag.INNER_BATCH)
        if not len(rows):
            return None
        steps = np.ones(len(self.positions), np.int64)
        for row in rows.tolist():
            number = decode_properties(self.record(row).properties).get(INNER_NUM, "1")
            steps[row] = int(number) if number.isdecimal() and len(number) < 10 else 1
        return steps

    def record(self, row: int) -> MessageRecord:
        """Decodes the record of one row with the reference codec, without checking its CRC.

        Raises RemoteProtocolError if it is not a valid record.
        """
        return decode_record(self.walked.data, int(self.positions[row]) - self.walked.begin, verify_crc=False)

    def raw(self, row: int) -> bytes:
        """Returns the bytes of the record of one row."""
        at = int(self.positions[row]) - self.walked.begin
        return self.walked.data[at : at + int(self.sizes[row])]

    def finding(self, kind: str, copy: str, row: int, detail: str = "") -> Finding:
        """Returns a finding about the record of one row."""
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
        """Groups the given rows by queue: (topic, queue id, its rows in physical order)."""
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

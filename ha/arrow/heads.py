"""Reads the fixed fields of many records as columns, and determines whether each record is sound.

The reference is the parser of `ha.protocol.record`; a test compares the two. A NumPy type describes the fixed fields of
a record, and is read at the positions of all records at once. Records with IPv6 hosts have longer types; their fields
are copied into the same columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ha.protocol.codes import SysFlag
from ha.protocol.properties import PROPERTIES_SIZE_MAX
from ha.protocol.record import MAGIC_V1, MAGIC_V2, RECORD_SIZE_MIN, TOPIC_SIZE_V1_MAX

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
_HOSTS_V6 = SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6


def _head_type(born_host_size: int, store_host_size: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("total_size", ">i4"),
            ("magic", ">i4"),
            ("body_crc", ">i4"),
            ("queue_id", ">i4"),
            ("flag", ">i4"),
            ("queue_offset", ">i8"),
            ("physical_offset", ">i8"),
            ("sys_flag", ">i4"),
            ("born_ms", ">i8"),
            ("born_host", f"V{born_host_size}"),
            ("store_ms", ">i8"),
            ("store_host", f"V{store_host_size}"),
            ("reconsume_times", ">i4"),
            ("prepared_offset", ">i8"),
            ("body_size", ">i4"),
        ]
    )


HEAD = _head_type(8, 8)
_WIDE_HEADS = {
    SysFlag.BORNHOST_V6: _head_type(20, 8),
    SysFlag.STOREHOST_V6: _head_type(8, 20),
    _HOSTS_V6: _head_type(20, 20),
}
_MOVED = ("born_ms", "store_ms", "reconsume_times", "prepared_offset", "body_size")


def gather(raw: Bytes, positions: Int64s, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Returns a copy of the value of type `kind` at each position of `raw`; every position must leave room for one."""
    width = kind.itemsize
    windows = np.ndarray(shape=(max(len(raw) - width + 1, 0),), dtype=f"V{width}", buffer=raw, strides=(1,))
    return windows[positions].view(kind)


class Heads:
    """Fixed fields of the records at `positions` (bytes from the start of `raw`), one row for each position. `sound`
    masks the rows with a valid record.

    The fields of other rows are unchecked: they are read at the position, or at the start of `raw` if no record fits at
    the position; zeros if `raw` is too short even for that.
    """

    def __init__(self, raw: Bytes, positions: Int64s, base_offset: int | None, *, check_parts: bool = True) -> None:
        """`base_offset`: the physical offset of `raw`'s first byte, None if the records' own offsets are not checked.

        `check_parts`: also read and check each record's end, where topic and properties are. Otherwise their positions
        and sizes are not set.
        """
        self.raw = raw
        self.positions = positions
        size = len(raw)
        room = (positions >= 0) & (positions <= size - RECORD_SIZE_MIN)  # a damaged entry may point anywhere
        safe = positions if bool(room.all()) else np.where(room, positions, 0)
        if size < HEAD.itemsize:
            self._fields = np.zeros(len(positions), HEAD)
            room = np.zeros(len(positions), bool)
        else:
            self._fields = gather(raw, safe, HEAD)
        magic = self._fields["magic"]
        self.total_size = self._fields["total_size"].astype(np.int64)
        self.is_v2 = magic == MAGIC_V2
        sound = room & ((magic == MAGIC_V1) | self.is_v2)
        sound &= (self.total_size >= RECORD_SIZE_MIN) & (positions + self.total_size <= size)
        if base_offset is not None:
            sound &= self._fields["physical_offset"] == positions + base_offset
        self.sys_flag = self._fields["sys_flag"].astype(np.int32)
        self.head_size = np.full(len(positions), HEAD.itemsize, np.int64)
        self.wide: dict[int, Int64s] = {}
        hosts = self.sys_flag & _HOSTS_V6
        if hosts.any():
            self._fold_wide(hosts, sound)
        self.body_size = self._fields["body_size"].astype(np.int64)
        self.body_at = positions + self.head_size
        body_end = self.body_at + self.body_size
        self.record_end = positions + self.total_size
        sound &= (self.body_size >= 0) & (body_end + 3 <= self.record_end)
        self.sound = sound
        self.has_wrong_crc = np.zeros(len(positions), bool)
        """Whether each record's body CRC is wrong; false until a caller checks them"""
        if check_parts:
            self._check_parts(body_end)

    def _fold_wide(self, hosts: npt.NDArray[np.int32], sound: npt.NDArray[np.bool_]) -> None:
        for flags, kind in _WIDE_HEADS.items():
            rows = np.flatnonzero((hosts == flags) & sound)
            fits = self.positions[rows] + kind.itemsize <= len(self.raw)
            sound[rows[~fits]] = False
            rows = rows[fits]
            if not len(rows):
                continue
            wide = gather(self.raw, self.positions[rows], kind)
            for name in _MOVED:
                self._fields[name][rows] = wide[name]
            if flags == SysFlag.BORNHOST_V6:
                self._fields["store_host"][rows] = wide["store_host"]
            self.head_size[rows] = kind.itemsize
            self.wide[flags] = rows

    def _check_parts(self, body_end: Int64s) -> None:
        # V1 has one byte of topic length, V2 two. Where a record is unsound, look at the buffer's start instead.
        self.topic_at = body_end + 1 + self.is_v2
        last = len(self.raw) - 1
        at = np.where(self.sound & (self.topic_at <= last), self.topic_at, min(2, max(last, 0)))
        if len(self.raw) < 3:
            self.topic_size = np.zeros(len(at), np.int64)
        else:
            self.topic_size = self.raw[at - 1].astype(np.int64)
            if self.is_v2.any():
                self.topic_size += np.where(self.is_v2, self.raw[at - 2].astype(np.int64) << 8, 0)
        topic_end = self.topic_at + self.topic_size
        self.sound &= topic_end + 2 <= self.record_end
        self.sound &= self.topic_size <= np.where(self.is_v2, PROPERTIES_SIZE_MAX, TOPIC_SIZE_V1_MAX)
        at = np.where(self.sound, topic_end, 0)
        if len(self.raw) >= 2:
            self.properties_size = (self.raw[at].astype(np.int64) << 8) | self.raw[at + 1]
        else:
            self.properties_size = np.zeros(len(at), np.int64)
        self.properties_at = topic_end + 2
        self.sound &= self.properties_size <= PROPERTIES_SIZE_MAX
        self.sound &= self.properties_at + self.properties_size == self.record_end

    def field(self, name: str) -> npt.NDArray[Any]:
        """Returns one fixed field of each record, big-endian as on disk. A host is valid only where it is IPv4."""
        return self._fields[name]

    def keep(self, chosen: npt.NDArray[np.bool_] | Int64s) -> Heads:
        """Returns a copy with only the chosen rows: those of a mask, or of row numbers."""
        kept = object.__new__(Heads)
        kept.raw = self.raw
        for name, value in vars(self).items():
            if name not in ("raw", "wide"):
                setattr(kept, name, value[chosen])
        rows = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        kept.wide = {
            flags: np.flatnonzero(np.isin(rows, wide_rows)) for flags, wide_rows in self.wide.items() if len(wide_rows)
        }
        return kept

    def __len__(self) -> int:
        return len(self.positions)

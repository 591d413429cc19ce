"""A node's store as bytes, from a simulated disk or from the directory of a killed process.

    image = StoreImage.from_directory(path)
    begin, end = image.log_range()
    for record in image.records(): ...

The end is determined from the bytes: it is behind the last valid record of an unbroken chain from `begin` on, or behind
the filler after it, which takes the rest of its segment whether there is a next one or not. A slave's log may end
inside a record; pass `end` if it is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.checkers.records import BadRecord, Rec, parse_at, scan

Bytes = bytes | bytearray | memoryview

SEGMENT_NAME_DIGITS = 20


class StoreImage:
    """The files of one node; names are relative to the store's root, with slashes.

    `segment_size` (bytes) defaults to the size of the commitlog's files, which are all of one size. `end`: the physical
    offset of the log's end, if known. `name` is the node's, for messages. `misread_to`: physical offset; a bit that no
    node can notice may have flipped in a record before it, for example in its queue, its queue offset or a time.
    """

    def __init__(
        self,
        files: Mapping[str, Bytes],
        segment_size: int | None = None,
        *,
        end: int | None = None,
        name: str = "store",
        misread_to: int = 0,
    ) -> None:
        self.files = files
        self.name = name
        self.misread_to = misread_to
        self.segments: dict[int, Bytes] = {}
        for path in sorted(files):
            folder, _, file = path.partition("/")
            if folder == "commitlog" and len(file) == SEGMENT_NAME_DIGITS and file.isdigit() and len(files[path]):
                self.segments[int(file)] = files[path]
        if segment_size is None:
            segment_size = len(next(iter(self.segments.values()))) if self.segments else 1 << 30
        self.segment_size = segment_size
        self._known_end = end
        self._scanned: tuple[list[Rec], BadRecord | None] | None = None

    @classmethod
    def from_directory(cls, path: Path, segment_size: int | None = None, *, name: str | None = None) -> StoreImage:
        """Reads every file below a store's root; none may be truncated meanwhile."""
        files: dict[str, Bytes] = {
            file.relative_to(path).as_posix(): _read_sparse(file) for file in sorted(path.rglob("*")) if file.is_file()
        }
        return cls(files, segment_size, name=name or path.name)

    # ---- the commitlog

    @property
    def begin(self) -> int:
        """Physical offset of the first byte held; 0 without segments."""
        return min(self.segments, default=0)

    @property
    def allocated_end(self) -> int:
        """Physical offset of the end of the last segment, used or not."""
        return max(self.segments) + self.segment_size if self.segments else 0

    def read(self, offset: int, size: int) -> bytes:
        """Returns up to `size` bytes from a physical offset, across segments; fewer if a segment or its rest is
        missing."""
        pieces = []
        while size > 0:
            start = offset - offset % self.segment_size
            segment = self.segments.get(start)
            if segment is None:
                break
            position = offset - start
            piece = bytes(segment[position : min(position + size, self.segment_size)])
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def log_range(self) -> tuple[int, int]:
        """Physical offsets [begin, end): `end` as given, or behind the unbroken chain of valid records."""
        if self._known_end is not None:
            return self.begin, self._known_end
        return self.begin, self.sound_end

    @property
    def is_end_known(self) -> bool:
        """Whether the end of the log was given."""
        return self._known_end is not None

    @property
    def used_end(self) -> int:
        """Physical offset behind the last used byte: as given, or behind the last nonzero byte.

        Unlike `log_range` it does not depend on valid records. Halog leaves only zeros behind the end.
        """
        if self._known_end is not None:
            return self._known_end
        for start in sorted(self.segments, reverse=True):
            used = len(bytes(self.segments[start]).rstrip(b"\x00"))
            if used:
                return max(start + used, self.sound_end)
        return self.sound_end

    @property
    def sound_end(self) -> int:
        """The end of the unbroken chain of valid records, and of fillers at segment ends, from `begin` on.

        A master's log ends there, too: the filler raises its end to that of the segment (RocketMQ: getMaxOffset), an
        empty slave starts there, and a slave that has everything has the filler.
        """
        broken = self.break_at
        if broken is not None:
            return broken.offset
        return self.allocated_end if self._known_end is None else self._known_end

    def records(self) -> list[Rec]:
        """The valid records from `begin` up to the first break in the chain."""
        return self._scan()[0]

    @property
    def break_at(self) -> BadRecord | None:
        """Why the chain of records ends; None if the log is full to its last byte, or has no segment."""
        return self._scan()[1]

    def _scan(self) -> tuple[list[Rec], BadRecord | None]:
        if self._scanned is None:
            found: list[Rec] = []
            broken = None
            end = self.allocated_end if self._known_end is None else self._known_end
            try:
                for record in scan(self.read, self.begin, end, self.segment_size):
                    found.append(record)
            except BadRecord as bad:
                broken = bad
            self._scanned = found, broken
        return self._scanned

    def record_at(self, offset: int) -> Rec | None:
        """The valid record at a physical offset; None if there is none."""
        try:
            return parse_at(self.read, offset, self.allocated_end, self.segment_size)
        except BadRecord:
            return None

    # ---- other files

    def folder(self, prefix: str) -> Iterator[tuple[str, Bytes]]:
        """Yields (name below it, bytes) of the files below a folder, sorted by name."""
        prefix = prefix.rstrip("/") + "/"
        for path in sorted(self.files):
            if path.startswith(prefix):
                yield path[len(prefix) :], self.files[path]


def _read_sparse(path: Path) -> bytearray:
    """Returns a file's bytes. Its holes are not touched: reading one through a map is a SIGBUS on a full tmpfs."""
    with path.open("rb", buffering=0) as file:
        content = bytearray(os.fstat(file.fileno()).st_size)
        position = 0
        with memoryview(content) as view:
            while position < len(content):
                try:
                    begin = os.lseek(file.fileno(), position, os.SEEK_DATA)
                except OSError:  # only a hole up to the end
                    break
                end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                file.seek(begin)
                while begin < end and (count := file.readinto(view[begin:end])):
                    begin += count
                position = end
    return content

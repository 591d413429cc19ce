"""Damaging a good store by a script of edits, which mutates better than whole files.

A script is a list of edits of seven bytes and more: file number, position as uint32, kind, count n, then up to n bytes:
    kind mod 4   0 write the bytes there   1 flip the bits of the first byte, n times   2 zero 2^(n mod 13) bytes
                 3 cut the file there, or lengthen it to there
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

EDIT_COUNT_MAX = 12


class Edit(NamedTuple):
    """One edit; `file` counts among the sorted names."""

    file: int
    position: int
    kind: int
    times: int
    content: bytes

    def to_bytes(self) -> bytes:
        """Its form in a script."""
        head = bytes([self.file]) + self.position.to_bytes(4, "big") + bytes([self.kind, self.times])
        return head + self.content[: self.times]


def edits(script: bytes) -> Iterator[Edit]:
    """The edits in any bytes."""
    at = 0
    for _ in range(EDIT_COUNT_MAX):
        if len(script) - at < 7:
            return
        count = script[at + 6]
        begin = at + 7
        at = begin + (count if script[at + 5] % 4 == 0 else min(count, 1))
        yield Edit(
            script[begin - 7],
            int.from_bytes(script[begin - 6 : begin - 2], "big"),
            script[begin - 2],
            count,
            script[begin:at],
        )


def damaged(files: Mapping[str, bytes], script: bytes, *, may_resize: bool = True) -> dict[str, bytes]:
    """The files after the edits; positions wrap at a file's end."""
    names = sorted(files)
    found = {name: bytearray(files[name]) for name in names}
    for edit in edits(script):
        content = found[names[edit.file % len(names)]]
        kind = edit.kind % 4
        if kind == 3 and may_resize:
            size = edit.position % (2 * len(content) + 1)
            del content[size:]
            content.extend(bytes(size - len(content)))
            continue
        if not content:
            continue
        at = edit.position % len(content)
        if kind == 0:
            content[at : at + len(edit.content)] = edit.content[: len(content) - at]
        elif kind == 1:
            for step in range(edit.times + 1):
                content[(at + step) % len(content)] ^= edit.content[0] if edit.content else 1
        elif kind == 2:
            size = min(1 << edit.times % 13, len(content) - at)
            content[at : at + size] = bytes(size)
    return {name: bytes(content) for name, content in found.items()}

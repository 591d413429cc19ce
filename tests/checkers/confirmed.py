"""What any member has ever shown as confirmed is the same on every member, for good.

A member dispatches to consumers what the sync-state set has, so its consume queues tell how far the log is confirmed:
up to behind the last record that an entry points to. Promises, of the open stores at any moment: up to there a log is,
byte for byte, what every other member had there that ever got so far.
Fault model: any, but for members whose disk lost what they had acknowledged (`forget_beyond`).
Does not look at: what is behind the confirmed range, of which members may differ, and which may be cut off.
"""

from __future__ import annotations

from tests.checkers.derived import read_queues
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "confirmed"


def confirmed_end(image: StoreImage) -> int:
    """Physical offset behind the last record that a consume queue knows."""
    ends = [
        physical_offset + size
        for entries in read_queues(image).values()
        for physical_offset, size, _ in entries.values()
    ]
    return max(ends, default=0)


class Confirmed:
    """Remembers the longest confirmed range that was seen, and holds every member's against it."""

    def __init__(self) -> None:
        self._log = bytearray()
        self._from = ""
        self._seen: dict[str, int] = {}

    def check(self, images: dict[str, StoreImage]) -> list[Violation]:
        """Judge stores that their nodes have opened since they last crashed."""
        found = []
        for name, image in images.items():
            end = confirmed_end(image)
            begin = min(self._seen.get(name, 0), end)
            raw = image.read(begin, end - begin)
            common = self._log[begin : begin + len(raw)]
            if len(raw) < end - begin:
                text = f"{name}: its consume queues go to {end}, its log only to {begin + len(raw)}"
                found.append(Violation(CHECKER, text))
            elif raw[: len(common)] != common:
                at = begin + next(
                    i for i, (ours, theirs) in enumerate(zip(raw, common, strict=False)) if ours != theirs
                )
                text = (
                    f"{name} and {self._from} differ at physical offset {at}, and both have shown it to consumers "
                    f"({name} up to {end}, {self._from} up to {len(self._log)})"
                )
                found.append(Violation(CHECKER, text))
            elif end > len(self._log):
                self._log += raw[len(common) :]
                self._from = name
            self._seen[name] = end
        return found

    def forget_beyond(self, end: int) -> None:
        """All that had to keep the log behind a physical offset have lost it, lawfully."""
        del self._log[end:]
        self._seen.clear()

    def on_crash(self, name: str) -> None:
        """A node is another process from now on: all of its log is looked at again."""
        self._seen.pop(name, None)

"""What any member has ever shown as confirmed is the same on every member, for good.

A member dispatches to consumers what the sync-state set has, so its consume queues tell how far the log is confirmed:
up to behind the last record that an entry points to. Promises, of the open stores at any moment: up to there a log is,
byte for byte, what every other member had there that ever got so far.
Fault model: any, but for members whose disk lost what they had acknowledged (`forget_beyond`). Members outside the set
may have more of the log then than it has. They keep it until an operator decides, so they may differ from the others.
Does not look at: what is behind the confirmed range, of which members may differ, and which may be cut off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
        self._ahead: dict[str, int] = {}
        """Member outside the set -> physical offset from which it may differ from the others"""

    def check(self, images: dict[str, StoreImage]) -> list[Violation]:
        """Judge stores that their nodes have opened since they last crashed."""
        found = []
        for name, image in images.items():
            end = confirmed_end(image)
            if name in self._ahead:
                end = min(end, self._ahead[name])
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

    def forget_beyond(self, end: int, ahead: Collection[str] = ()) -> None:
        """All that had to keep the log behind a physical offset have lost it, lawfully; those `ahead` may have it."""
        del self._log[end:]
        self._seen.clear()
        self._ahead = {name: min(end, self._ahead.get(name, end)) for name in {*ahead, *self._ahead}}

    def on_in_set(self, names: Iterable[str]) -> None:
        """Members are in the sync-state set, so they have the log that the others have."""
        for name in names:
            self._ahead.pop(name, None)

    def on_crash(self, name: str) -> None:
        """A node is another process from now on: all of its log is looked at again."""
        self._seen.pop(name, None)

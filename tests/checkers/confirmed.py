"""Everything that any member has shown as confirmed is the same on every member, permanently.

A member dispatches only messages that the sync-state set has, so its consume queues show how far the log is confirmed:
up to the end of the last record that an entry points to. Promise, for the open stores at any moment: up to there a log
equals, byte for byte, the log of every other member that ever confirmed as much.

Fault model: any, except members whose disk lost acknowledged data (`forget_beyond`). Members outside the set may then
have more of the log than the set. They keep it until an operator decides, so they may differ.

Not checked: the log behind the confirmed range, where members may differ and which may be truncated.
"""

from collections.abc import Collection, Iterable

from tests.checkers.derived import read_queues
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "confirmed"


def confirmed_end(image: StoreImage) -> int:
    """Physical offset of the end of the last record in a consume queue."""
    ends = [
        physical_offset + size
        for entries in read_queues(image).values()
        for physical_offset, size, _ in entries.values()
    ]
    return max(ends, default=0)


class Confirmed:
    """Remembers the longest confirmed range seen, and compares every member with it."""

    def __init__(self) -> None:
        self._log = bytearray()
        self._from = ""
        self._seen: dict[str, int] = {}
        self._ahead: dict[str, int] = {}
        """Member outside the set -> physical offset from which it may differ from the others"""

    def check(self, images: dict[str, StoreImage]) -> list[Violation]:
        """Checks stores that their nodes have opened since they last crashed."""
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
        """Records a lawful loss of the log behind a physical offset by all members that had to keep it; members `ahead`
        may still have it."""
        del self._log[end:]
        self._seen.clear()
        self._ahead = {name: min(end, self._ahead.get(name, end)) for name in {*ahead, *self._ahead}}

    def on_in_set(self, names: Iterable[str]) -> None:
        """Members are in the sync-state set, so they have the same log as the others."""
        for name in names:
            self._ahead.pop(name, None)

    def on_crash(self, name: str) -> None:
        """A new process of this node: its whole log is checked again."""
        self._seen.pop(name, None)

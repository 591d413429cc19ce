"""Every member of the sync-state set has every acknowledged message.

Promises, checked whenever the agreement service changes the set, and whenever a PUT_OK is handed to the network:
- If the whole set acknowledges, every member of the set has every message acknowledged so far, at the reported offset.
- If n members acknowledge, at least n members have it (all, if the set is smaller), so any |set| - n + 1 members, the
  number that an election needs, include one that has it.

This is stronger than "nothing is lost": it holds before any fault.

Fault model: kills, pauses, networks and clocks lose nothing; a power loss keeps everything flushed before it was
acknowledged. A member that lost unflushed messages (`on_power_lost`) is excused until it has all messages again.

Not checked: a master that acknowledges alone, which promises none of this.
"""

from collections.abc import Callable, Sequence

from tests.checkers.history import Accepted, body_id_of
from tests.checkers.records import BadRecord, parse_at
from tests.checkers.violation import Violation

CHECKER = "in_sync"

ReadNode = Callable[[str, int, int], bytes]
"""(node, physical offset, size) -> bytes; fewer where the node holds none"""


class InSync:
    """Checks a group. `ack_count`: number of members that acknowledge, None: all. `read` reads the current log of a
    node."""

    def __init__(self, read: ReadNode, *, segment_size: int, ack_count: int | None) -> None:
        self._read = read
        self._segment_size = segment_size
        self._ack_count = ack_count
        self._acknowledged: list[Accepted] = []
        self._members: frozenset[str] = frozenset()
        self._lost_power: set[str] = set()
        """Members that have not been seen to have everything since a power loss"""

    @property
    def acknowledged(self) -> Sequence[Accepted]:
        """All acknowledgements handed to the network."""
        return self._acknowledged

    def on_power_lost(self, node: str) -> None:
        """A member that acknowledges before it flushes has lost power."""
        self._lost_power.add(node)

    def forget(self, lost: Callable[[Accepted], bool]) -> None:
        """All members that had to keep these messages have lost them, lawfully."""
        self._acknowledged = [accepted for accepted in self._acknowledged if not lost(accepted)]

    def on_set(self, members: frozenset[str]) -> list[Violation]:
        """The service now holds this set."""
        if members == self._members:
            return []
        is_shrinking = members < self._members
        self._members = members
        if is_shrinking and self._ack_count is None:
            return []  # fewer members are required now
        return self._judge_all()

    def on_acknowledged(self, accepted: Accepted) -> list[Violation]:
        """A PUT_OK is in flight to a client, who may never receive it."""
        self._acknowledged.append(accepted)
        return self._judge(accepted)

    def check(self) -> list[Violation]:
        """Checks everything, now."""
        return self._judge_all()

    def _judge_all(self) -> list[Violation]:
        for name in sorted(self._lost_power):
            if all(self._has(name, accepted) for accepted in self._acknowledged):
                self._lost_power.discard(name)
        found: list[Violation] = []
        for accepted in self._acknowledged:
            found.extend(self._judge(accepted))
            if len(found) >= 3:
                break
        return found

    def _judge(self, accepted: Accepted) -> list[Violation]:
        members = self._members
        needed = len(members) if self._ack_count is None else min(self._ack_count, len(members))
        lacking = [name for name in sorted(members) if not self._has(name, accepted)]
        holding = len(members) - len(lacking)
        if holding + len(self._lost_power.intersection(lacking)) >= needed:
            return []
        text = (
            f"{accepted} is acknowledged by {accepted.answered.node}, and the sync-state set is "
            f"{', '.join(sorted(members))}, of which {needed} must have it: {', '.join(lacking)} have not"
        )
        return [Violation(CHECKER, text)]

    def _has(self, node: str, accepted: Accepted) -> bool:
        offset = accepted.answered.physical_offset
        end = offset - offset % self._segment_size + self._segment_size
        try:
            record = parse_at(lambda at, size: self._read(node, at, size), offset, end, self._segment_size)
        except BadRecord:
            return False
        return record is not None and body_id_of(record.body) == accepted.sent.body_id

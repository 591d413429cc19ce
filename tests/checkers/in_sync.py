"""The sync-state set is what it says: whoever is in it has what was acknowledged.

Promises, live, whenever the agreement service changes the set, and whenever a PUT_OK is handed to the network:
- where all of the set acknowledge: every member of the set has every message that was ever acknowledged, at the place
  that the client was told;
- where n do: n of its members have it, or all if it is smaller: any |set| - n + 1 of them, which is what an election
  takes, have it among them.
That is stronger than "nothing is lost": it holds before anybody fails.

Fault model: kills, pauses, networks and clocks take nothing, power nothing that was flushed before it was acknowledged.
What a member loses with the power that it had not flushed (`on_power_lost`) is not held against it, until it has all
messages again.
Does not look at: the master that acknowledges alone, which promises nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.checkers.history import Accepted, body_id_of
from tests.checkers.records import BadRecord, parse_at
from tests.checkers.violation import Violation

CHECKER = "in_sync"

ReadNode = Callable[[str, int, int], bytes]
"""(node, physical offset, size) -> bytes; fewer where it holds none"""


class InSync:
    """Judges a group. `ack_count`: how many of the set acknowledge, None: all. `read` reads a node's log as it is."""

    def __init__(self, read: ReadNode, *, segment_size: int, ack_count: int | None) -> None:
        self._read = read
        self._segment_size = segment_size
        self._ack_count = ack_count
        self._acknowledged: list[Accepted] = []
        self._members: frozenset[str] = frozenset()
        self._lost_power: set[str] = set()
        """Members that have not been seen to have everything since"""

    @property
    def acknowledged(self) -> Sequence[Accepted]:
        """All that was on its way to a client."""
        return self._acknowledged

    def on_power_lost(self, node: str) -> None:
        """A member that acknowledges before it flushes has lost power."""
        self._lost_power.add(node)

    def forget(self, lost: Callable[[Accepted], bool]) -> None:
        """All that had to keep these have lost them, lawfully."""
        self._acknowledged = [accepted for accepted in self._acknowledged if not lost(accepted)]

    def on_set(self, members: frozenset[str]) -> list[Violation]:
        """The service holds this set now."""
        if members == self._members:
            return []
        is_shrinking = members < self._members
        self._members = members
        if is_shrinking and self._ack_count is None:
            return []  # less is asked now
        return self._judge_all()

    def on_acknowledged(self, accepted: Accepted) -> list[Violation]:
        """A PUT_OK is on its way to a client, who may never get it."""
        self._acknowledged.append(accepted)
        return self._judge(accepted)

    def check(self) -> list[Violation]:
        """Judge everything, now."""
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

"""One master at a time acknowledges, each in its own term.

Judged from what the agreement service held, when, and what clients were told by whom.

Promises:
- The service never gives a term to two members, and never a term that is not higher than all before it.
- Live: whoever answers PUT_OK, or that an offset is committed, held the master's key in the service at some moment
  between the client's asking and its having the answer. (When exactly it was acknowledged cannot be seen from outside.)
  A process is not the master by a key that an earlier process of its member took, which the service holds until the
  lease of that one ends.
- At the end: an acknowledged message stands in the log within the term of the member that acknowledged it, by the
  log's own history of terms (`epochFileCheckpoint`: a line with a count, one with a checksum, then lines
  `epoch-offset`: where each term begins).
Fault model: any, as long as the service is linearizable and no lease ends early.
Does not look at: who has the message (in_sync), whether it stays (kept).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from tests.checkers.history import Accepted, History
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "terms"
EPOCH_FILE = "epochFileCheckpoint"


class Tenure(NamedTuple):
    """From this moment on `master` has the key, in `epoch`; "": nobody."""

    since_s: float
    master: str
    epoch: int


class Terms:
    """What the service said, and who may answer."""

    def __init__(self) -> None:
        self._tenures = [Tenure(0.0, "", 0)]
        self._masters: dict[int, str] = {}
        self._ended_s: dict[str, float] = {}

    def on_agreed(self, now_s: float, master: str, epoch: int) -> list[Violation]:
        """The service holds this from now on; `master` "": there is none."""
        last = self._tenures[-1]
        if (last.master, last.epoch) == (master, epoch):
            return []
        self._tenures.append(Tenure(now_s, master, epoch))
        if not master:
            return []
        known = self._masters.setdefault(epoch, master)
        if known != master:
            return [Violation(CHECKER, f"term {epoch} is given to {master}, and was {known}'s")]
        if last.master:
            return [Violation(CHECKER, f"{master} takes the key while {last.master} has it")]
        if epoch < max(self._masters):
            return [Violation(CHECKER, f"{master} has term {epoch}, and there was {max(self._masters)} already")]
        return []

    def on_process_ended(self, now_s: float, node: str) -> None:
        """A member's process is over; the key that it may have had is no later process's."""
        self._ended_s[node] = now_s

    def check_answer(self, node: str, asked_s: float, answered_s: float, what: str) -> list[Violation]:
        """`node` acknowledged something that it was asked for and answered at these moments."""
        first = bisect_right(self._tenures, asked_s, key=lambda tenure: tenure.since_s) - 1
        seen = [tenure for tenure in self._tenures[max(first, 0) :] if tenure.since_s <= answered_s]
        ended_s = self._ended_s.get(node, -math.inf)
        if any(tenure.master == node and (tenure.since_s >= ended_s or asked_s < ended_s) for tenure in seen):
            return []
        others = ", ".join(tenure.master or "nobody" for tenure in seen)
        text = f"{node} acknowledged {what} between {asked_s:.3f} and {answered_s:.3f} s, when {others} had the key"
        return [Violation(CHECKER, text)]

    def check_log(
        self, history: History, image: StoreImage, *, is_lost: Callable[[Accepted], bool] = lambda accepted: False
    ) -> list[Violation]:
        """Judge one member's history of terms at the end. `is_lost`: lawfully, so another message may be there."""
        entries = read_epochs(image)
        found = []
        for accepted in history.answers:
            answered = accepted.answered
            if answered.status != "PUT_OK" or not image.begin <= answered.physical_offset < image.sound_end:
                continue
            if is_lost(accepted):
                continue
            at = bisect_right(entries, answered.physical_offset, key=lambda entry: entry[1]) - 1
            epoch = entries[at][0] if at >= 0 else 0
            if self._masters.get(epoch) != answered.node:
                text = (
                    f"{accepted}: acknowledged by {answered.node}, and {image.name} has it in term {epoch}, "
                    f"which was {self._masters.get(epoch, 'nobody')}'s"
                )
                found.append(Violation(CHECKER, text))
        return found[:3]


def read_epochs(image: StoreImage) -> list[tuple[int, int]]:
    """(epoch, physical offset of its begin) of each term that a store knows, ascending."""
    lines = bytes(image.files.get(EPOCH_FILE, b"")).decode("ascii", "replace").splitlines()[2:]
    return [(int(epoch), int(offset)) for epoch, _, offset in (line.partition("-") for line in lines)]

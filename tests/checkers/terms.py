"""Only one master at a time acknowledges, each in its own term.

Checks what the agreement service held, when, and which member answered clients.

Promises:
- The service never gives one term to two members, and each term is higher than all before it. After it was restored
  from an older state, terms that no member's disk knows may be given again: nobody has served in them, because a master
  writes the record of its term to its disk first.
- Live: a member that answers PUT_OK, or acknowledges a committed offset, held the master's key in the service at some
  moment between the client's request and the arrival of the answer. (The exact moment of the acknowledgement can't be
  observed.) A process is not the master by a key taken by an earlier process of its member, which the service holds
  until that lease ends.
- At the end: an acknowledged message is in the log within the term of the member that acknowledged it, according to the
  log's own history of terms (`epochFileCheckpoint`: a line with a count, one with a checksum, then lines
  `epoch-offset`: where each term starts).

Fault model: any, as long as the service is linearizable and no lease ends early.

Not checked: who has the message (in_sync), whether it stays (kept).
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from tests.checkers.history import Accepted, History
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "terms"
EPOCH_FILE = "epochFileCheckpoint"


class Tenure(NamedTuple):
    """From this moment on `master` has the key, in `epoch`; "": no member."""

    since_s: float
    master: str
    epoch: int


class Terms:
    """The history of the service, and which members may answer."""

    def __init__(self) -> None:
        self._tenures = [Tenure(0.0, "", 0)]
        self._masters: dict[int, str] = {}
        self._ends_s: defaultdict[str, list[float]] = defaultdict(list)

    def on_agreed(self, now_s: float, master: str, epoch: int) -> list[Violation]:
        """The service holds this from now on; `master` "": there is none."""
        if self.is_held_by(master, epoch):
            return []
        last = self._tenures[-1]
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

    def is_held_by(self, master: str, epoch: int) -> bool:
        """Whether `master` has the key in `epoch`."""
        last = self._tenures[-1]
        return (last.master, last.epoch) == (master, epoch)

    def forget_beyond(self, epoch: int) -> None:
        """A master is about to be elected by a restored older record, and the disks of all members know `epoch` at
        most."""
        self._masters = {term: master for term, master in self._masters.items() if term <= epoch}

    def on_process_ended(self, now_s: float, node: str) -> None:
        """A member's process has ended; the key that it may have had does not belong to a later process."""
        self._ends_s[node].append(now_s)

    def check_answer(self, node: str, asked_s: float, answered_s: float, what: str) -> list[Violation]:
        """`node` acknowledged a request that was sent and answered at these moments."""
        first = bisect_right(self._tenures, asked_s, key=lambda tenure: tenure.since_s) - 1
        seen = [tenure for tenure in self._tenures[max(first, 0) :] if tenure.since_s <= answered_s]
        if any(tenure.master == node and asked_s < self._end_s(tenure) for tenure in seen):
            return []
        others = ", ".join(tenure.master or "nobody" for tenure in seen)
        text = f"{node} acknowledged {what} between {asked_s:.3f} and {answered_s:.3f} s, when {others} had the key"
        return [Violation(CHECKER, text)]

    def _end_s(self, tenure: Tenure) -> float:
        """When the process that took the key has ended; infinity: not yet."""
        ends = self._ends_s[tenure.master]
        return next(iter(ends[bisect_right(ends, tenure.since_s) :]), math.inf)

    def check_log(
        self, history: History, image: StoreImage, *, is_lost: Callable[[Accepted], bool] = lambda accepted: False
    ) -> list[Violation]:
        """Checks one member's history of terms at the end. `is_lost`: lost lawfully, so another message may be at its
        offset."""
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
    """(epoch, physical offset of its start) of each term in a store, ascending."""
    lines = bytes(image.files.get(EPOCH_FILE, b"")).decode("ascii", "replace").splitlines()[2:]
    return [(int(epoch), int(offset)) for epoch, _, offset in (line.partition("-") for line in lines)]

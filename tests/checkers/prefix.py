"""A slave's log equals its master's, byte for byte, over the range that both hold.

Promises: over [larger start, smaller end) the bytes are equal, including fillers and the zeros behind them. A slave
whose master lost its tail (power loss, without flush) keeps what it has, and bytes still in flight, and never appends
to it: from its next connection on it does not grow until it is wiped or set aside. A slave that lost power may lack the
rest of sectors that it had flushed before they were full (zeros), until it has compared its end with its master's.

Fault model: kills and power losses of any node, partitions, any delay. After `corrupt` of a node its bytes are compared
again only once the nodes were seen to be equal (Converged). A master whose log was replaced (`wipe`) may differ from a
slave anywhere.

Not checked: bytes beyond the smaller end, whether the bytes are valid records (soundness).
"""

from collections.abc import Mapping

from tests.checkers.history import Connected, Converged, Crashed, History, Recovered
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "prefix"
_PIECE = 1 << 20
_SECTOR = 512


class Prefix:
    """Checks the slaves of one master repeatedly; remembers where their logs diverged lawfully.

    The end of a log is given with its image; otherwise it is behind the last nonzero byte.
    """

    def __init__(self, master: str) -> None:
        self.master = master
        self._seen = 0
        self._stale: dict[str, tuple[int, int]] = {}  # slave -> (where it may differ from, its end then)
        self._absent: dict[str, int] = {}  # slave that is down -> where its master's log ended when that recovered
        self._late: dict[str, int] = {}  # slave -> the same, while its old connection may still bring bytes
        self._other: set[str] = set()  # slaves that have not been seen since their master was given another log
        self._known: set[str] = set()
        self._damaged: set[str] = set()
        self._unproven: set[str] = set()  # slaves that lost power and were not equal to their master since

    def check(self, history: History, images: Mapping[str, StoreImage]) -> list[Violation]:
        """Checks now. `images`: nodes that have opened their store since their last crash."""
        self._known.update(images)
        self._follow(history, images)
        for name, end in self._late.items():
            if name in images:
                self._part(name, end, images[name].used_end)
        master = images.get(self.master)
        if master is None or self.master in self._damaged:
            return []
        found = []
        for name, slave in images.items():
            if name == self.master or name in self._damaged:
                continue
            found.extend(self._check_slave(master, slave, name))
        return found

    def _check_slave(self, master: StoreImage, slave: StoreImage, name: str) -> list[Violation]:
        begin, end = slave.begin, slave.used_end
        stale = self._stale.get(name)
        common = min(end, master.used_end)
        if stale is not None:
            parted, known_end = stale
            if end <= parted or _is_prefix(slave, master, parted):
                del self._stale[name]  # it was emptied, or lost that tail too, and has followed since
            else:
                common = min(common, parted)
                if end > max(known_end, common) and first_difference(master, slave, parted, master.used_end):
                    text = (
                        f"{name} grew from {known_end} to {end} although its log and {self.master}'s differ from "
                        f"{parted} on: it has two histories in one log"
                    )
                    return [Violation(CHECKER, text)]
        differs = first_difference(master, slave, max(begin, master.begin), common)
        if differs is None:
            self._unproven.discard(name)
            return []
        if name in self._unproven and _is_torn(master, slave, differs, common):
            return []
        text = (
            f"{name} differs from {self.master} at physical offset {differs} "
            f"(both hold [{max(begin, master.begin)}, {common})): "
            f"{slave.read(differs, 16).hex(' ')} where the master has {master.read(differs, 16).hex(' ')}"
        )
        return [Violation(CHECKER, text)]

    def _follow(self, history: History, images: Mapping[str, StoreImage]) -> None:
        for event in history.events[self._seen :]:
            if isinstance(event, Recovered) and event.node == self.master:
                for name in self._known - {self.master}:
                    if name in images:
                        self._part_from_other(name, images)
                        self._late[name] = min(event.end, self._late.get(name, event.end))
                    else:  # it is down; its log will be checked after its recovery
                        self._absent[name] = min(event.end, self._absent.get(name, event.end))
            elif isinstance(event, Connected) and event.node in self._late:
                self._part(event.node, self._late.pop(event.node), event.end)
            elif isinstance(event, Recovered):
                self._part_from_other(event.node, images)
                for parted in (self._absent.pop(event.node, None), self._late.pop(event.node, None)):
                    if parted is not None:
                        self._part(event.node, parted, event.end)
            elif isinstance(event, Crashed) and event.kind == "wipe" and event.node == self.master:
                self._other = self._known - {self.master}
            elif isinstance(event, Crashed) and event.kind == "wipe":
                self._other.discard(event.node)
                self._late.pop(event.node, None)
                self._stale.pop(event.node, None)
                self._absent.pop(event.node, None)
                self._damaged.discard(event.node)
            elif isinstance(event, Crashed) and event.kind == "corrupt":
                self._damaged.add(event.node)
            elif isinstance(event, Crashed) and event.kind == "power":
                self._unproven.add(event.node)
            elif isinstance(event, Converged):
                self._damaged.difference_update(event.nodes)
        self._seen = len(history.events)

    def _part_from_other(self, name: str, images: Mapping[str, StoreImage]) -> None:
        """Records where the master's new log and the slave's diverge, if they do within the range that both hold."""
        if name not in self._other or name not in images or self.master not in images:
            return
        self._other.discard(name)
        master, slave = images[self.master], images[name]
        begin, end = max(master.begin, slave.begin), min(master.used_end, slave.used_end)
        parted = first_difference(master, slave, begin, end)
        if parted is not None:
            self._part(name, parted, slave.used_end)

    def _part(self, name: str, master_end: int, end: int) -> None:
        if end > master_end:
            self._stale[name] = min(master_end, self._stale.get(name, (master_end, 0))[0]), end


def check(history: History, images: Mapping[str, StoreImage], master: str) -> list[Violation]:
    """Checks once, with the whole history."""
    return Prefix(master).check(history, images)


def _is_prefix(slave: StoreImage, master: StoreImage, begin: int) -> bool:
    """Whether the slave's bytes from `begin` on equal the master's."""
    end = slave.used_end
    if end > master.used_end:
        return False
    return first_difference(master, slave, max(begin, slave.begin, master.begin), end) is None


def _is_torn(master: StoreImage, slave: StoreImage, begin: int, end: int) -> bool:
    """Whether the slave's bytes of [begin, end) are the master's, or zeros up to the end of a sector."""
    while (at := first_difference(master, slave, begin, end)) is not None:
        begin = min((at // _SECTOR + 1) * _SECTOR, end)
        if any(slave.read(at, begin - at)):
            return False
    return True


def first_difference(one: StoreImage, other: StoreImage, begin: int, end: int) -> int | None:
    """Returns the first physical offset of [begin, end) at which two logs differ or one has no bytes; None if they are
    equal."""
    while begin < end:
        size = min(_PIECE, end - begin)
        ours, theirs = one.read(begin, size), other.read(begin, size)
        if ours != theirs or len(ours) < size:
            for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
                if a != b:
                    return begin + position
            return begin + min(len(ours), len(theirs))
        begin += size
    return None

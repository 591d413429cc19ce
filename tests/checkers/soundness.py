"""A log is one unbroken chain of valid records, followed only by zeros.

Promises: from the start of the first segment, records (and a filler at the end of each segment) follow each other up to
the log's end; no segment is missing; each body matches its CRC; store times never decrease; the bytes behind the end
are zero, so that no later recovery can take them for messages.

Fault model: any store that a node has opened since its last crash, running or stopped. Not a disk just after a power
loss, which may be torn anywhere. A slave's log may end inside a record.

Not checked: whether the right messages are in it (durability), who else has them (prefix).
"""

import re
from itertools import pairwise
from struct import Struct

from tests.checkers.records import BadRecord, Rec
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "soundness"
_MAGIC = re.compile(rb"\xda\xa3\x20[\xa7\xab]")
_INT64 = Struct(">q")
_SHOWN_MAX = 3


def check(image: StoreImage, *, zero_behind_end: bool = True, clock_is_steady: bool = True) -> list[Violation]:
    """Checks one node's log. `zero_behind_end` is halog's own promise; RocketMQ leaves old bytes there.

    `clock_is_steady`: the wall clock was never set back, so store times never decrease.
    """
    found = [*_gaps(image)]
    records, broken = image.records(), image.break_at
    end = image.log_range()[1]
    if broken is not None and broken.offset < end and not broken.is_cut:
        found.append(Violation(CHECKER, f"{image.name}: the log should go on to {end}, but at {broken}"))
    behind = end if image.is_end_known else broken.offset if broken is not None else image.allocated_end
    lost = good_records_behind(image, behind)
    reason = broken.reason if broken is not None else "its last record"
    if lost:
        shown = ", ".join(str(record.physical_offset) for record in lost[:_SHOWN_MAX])
        text = (
            f"{image.name}: the chain of records breaks at physical offset {behind} ({reason}); {len(lost)} good "
            f"records behind it, at {shown}, can't be reached and would be lost at the next start"
        )
        found.append(Violation(CHECKER, text))
    elif zero_behind_end and (stale := _first_nonzero(image, behind)) is not None:
        text = (
            f"{image.name}: the log ends at {end} ({reason}), but bytes that are not zero stand behind it, "
            f"the first at {stale}"
        )
        if image.is_end_known or (broken is not None and not broken.is_cut):
            found.append(Violation(CHECKER, text))
    if clock_is_steady:
        found.extend(_falling_times(image, records))
    return found


def good_records_behind(image: StoreImage, offset: int) -> list[Rec]:
    """The valid records behind a physical offset, at any position."""
    found: list[Rec] = []
    for start in sorted(image.segments):
        if start + image.segment_size <= offset:
            continue
        for match in _MAGIC.finditer(image.segments[start], max(0, offset - start)):
            at = start + match.start() - 4
            if at < max(offset, start) or (found and at < found[-1].end):
                continue
            (claimed,) = _INT64.unpack(image.read(at + 28, 8).rjust(8, b"\xff"))
            record = image.record_at(at) if claimed == at else None
            if record is not None:
                found.append(record)
    return found


def _gaps(image: StoreImage) -> list[Violation]:
    found = []
    starts = sorted(image.segments)
    for start in starts:
        size = len(image.segments[start])
        if size != image.segment_size:
            text = f"{image.name}: segment {start:020d} has {size} bytes, the others {image.segment_size}"
            found.append(Violation(CHECKER, text))
    for before, after in pairwise(starts):
        if after != before + image.segment_size:
            text = f"{image.name}: no segment between {before:020d} and {after:020d}"
            found.append(Violation(CHECKER, text))
    return found


def _first_nonzero(image: StoreImage, offset: int) -> int | None:
    for start in sorted(image.segments):
        if start + image.segment_size > offset:
            begin = max(0, offset - start)
            rest = bytes(image.segments[start][begin:])
            stripped = rest.lstrip(b"\x00")
            if stripped:
                return start + begin + len(rest) - len(stripped)
    return None


def _falling_times(image: StoreImage, records: list[Rec]) -> list[Violation]:
    for before, after in pairwise(records):
        if after.store_ms < before.store_ms:
            text = (
                f"{image.name}: the record at {after.physical_offset} was stored at {after.store_ms} ms, "
                f"before the one in front of it ({before.store_ms} ms)"
            )
            return [Violation(CHECKER, text)]
    return []


__all__ = ["BadRecord", "check", "good_records_behind"]

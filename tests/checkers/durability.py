"""Nothing acknowledged is lost, nothing is invented, nothing is duplicated.

Promises for the current files of the nodes:
- A message answered with PUT_OK is on as many nodes as the mode promises, minus the nodes that have since suffered a
  fault that their mode does not survive. It is on the master unless that suffered such a fault. It is intact: body,
  topic, queue, and the physical offset reported to the client.
- A message stored with FLUSH_DISK_TIMEOUT, FLUSH_SLAVE_TIMEOUT or SLAVE_NOT_AVAILABLE is on the master, unless that
  lost power or worse.
- A message that a node delivered to a consumer stays in that node's log.
- Every record is a complete message that was sent, and each message is stored once.

Fault model: `kill` loses nothing on any node. `power` loses what was not flushed: on a SYNC_FLUSH master nothing that
was answered with PUT_OK or delivered to a consumer, on other nodes anything. `corrupt` and `wipe` may lose anything.
Once nodes were seen to hold the same log (Converged), everything in it counts as stored on each of them.

Not checked: logs shortened by retention (what precedes a log's start counts as expired), unanswered messages, disks
between a power loss and the next start.
"""

import math
from collections.abc import Mapping

from tests.checkers.history import Accepted, Consumed, Converged, History, body_id_of
from tests.checkers.records import Rec
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "durability"

LATE_S = 60.0
"""Maximum delay of an answer: it may arrive after its node has lost the data it acknowledges."""


def check(history: History, images: Mapping[str, StoreImage]) -> list[Violation]:
    """Checks the nodes' files. `images` has every node in the history, running or not."""
    held = {name: _Held(image) for name, image in images.items()}
    found = _strangers(history, held)
    for accepted in history.answers:
        if accepted.is_stored:
            found.extend(_check_answer(history, accepted, held))
    found.extend(_check_consumed(history, held))
    return found


def check_strangers(history: History, images: Mapping[str, StoreImage]) -> list[Violation]:
    """Checks only that every record is a complete message that was sent, and is stored once."""
    return _strangers(history, {name: _Held(image) for name, image in images.items()})


def may_have_lost(history: History, node: str, since_s: float, *, is_flushed: bool, before_s: float = math.inf) -> bool:
    """Whether a fault of a node in [since_s, before_s] may have lost a message there.

    `is_flushed`: the mode promised that the message was on that node's disk by then.
    """
    return any(
        crash.kind in ("corrupt", "wipe") or (crash.kind == "power" and not is_flushed)
        for crash in history.crashes(node, since_s, before_s)
    )


class _Held:
    """One node's records by message."""

    def __init__(self, image: StoreImage) -> None:
        self.image = image
        self.at: dict[int, Rec] = {}
        self.of: dict[bytes, list[Rec]] = {}
        self.damaged: list[Rec] = []
        self.queued: dict[tuple[str, int, int], bytes] = {}
        for record in image.records():
            if record.is_copy:
                continue
            self.at[record.physical_offset] = record
            body_id = body_id_of(record.body)
            if body_id is None:
                self.damaged.append(record)
                continue
            self.of.setdefault(body_id, []).append(record)
            if record.is_queued:
                self.queued[record.topic, record.queue_id, record.queue_offset] = body_id

    def fault(self, accepted: Accepted) -> str:
        """Why this node does not hold a message at the reported offset; "" if it does."""
        sent, answered = accepted.sent, accepted.answered
        record = self.at.get(answered.physical_offset)
        name = self.image.name
        if record is None:
            others = self.of.get(sent.body_id, [])
            if others:
                return f"{name} has it at {others[0].physical_offset} instead"
            begin, end = self.image.log_range()
            if begin <= answered.physical_offset < end:
                return f"{name} has no record there (its log is [{begin}, {end}), sound to {self.image.sound_end})"
            return f"{name} has only [{begin}, {end})"
        body_id = body_id_of(record.body)
        if body_id != sent.body_id:
            return f"{name} has {body_id!r} there"
        if (record.topic, record.queue_id) != (sent.topic, sent.queue_id):
            return f"{name} has it under {record.topic}-{record.queue_id}"
        return ""


def _check_answer(history: History, accepted: Accepted, held: Mapping[str, _Held]) -> list[Violation]:
    answered = accepted.answered
    promise = history.promise_of(accepted)
    master = answered.node
    if promise is None or master not in held:
        return [Violation(CHECKER, f"{accepted}: nobody said what {master or 'the answering node'} promises")]
    if answered.physical_offset < held[master].image.begin:
        return []
    is_ok = answered.status == "PUT_OK"
    copies = promise.copies if is_ok else 1
    master_flushed = promise.is_sync_flush and is_ok
    # From the time of the send: the answer may still be in flight when its node fails.
    since_s = accepted.sent.time_s
    for event in history.of(Converged):
        if event.time_s < answered.time_s or event.end <= answered.physical_offset or master not in event.nodes:
            continue
        if may_have_lost(history, master, since_s, is_flushed=master_flushed, before_s=event.time_s):
            break  # what they agreed upon may be without it
        since_s, copies = event.time_s, len(event.nodes)
    faults = {name: node.fault(accepted) for name, node in held.items()}
    lossy = {
        name
        for name in held
        if may_have_lost(history, name, since_s, is_flushed=master_flushed if name == master else promise.slaves_flush)
    }
    if faults[master] and master not in lossy:
        return [
            Violation(CHECKER, f"{accepted} is lost: {faults[master]}, and nothing happened to it that may take it")
        ]
    holders = [name for name, fault in faults.items() if not fault]
    needed = max(0, copies - len(lossy))
    if len(holders) < needed:
        where = "; ".join(fault for fault in faults.values() if fault)
        text = (
            f"{accepted} is on {len(holders)} nodes ({', '.join(holders) or 'none'}) where {needed} must have it "
            f"({copies} promised, {', '.join(sorted(lossy)) or 'none'} excused): {where}"
        )
        return [Violation(CHECKER, text)]
    return []


def _check_consumed(history: History, held: Mapping[str, _Held]) -> list[Violation]:
    found = []
    for position, event in enumerate(history.events):
        if not isinstance(event, Consumed) or event.node not in held:
            continue
        promise = history.promise_at(event.node, position)
        is_flushed = promise is not None and promise.is_sync_flush
        if may_have_lost(history, event.node, event.time_s - LATE_S, is_flushed=is_flushed):
            continue
        node = held[event.node]
        there = node.queued.get((event.topic, event.queue_id, event.queue_offset))
        if there == event.body_id or (there is None and node.image.begin > 0):
            continue
        what = "nothing" if there is None else repr(there)
        text = (
            f"{event.node} gave {event.body_id!r} to consumer {event.client} at {event.time_s:.3f} s as "
            f"{event.topic}-{event.queue_id} offset {event.queue_offset}; now {what} stands there"
        )
        found.append(Violation(CHECKER, text))
    return found


def _strangers(history: History, held: Mapping[str, _Held]) -> list[Violation]:
    found = []
    sent = history.sent()
    topics = {each.topic for each in sent.values()}
    for name, node in held.items():
        for record in node.damaged:
            if record.topic in topics:
                text = f"{name}: the record at {record.physical_offset} ({record.topic}) is no message that was sent"
                found.append(Violation(CHECKER, text))
        for body_id, records in node.of.items():
            if body_id not in sent:
                text = f"{name}: nobody sent {body_id!r}, stored at {records[0].physical_offset}"
                found.append(Violation(CHECKER, text))
            if len(records) > 1:
                places = ", ".join(str(record.physical_offset) for record in records)
                found.append(Violation(CHECKER, f"{name}: message {body_id!r} is stored more than once: at {places}"))
    return found

"""What RocketMQ 5's clients may rely on, judged by what they sent, were given and acknowledged.

- A message whose send was answered OK is given to each group that subscribes to it until the group acknowledges it; a
  rolled-back one is never given. A half message whose end was not answered follows its producer's decision, because
  the producer is asked again. An acknowledgement without an answer may or may not have happened.
- A message is not given before its delivery time, and no group is given a message that was not sent, or that is not in
  the log.
- No group is given a message by a receive that began after its acknowledgement was answered, nor again before its
  invisible time is over (checkers/pop.py).
- The messages of a FIFO group are given in the order in which they were sent.

A client that gets no answer sends a message again, with the same id, and a broker delivers some timer messages and
ends some transactions twice after a failover. Consumers are given each copy in the log independently, and clients can't
tell the copies apart. So the rules about acknowledgements and invisible times are applied only to messages with one
copy. Times are in seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tests.checkers import pop
from tests.checkers.violation import Violation

CHECKER = "grpc_clients"
NORMAL, DELAY, FIFO, COMMIT, ROLLBACK = KINDS = ("normal", "delay", "fifo", "commit", "rollback")
"""Kinds of messages. COMMIT and ROLLBACK are half messages, by the decision of their producer"""


@dataclass(frozen=True)
class Sent:
    """A producer began to send a message. `fifo`: message group and number within it; `due_s`: delivery time."""

    key: bytes
    kind: str
    fifo: tuple[str, int] = ("", 0)
    due_s: float = 0.0


@dataclass(frozen=True)
class Stored:
    """A send was answered OK."""

    key: bytes


@dataclass(frozen=True)
class Given:
    """A consumer was given a message. `handle` is different for each delivery.

    `hidden_to_s`: earliest time at which the broker may give it again.
    """

    group: str
    key: bytes
    handle: str
    asked_s: float
    given_s: float
    hidden_to_s: float


@dataclass(frozen=True)
class Acknowledging:
    """A consumer began to acknowledge a delivery."""

    group: str
    handle: str


@dataclass(frozen=True)
class Acknowledged:
    """An acknowledgement was answered OK."""

    group: str
    handle: str
    at_s: float


Event = Sent | Stored | Given | Acknowledging | Acknowledged


@dataclass
class Run:
    """The events of a run by what they are about."""

    sent: dict[bytes, Sent] = field(default_factory=dict)
    stored: set[bytes] = field(default_factory=set)
    deliveries: dict[str, list[Given]] = field(default_factory=dict)
    """Group -> what it was given, in the order of the answers"""
    acknowledging: set[tuple[str, str]] = field(default_factory=set)
    """(group, handle) of the acknowledgements that were begun"""
    acknowledged_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """(group, handle) -> when the acknowledgement was answered"""


def run_of(events: Sequence[Event]) -> Run:
    """Sorts events, which may come in any order."""
    run = Run()
    for event in events:
        match event:
            case Sent():
                run.sent[event.key] = event
            case Stored():
                run.stored.add(event.key)
            case Given():
                run.deliveries.setdefault(event.group, []).append(event)
            case Acknowledging():
                run.acknowledging.add((event.group, event.handle))
            case Acknowledged():
                run.acknowledged_s[event.group, event.handle] = event.at_s
    for given in run.deliveries.values():
        given.sort(key=lambda each: each.given_s)
    return run


def missing(run: Run, groups: Mapping[str, Collection[str]]) -> list[tuple[str, bytes]]:
    """The messages that a group still has to be given, with the group."""
    left = []
    for group, kinds in groups.items():
        given = {each.key for each in run.deliveries.get(group, [])}
        expected = (key for key in run.stored if run.sent[key].kind in kinds and run.sent[key].kind != ROLLBACK)
        left += [(group, key) for key in sorted(expected) if key not in given]
    return left


def check(
    events: Sequence[Event], copies_s: Mapping[bytes, Sequence[float]], groups: Mapping[str, Collection[str]]
) -> list[Violation]:
    """Checks a run at whose end brokers had nothing in flight.

    `copies_s`: key -> store times of its copies in the topic itself; `groups`: consumer group -> kinds that it
    subscribes to.
    """
    run = run_of(events)
    found = [f"{key!r} was answered OK and never given to group {group}" for group, key in missing(run, groups)]
    found += _forgotten(run) + _wrong(run, copies_s) + _early(run, copies_s) + _disordered(run)
    violations = [Violation(CHECKER, text) for text in found]
    for group, given in run.deliveries.items():
        violations += pop.check(_single(run, group, given, copies_s), (), may_forget=False)
    return violations


def _forgotten(run: Run) -> list[str]:
    """Messages that were not acknowledged when they were given for the last time."""
    found = []
    for group, deliveries in run.deliveries.items():
        last = {each.key: each.handle for each in deliveries}
        for key, handle in sorted(last.items()):
            if (group, handle) not in run.acknowledging:
                found.append(f"{key!r} was not acknowledged by group {group}, and not given again")
    return found


def _wrong(run: Run, copies_s: Mapping[bytes, Sequence[float]]) -> list[str]:
    """Messages that nobody should have been given."""
    found = []
    for group, deliveries in run.deliveries.items():
        for key in sorted({each.key for each in deliveries}):
            if key not in run.sent:
                found.append(f"{key!r} was given to group {group}, and nobody sent it")
            elif run.sent[key].kind == ROLLBACK:
                found.append(f"{key!r} was given to group {group}, and its producer rolled it back")
            elif not copies_s.get(key):
                found.append(f"{key!r} was given to group {group}, and is not in the log")
    return found


def _early(run: Run, copies_s: Mapping[bytes, Sequence[float]]) -> list[str]:
    """Messages that were in their topic, or given, before their delivery time."""
    first_s = {key: min(times) for key, times in copies_s.items() if times}
    for deliveries in run.deliveries.values():
        for each in deliveries:
            first_s[each.key] = min(each.given_s, first_s.get(each.key, math.inf))
    late_s = {key: first_s[key] - sent.due_s for key, sent in run.sent.items() if key in first_s}
    return [f"{key!r} was delivered {-by_s:.3f} s early" for key, by_s in sorted(late_s.items()) if by_s < 0]


def _disordered(run: Run) -> list[str]:
    """Messages of a FIFO group that were given for the first time after a later one."""
    found = []
    for group, deliveries in run.deliveries.items():
        latest: dict[str, int] = {}
        seen: set[bytes] = set()
        for each in deliveries:
            sent = run.sent.get(each.key)
            if sent is None or sent.kind != FIFO or each.key in seen:
                continue
            seen.add(each.key)
            name, number = sent.fifo
            if number < latest.get(name, -1):
                found.append(f"{each.key!r} was given to group {group} after number {latest[name]} of {name}")
            latest[name] = max(number, latest.get(name, -1))
    return found


def _single(
    run: Run, group: str, deliveries: Sequence[Given], copies_s: Mapping[bytes, Sequence[float]]
) -> list[pop.Delivery]:
    """The deliveries of messages with one copy."""
    return [
        pop.Delivery(
            each.key, each.asked_s, each.given_s, each.hidden_to_s, run.acknowledged_s.get((group, each.handle))
        )
        for each in deliveries
        if len(copies_s.get(each.key, ())) == 1
    ]

"""Popped messages: each is given until it is acknowledged, not afterwards, and not before its invisible time is over.

Promises for what the consumers of one group saw, in seconds of the run:
- A message that was given is not given again before its invisible time is over. That is counted from when it was asked
  for, which is earlier than the master's pop time; a change of the time, from when the change was asked for. A change
  without an answer may or may not have happened. An answer that comes after that time promises nothing: others may have
  been given the message meanwhile.
- A message whose acknowledgement was answered, before its invisible time was over, is not given to later requests.
- In the end, each message in the log of the master was given, and acknowledged. The answer may have been lost.
  Exceptions, for which the caller leaves messages out of `left`: a clock was set, so that what was popped before may be
  hidden for as much longer; and messages that were in the log when a bit flipped that no node can notice. A master that
  takes the record for one of another queue finds nothing in its place, and POP gives it up as deleted.

Exception of the first two (`may_forget`): a fault took bytes of the log that were acknowledged, or a clock was set.
Bodies begin with the key of their message; the copy of a message that is given again has its body.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tests.checkers.violation import Violation

CHECKER = "pop"


@dataclass
class Delivery:
    """One message in an answer to a pop."""

    key: bytes
    asked_s: float
    given_s: float
    hidden_to_s: float
    """Earliest time at which the message may be given again"""
    acknowledged_s: float | None = None
    """When the acknowledgement was answered"""


def check(deliveries: Iterable[Delivery], left: Collection[bytes], *, may_forget: bool) -> list[Violation]:
    """Checks deliveries in the order of their answers. `left`: keys in the log that nobody acknowledged."""
    found: list[str] = []
    latest: dict[bytes, Delivery] = {}
    acknowledged_s: dict[bytes, float] = {}
    for delivery in () if may_forget else deliveries:
        key, given_s, before = delivery.key, delivery.given_s, latest.get(delivery.key)
        is_late = given_s >= delivery.hidden_to_s
        if before is not None and given_s < before.hidden_to_s and not is_late:
            found.append(f"{key!r} was given at {given_s:.3f} s, {before.hidden_to_s - given_s:.3f} s before its time")
        if delivery.asked_s > acknowledged_s.get(key, math.inf):
            found.append(f"{key!r} was given at {given_s:.3f} s, and acknowledged at {acknowledged_s[key]:.3f} s")
        if is_late:
            continue
        latest[key] = delivery
        if delivery.acknowledged_s is not None and delivery.acknowledged_s < delivery.hidden_to_s:
            acknowledged_s.setdefault(key, delivery.acknowledged_s)
    if left:
        found.append(f"{len(left)} messages were never given until they were acknowledged, such as {min(left)!r}")
    return [Violation(CHECKER, text) for text in found]

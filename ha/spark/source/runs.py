"""Encodes numbers of many queues as short JSON: one member for consecutive queues of a topic.

    {"0-99": 500}               each of the queues 0 to 99 is at 500
    {"0-3": [500, 2, 0, -1]}    queue 0 is at 500, and the others at 502, 500 and 499: differences from 500

The numbers of a topic's queues are usually close together, so a queue takes three bytes instead of eighteen. Topics
with few queues are written queue by queue, which is easier to read; that form is always accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

QUEUES_WORTH_RUNS = 32
"""Minimum number of queues of a topic on one broker for which consecutive queues are written as one JSON member."""
RUN_MAX = 65_536
"""Maximum number of consecutive queues in one JSON member."""
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def encode_runs(numbers: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int | list[int]]]:
    """Yields the JSON members (name, value) for the (queue, number) pairs of a broker's topic, ascending by queue."""
    if len(numbers) < QUEUES_WORTH_RUNS:
        yield from ((str(queue), number) for queue, number in numbers)
        return
    for _, run in groupby(enumerate(numbers), key=lambda item: (item[1][0] - item[0], item[0] // RUN_MAX)):
        queues, values = zip(*(pair for _, pair in run), strict=True)
        first = values[0]
        differences = [value - first for value in values[1:]]
        if len(queues) == 1:
            yield str(queues[0]), first
        else:
            yield f"{queues[0]}-{queues[-1]}", [first, *differences] if any(differences) else first


def decode_run(text: str, value: Any) -> tuple[str, int, list[int]]:
    """Decodes a JSON member: returns the broker's name with its colon ("" without a name), the first queue, and the
    numbers of that queue and the following ones.

    Raises ValueError, with the reason, if it is not such a member.
    """
    broker, colon, queues = text.rpartition(":")
    found = _NUMBERS.fullmatch(queues)
    if found is None:
        raise ValueError(f"{text!r} is no queue")
    first = int(found[1])
    count = 1 if found[2] is None else int(found[2]) - first + 1
    if not 1 <= count <= RUN_MAX:
        raise ValueError(f"{text!r} is not 1 to {RUN_MAX} queues")
    values = value if isinstance(value, list) and found[2] is not None else [value]
    if any(type(number) is not int for number in values):
        raise ValueError(f"{value!r} of queue {text} is out of range")
    if values is not value:
        return broker + colon, first, values * count
    if len(values) != count:
        raise ValueError(f"{text!r} is {count} queues, but has {len(values)} numbers")
    return broker + colon, first, [values[0], *(values[0] + difference for difference in values[1:])]

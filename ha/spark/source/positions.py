"""Parses the options that determine where a query starts and ends. The queues are not known yet."""

from __future__ import annotations

import msgspec

from ha.errors import OptionError
from ha.spark.option_values import JSON_FORMS, GivenOptions, count
from ha.spark.source.runs import decode_run

EARLIEST = -2
LATEST = -1

PerQueue = dict[str, dict[str, int]]
"""topic -> queue -> number, as in JSON; a queue is "3", or "broker-a:3"."""


class AtEdge(msgspec.Struct, frozen=True):
    """Every queue at its first record (EARLIEST) or its end (LATEST)."""

    edge: int


class AtOffsets(msgspec.Struct, frozen=True):
    """Each queue at its own queue offset, or EARLIEST or LATEST."""

    offsets: PerQueue


class AtTime(msgspec.Struct, frozen=True):
    """Every queue at its first record stored at or after `timestamp_ms` (since 1970)."""

    timestamp_ms: int


class AtTimes(msgspec.Struct, frozen=True):
    """Each queue at its first record stored at or after its own time (in ms since 1970)."""

    timestamps_ms: PerQueue


Position = AtEdge | AtOffsets | AtTime | AtTimes


def parse_position(given: GivenOptions, side: str, default: AtEdge) -> tuple[Position, str]:
    """Returns the position at which to start or end, and the name of the option that determines it.

    `side`: "starting" or "ending". If several options are given, Timestamp takes precedence, then OffsetsByTimestamp,
    then Offsets. `default` applies if none is given. Raises OptionError for an invalid value.
    """
    name = f"{side}Timestamp"
    if name in given:
        return AtTime(given.read(name, count(least=0))), name
    name = f"{side}OffsetsByTimestamp"
    if name in given:
        return AtTimes(_per_queue(given, name, least=0)), name
    name = f"{side}Offsets"
    value = given.text(name)
    if value is None:
        return default, name
    if value.lower() in ("earliest", "latest"):
        return AtEdge(EARLIEST if value.lower() == "earliest" else LATEST), name
    return AtOffsets(_per_queue(given, name, least=EARLIEST)), name


def _per_queue(given: GivenOptions, name: str, least: int) -> PerQueue:
    found: PerQueue = {}
    for topic, queues in given.json_object(name).items():
        if topic.startswith("$"):
            continue  # a key such as $start in a stream's offset
        if not isinstance(queues, dict):
            raise OptionError(name, f"{queues!r} of {topic} does not map queues to numbers", JSON_FORMS[name])
        found[topic] = {}
        for text, value in queues.items():
            try:
                prefix, first, numbers = decode_run(text, value)
            except ValueError as error:
                raise OptionError(name, f"{topic}: {error}", JSON_FORMS[name]) from None
            for queue, number in enumerate(numbers, first):
                if not least <= number < 1 << 63:
                    raise OptionError(name, f"{topic}: {number} of queue {queue} is out of range", JSON_FORMS[name])
                found[topic][f"{prefix}{queue}"] = number
    return found


def check_batch_positions(starting: Position, starting_option: str, ending: Position, ending_option: str) -> None:
    """Raises OptionError for positions that are invalid in a batch.

    They are invalid if the batch or a queue of it would start at latest, end at earliest or end before it starts, or if
    both positions name queues, and not the same ones.
    """
    if starting == AtEdge(LATEST):
        raise OptionError(starting_option, "a batch that starts at latest reads nothing", "earliest or offsets")
    if ending == AtEdge(EARLIEST):
        raise OptionError(ending_option, "a batch that ends at earliest reads nothing", "latest or offsets")
    for position, option, edge, word in (
        (starting, starting_option, LATEST, "latest (-1)"),
        (ending, ending_option, EARLIEST, "earliest (-2)"),
    ):
        if isinstance(position, AtOffsets):
            for topic, queues in position.offsets.items():
                for queue, offset in queues.items():
                    if offset == edge:
                        raise OptionError(
                            option, f"{topic} queue {queue} can't be {word} in a batch", JSON_FORMS[option]
                        )
    if isinstance(starting, AtTime) and isinstance(ending, AtTime) and starting.timestamp_ms > ending.timestamp_ms:
        raise OptionError(starting_option, f"it is later than {ending_option}", f"{ending.timestamp_ms} or less")
    pairs = None
    if isinstance(starting, AtOffsets) and isinstance(ending, AtOffsets):
        pairs = starting.offsets, ending.offsets
    elif isinstance(starting, AtTimes) and isinstance(ending, AtTimes):
        pairs = starting.timestamps_ms, ending.timestamps_ms
    if pairs is None:
        return
    first, last = (
        {(topic, queue): n for topic, queues in side.items() for queue, n in queues.items()} for side in pairs
    )
    if odd := sorted(first.keys() ^ last.keys()):
        raise OptionError(
            ending_option, f"{odd[0][0]} queue {odd[0][1]} is not in both it and {starting_option}", "the same queues"
        )
    for (topic, queue), begin in first.items():
        if 0 <= last[topic, queue] < begin:
            raise OptionError(
                starting_option, f"{topic} queue {queue} would start at {begin}, after its end", "less than its end"
            )

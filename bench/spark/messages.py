"""The messages that both sides have: message n is the same for Kafka and halog.

body        1,024 bytes of JSON, starting with the number; 65,536 different contents, so that a compressor's window
            contains no document twice (zstd level 3 reduces it to about a third)
key         F and ten digits                  Kafka: the record's key       halog: property KEYS
TAGS        one of ten carriers               Kafka: a header               halog: property TAGS
UNIQ_KEY    32 hexadecimal digits             Kafka: a header               halog: property UNIQ_KEY
origin      one of 48 airports                Kafka: a header               halog: property origin
destination one of 48 airports                Kafka: a header               halog: property destination
queue       n modulo 16                       Kafka: the partition          halog: the queue

"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

TOPIC = "flights"
QUEUE_COUNT = 16
BODY_SIZE = 1024
CARRIERS = ("AA", "AS", "B6", "DL", "EV", "F9", "MQ", "UA", "US", "WN")
WANTED_CARRIER = "UA"
"""The tag that the filter selects: every tenth message."""
_POOL_SIZE = 1 << 16
_PREFIX = b'{"n":"'
_DIGITS = 10
_MIXER = 40503
"""Odd, so that documents are used in another order than messages."""


@lru_cache(maxsize=1)
def _airports() -> tuple[str, ...]:
    dice = random.Random(2)
    return tuple("".join(dice.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=3)) for _ in range(48))


@lru_cache(maxsize=1)
def _pool() -> npt.NDArray[np.uint8]:
    """Returns 65,536 documents of 1 KiB, with the number 0."""
    dice = random.Random(1)
    airports = _airports()
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(3, 9))) for _ in range(2000)]
    pool = bytearray()
    for _ in range(_POOL_SIZE):
        numbers = dice.getrandbits(160)
        head = (
            f'{_PREFIX.decode()}{"0" * _DIGITS}","day":"2013-{1 + numbers % 12:02d}-{1 + numbers % 28:02d}",'
            f'"carrier":"{CARRIERS[numbers % 10]}","flight":{numbers % 8191},"tailnum":"N{numbers % 99991:05d}",'
            f'"origin":"{airports[numbers % 47]}","dest":"{airports[numbers % 43]}","dep_delay":{numbers % 181 - 20},'
            f'"arr_delay":{numbers % 197 - 30},"air_time":{numbers % 577},"distance":{numbers % 4967},'
            f'"trace":"{numbers:040x}","remarks":"'
        )
        text = head + " ".join(dice.choices(words, k=150))
        pool += text[: BODY_SIZE - 2].encode() + b'"}'
    return np.frombuffer(bytes(pool), np.uint8).reshape(_POOL_SIZE, BODY_SIZE)


def bodies(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Returns the bodies of these messages, one row of 1,024 bytes each."""
    rows = _pool()[(numbers * _MIXER) % _POOL_SIZE]
    at = len(_PREFIX)
    rest = numbers.copy()
    for digit in range(_DIGITS - 1, -1, -1):
        rows[:, at + digit] = 48 + rest % 10
        rest //= 10
    return rows


def key(number: int) -> str:
    return f"F{number:010d}"


def carrier(number: int) -> str:
    """Returns the tag; tags depend on the number within a queue, so that each queue has all of them."""
    return CARRIERS[number // QUEUE_COUNT % len(CARRIERS)]


def unique_key(number: int) -> str:
    return f"7F000001{number * 0x9E3779B97F4A7C15 & (1 << 64) - 1:016X}{number & 0xFFFFFFFF:08X}"


def properties(number: int) -> list[tuple[str, str]]:
    """Returns all properties except the key, in order."""
    airports = _airports()
    return [
        ("TAGS", carrier(number)),
        ("UNIQ_KEY", unique_key(number)),
        ("origin", airports[number * 7 % 48]),
        ("destination", airports[number * 11 % 48]),
    ]


def chunks(begin: int, end: int, step: int, rows: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the numbers begin, begin + step, … below `end`, at most `rows` at a time."""
    for first in range(begin, end, step * rows):
        yield np.arange(first, min(end, first + step * rows), step, dtype=np.int64)

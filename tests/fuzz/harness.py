"""What a fuzz harness is, and the watch that each of its runs is under.

A harness takes any bytes and returns, whatever they are. Errors that the parser under test may raise are expected by
the harness itself; everything else that comes out of `run`, an `AssertionError` of a broken property included, is a
finding. So is an input that takes too long or makes the code under test allocate out of proportion: both are checked
here, for the fuzzer and for the replay in CI alike.
"""

from __future__ import annotations

import logging
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec


class Harness(msgspec.Struct, frozen=True, kw_only=True):
    """One target: how to run an input, where to begin, and what an input may cost.

    `words` are put into inputs by the fuzzer: names and numbers that it would hardly guess. `seconds_max` is CPU time
    of one input of `size_max` bytes, generous enough for instrumented code on a busy machine: it is there to notice
    quadratic time, not slow code. `memory_max` is the peak of what Python allocates for one input, in bytes.
    """

    about: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...] = ()
    size_max: int = 4096
    seconds_max: float = 2.0
    memory_max: int = 8 << 20


class TooSlowError(Exception):
    """One input took more CPU time than its harness allows."""


class TooMuchMemoryError(Exception):
    """One input made the code under test allocate more than its harness allows."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a log: inputs are wrong by the thousand, and each would have its line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run_timed(harness: Harness, data: bytes) -> None:
    """Run one input; TooSlowError if it took too long, otherwise what the harness raises."""
    began = time.process_time()
    with _quiet():
        harness.run(data)
    took_s = time.process_time() - began
    if took_s > harness.seconds_max:
        raise TooSlowError(f"{took_s:.2f} s of CPU for {len(data)} bytes; {harness.seconds_max:g} s are allowed")


def run_measured(harness: Harness, data: bytes) -> int:
    """Run one input and return the peak of what was allocated for it, in bytes; TooMuchMemoryError if that is too much.

    Counting makes Python some three times slower, so no time is taken here.
    """
    tracemalloc.start()
    try:
        with _quiet():
            harness.run(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > harness.memory_max:
        raise TooMuchMemoryError(f"{peak} bytes allocated for {len(data)}; {harness.memory_max} are allowed")
    return peak


def pieces_of(data: bytes) -> list[list[bytes]]:
    """`data` cut in a few ways that show whether a parser minds where its chunks end: byte by byte, and unevenly."""
    single = [data[at : at + 1] for at in range(min(len(data), 1024))]
    uneven: list[bytes] = []
    position, step = 0, 1
    while position < len(data):
        uneven.append(data[position : position + step])
        position += step
        step = step * 3 % 97 + 1
    return [[*single, data[1024:]] if len(data) > 1024 else single, uneven]

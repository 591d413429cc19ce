"""Fuzz harnesses, and the limits that apply to each of their runs.

A harness accepts any bytes. It catches the errors that the code under test may raise; any other exception from `run`,
including the `AssertionError` of a violated property, is a finding. So is an input that takes too much time or memory:
both limits are checked here, for the fuzzer and for the replay in CI.
"""

import logging
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec


class Harness(msgspec.Struct, frozen=True, kw_only=True):
    """One target: how to run an input, the seeds, and the limits of an input.

    The fuzzer inserts `words`, names and numbers that it would hardly guess. `seconds_max` is the CPU time of one input
    of `size_max` bytes, generous enough for instrumented code on a busy machine: it detects quadratic time, not slow
    code. `memory_max` is the peak of Python's allocations for one input, in bytes.
    """

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
    """Disables logging, as thousands of inputs are invalid and would each log a line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run_timed(harness: Harness, data: bytes) -> None:
    """Run one input; TooSlowError if it takes too long, and any error of the harness."""
    began = time.process_time()
    with _quiet():
        harness.run(data)
    took_s = time.process_time() - began
    if took_s > harness.seconds_max:
        raise TooSlowError(f"{took_s:.2f} s of CPU for {len(data)} bytes; {harness.seconds_max:g} s are allowed")


def run_measured(harness: Harness, data: bytes) -> int:
    """Run one input and return the peak of its allocations in bytes; TooMuchMemoryError above the limit.

    Tracing makes Python about three times slower, so time is not measured here.
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
    """Return `data` split into single bytes and into uneven pieces, to show that a parser accepts any chunks."""
    single = [data[at : at + 1] for at in range(min(len(data), 1024))]
    uneven: list[bytes] = []
    position, step = 0, 1
    while position < len(data):
        uneven.append(data[position : position + step])
        position += step
        step = step * 3 % 97 + 1
    return [[*single, data[1024:]] if len(data) > 1024 else single, uneven]

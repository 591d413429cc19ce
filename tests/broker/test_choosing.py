"""Choosing the messages of an answer: the compiled twin equals the Python one, in results and errors."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from ha.broker.choosing import Choice, Limits, Wanted, WrongEntryError, choose
from ha.protocol.compiled import pure
from ha.protocol.record import RECORD_PLACE
from ha.protocol.store_files import BLANK_SIZE, ENTRY

QUEUE_ID = 7
Lists = tuple[list[int], list[int], list[int]]

STRANGE = st.tuples(
    st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 4000)),
    st.one_of(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, 200)),
    st.integers(-2, 2),
)
"""Any entry."""


@st.composite
def queues(draw: st.DrawFn) -> bytes:
    """Ascending entries of messages that may be adjacent, with blank and sometimes invalid ones."""
    entries: list[tuple[int, int, int]] = []
    at = draw(st.sampled_from([0, 0, 500]))
    for _ in range(draw(st.integers(0, 40))):
        kind = draw(st.sampled_from("mmmmgbpk"))
        if kind == "p":
            entries.append((0, BLANK_SIZE, 0))
        elif kind == "b":
            entries.append((at, BLANK_SIZE, 0))
        else:
            at += draw(st.integers(1, 300)) if kind == "g" else 0
            size = draw(st.integers(1, 60))
            entries.append((at, size, draw(st.integers(-2, 2))))
            at += size
    for strange in draw(st.lists(STRANGE, max_size=2)):
        entries.insert(draw(st.integers(0, len(entries))), strange)
    return b"".join(ENTRY.pack(*entry) for entry in entries)


limits = st.builds(
    Limits,
    count_max=st.one_of(st.integers(1, 12), st.just(1 << 62)),
    bytes_max=st.one_of(st.integers(-1, 800), st.just(1 << 62)),
    log_start=st.sampled_from([0, 0, 0, 300, 2000]),
    log_end=st.sampled_from([0, 1000, 1 << 20, (1 << 63) - 1]),
)
tags_codes = st.none() | st.frozensets(st.integers(-2, 2), max_size=3)


def lists(wanted: Wanted) -> Lists:
    return wanted.queue_offsets.tolist(), wanted.physical_offsets.tolist(), wanted.sizes.tolist()


def outcome(
    choose: Callable[[bytes, int, Limits, frozenset[int] | None], Choice],
    entries: bytes,
    limits: Limits,
    codes: frozenset[int] | None,
) -> int | tuple[Lists, int, bool, list[Lists]]:
    """The choice, and its messages one at a time; or the wrong entry."""
    try:
        wanted, scanned_count, has_removed = choose(entries, 1000, limits, codes)
    except WrongEntryError as wrong:
        return wrong.queue_offset
    return lists(wanted), scanned_count, has_removed, [lists(each) for each in wanted.split()]


@given(queues(), limits, tags_codes)
def test_compiled_choice_equals_python(entries: bytes, limits: Limits, codes: frozenset[int] | None) -> None:
    expected = outcome(pure(choose), entries, limits, codes)
    assert outcome(choose, entries, limits, codes) == expected
    if not isinstance(expected, int):
        (_, places, sizes), scanned_count, _, each = expected
        assert scanned_count <= len(entries) // ENTRY.size
        assert len(places) <= limits.count_max
        assert sum(sizes) <= limits.bytes_max or len(sizes) <= 1
        ends = [place + size for place, size in zip(places, sizes, strict=True)]
        assert all(end <= begin for end, begin in zip(ends[:-1], places[1:], strict=True))
        assert [place for _, (place,), _ in each] == places
        for bytes_max in (sum(sizes), sum(sizes) - 1, sum(sizes[:-1])):  # as many as fit, and not a byte less
            exact = limits._replace(bytes_max=bytes_max)
            assert outcome(choose, entries, exact, codes) == outcome(pure(choose), entries, exact, codes)


def checked(wanted: Wanted, body: bytes) -> int | None:
    """The queue offset of the wrong record."""
    try:
        wanted.check(body, QUEUE_ID)
    except WrongEntryError as wrong:
        return wrong.queue_offset
    return None


@given(
    st.lists(st.tuples(st.integers(5, 80), st.sampled_from("......sqop")), min_size=1, max_size=20),
    st.integers(0, 100),
)
def test_check_reports_the_first_wrong_record(records: list[tuple[int, str]], begin: int) -> None:
    entries, body = [], b""
    at, expected = begin, None
    for number, (size, fault) in enumerate(records):
        entries.append(ENTRY.pack(at, size, 0))
        right = [size, QUEUE_ID, 1000 + number, at]
        if fault != ".":
            right["sqop".index(fault)] += 1
        body += RECORD_PLACE.pack(*right).ljust(size, b"x")[:size]
        if expected is None and (fault != "." or size < RECORD_PLACE.size):
            expected = 1000 + number
        at += size
    raw, limits = b"".join(entries), Limits(100, 1 << 20, 0, at)
    assert checked(choose(raw, 1000, limits, None).wanted, body) == expected

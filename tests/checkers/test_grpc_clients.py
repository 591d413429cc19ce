"""The checker of RocketMQ 5's clients accepts what is promised and reports each kind of breach."""

from collections.abc import Mapping, Sequence

from tests.checkers.grpc_clients import (
    COMMIT,
    DELAY,
    FIFO,
    NORMAL,
    ROLLBACK,
    Acknowledged,
    Acknowledging,
    Event,
    Given,
    Sent,
    Stored,
    check,
    missing,
    run_of,
)

GROUPS = {"g": (NORMAL, DELAY, COMMIT, ROLLBACK), "ordered": (FIFO,)}


def texts(*events: Event, copies: Mapping[bytes, Sequence[float]] | None = None) -> list[str]:
    """Returns the violations; each message has one copy unless `copies` says otherwise."""
    keys = {event.key for event in events if isinstance(event, Sent)}
    return [each.text for each in check(events, copies if copies is not None else dict.fromkeys(keys, (0.5,)), GROUPS)]


def acked(handle: str, at_s: float, group: str = "g") -> list[Event]:
    """An acknowledgement that is answered."""
    return [Acknowledging(group, handle), Acknowledged(group, handle, at_s)]


def sent(key: bytes, kind: str = NORMAL, **more: object) -> list[Event]:
    """A send that is answered OK."""
    return [Sent(key, kind, **more), Stored(key)]  # type: ignore[arg-type]


def given(key: bytes, at_s: float, handle: str = "h", group: str = "g", asked_s: float | None = None) -> Given:
    return Given(group, key, handle, at_s if asked_s is None else asked_s, at_s, at_s + 10)


def test_a_message_comes_again_until_it_is_acknowledged() -> None:
    assert texts(*sent(b"a"), given(b"a", 1, "1"), given(b"a", 12, "2"), *acked("2", 13)) == []
    assert texts(*sent(b"a"), given(b"a", 1, "1"), Acknowledging("g", "1")) == [], "the answer was lost"
    assert texts(*acked("2", 13), given(b"a", 12, "2"), given(b"a", 1, "1"), *sent(b"a")) == [], "in another order"


def test_a_message_that_was_answered_ok_and_never_given_is_reported() -> None:
    assert texts(*sent(b"a")) == ["b'a' was answered OK and never given to group g"]
    assert texts(*sent(b"a", FIFO)) == ["b'a' was answered OK and never given to group ordered"]
    assert texts(Sent(b"a", NORMAL)) == [], "it was not answered"
    assert texts(*sent(b"a", ROLLBACK)) == []


def test_a_committed_message_that_is_never_given_is_reported() -> None:
    assert texts(*sent(b"a", COMMIT)) == ["b'a' was answered OK and never given to group g"]


def test_a_message_that_is_forgotten_before_its_acknowledgement_is_reported() -> None:
    forgotten = ["b'a' was not acknowledged by group g, and not given again"]
    assert texts(*sent(b"a"), given(b"a", 1, "1")) == forgotten
    assert texts(*sent(b"a"), given(b"a", 1, "1"), Acknowledging("g", "1"), given(b"a", 12, "2")) == forgotten


def test_a_message_that_is_given_after_its_acknowledgement_is_reported() -> None:
    first, again = [*sent(b"a"), given(b"a", 1, "1")], acked("2", 21)
    assert texts(*first, *acked("1", 2), given(b"a", 20, "2"), *again) == [
        "b'a' was given at 20.000 s, and acknowledged at 2.000 s"
    ]
    assert texts(*first, *acked("1", 2), given(b"a", 20, "2", asked_s=1.5), *again) == [], "asked before"
    assert texts(*first, *acked("1", 12), given(b"a", 20, "2"), *again) == [], "acknowledged too late"
    fifo = [*sent(b"a", FIFO), given(b"a", 1, "1", "ordered"), *acked("1", 2, "ordered")]
    assert texts(*fifo, given(b"a", 20, "2", "ordered"), *acked("2", 21, "ordered")) == [
        "b'a' was given at 20.000 s, and acknowledged at 2.000 s"
    ]
    copies = {b"a": (0.5, 0.6)}
    assert texts(*first, *acked("1", 2), given(b"a", 20, "2"), *again, copies=copies) == [], "stored twice"


def test_groups_acknowledge_for_themselves() -> None:
    other = [given(b"a", 1, "1", group="other"), *acked("1", 2, "other")]
    assert texts(*sent(b"a"), *other, given(b"a", 3, "1"), *acked("1", 4)) == []


def test_a_message_that_is_given_before_its_invisible_time_is_over_is_reported() -> None:
    assert texts(*sent(b"a"), given(b"a", 1, "1"), given(b"a", 10.5, "2"), *acked("2", 11)) == [
        "b'a' was given at 10.500 s, 0.500 s before its time"
    ]


def test_a_message_that_is_delivered_before_its_time_is_reported() -> None:
    timed = [*sent(b"a", DELAY, due_s=5.0), *acked("h", 7)]
    assert texts(*timed, given(b"a", 4.75), copies={b"a": (5.5,)}) == ["b'a' was delivered 0.250 s early"]
    assert texts(*timed, given(b"a", 6), copies={b"a": (6.5, 4.5)}) == ["b'a' was delivered 0.500 s early"]
    assert texts(*timed, given(b"a", 5), copies={b"a": (5.0,)}) == []


def test_a_message_that_was_rolled_back_and_given_is_reported() -> None:
    assert texts(Sent(b"a", ROLLBACK), given(b"a", 1), *acked("h", 2)) == [
        "b'a' was given to group g, and its producer rolled it back"
    ]


def test_a_message_that_was_not_sent_or_not_stored_and_given_is_reported() -> None:
    received = [given(b"a", 1), *acked("h", 2)]
    assert texts(*received) == ["b'a' was given to group g, and nobody sent it"]
    assert texts(Sent(b"a", NORMAL), *received, copies={}) == ["b'a' was given to group g, and is not in the log"]


def test_messages_of_a_fifo_group_that_come_out_of_order_are_reported() -> None:
    events = [event for number in range(4) for event in sent(b"%d" % number, FIFO, fifo=("x", number))]
    other = sent(b"other", FIFO, fifo=("y", 0))

    def ordered(*numbers: bytes) -> list[Event]:
        deliveries = [given(number, 20 * at, str(at), "ordered") for at, number in enumerate(numbers)]
        return [*deliveries, *(Acknowledging("ordered", each.handle) for each in deliveries)]

    assert texts(*events, *other, *ordered(b"0", b"1", b"0", b"other", b"1", b"2", b"3")) == [], "0 and 1 came again"
    assert texts(*events, *ordered(b"0", b"3", b"1", b"2")) == [
        "b'1' was given to group ordered after number 3 of x",
        "b'2' was given to group ordered after number 3 of x",
    ]


def test_what_a_group_still_has_to_be_given() -> None:
    events = [*sent(b"a"), *sent(b"b", FIFO), *sent(b"c", ROLLBACK)]
    assert missing(run_of([*events, given(b"a", 1, group="other")]), GROUPS) == [("g", b"a"), ("ordered", b"b")]
    assert missing(run_of([*events, given(b"a", 1)]), GROUPS) == [("ordered", b"b")]

"""The checker of popped messages accepts what is promised and reports each kind of breach."""

from tests.checkers.pop import Delivery, check


def texts(*deliveries: Delivery, left: tuple[bytes, ...] = (), may_forget: bool = False) -> list[str]:
    return [violation.text for violation in check(deliveries, left, may_forget=may_forget)]


def test_a_message_is_given_again_after_its_time_and_until_it_is_acknowledged() -> None:
    first, second = Delivery(b"a", 1.0, 1.1, 4.0), Delivery(b"a", 3.9, 4.1, 7.0, acknowledged_s=5.0)
    assert texts(first, second) == []


def test_a_message_that_is_given_before_its_time_is_reported() -> None:
    early = Delivery(b"a", 1.0, 1.1, 4.0), Delivery(b"a", 3.5, 3.75, 7.0)
    assert texts(*early) == ["b'a' was given at 3.750 s, 0.250 s before its time"]
    assert texts(*early, may_forget=True) == []


def test_an_answer_that_comes_after_its_invisible_time_promises_nothing() -> None:
    late, other = Delivery(b"a", 1.0, 3.0, 2.0, acknowledged_s=3.1), Delivery(b"a", 2.1, 2.2, 9.0)
    assert texts(other, late, Delivery(b"a", 9.0, 9.1, 12.0)) == []


def test_a_message_that_is_given_after_its_acknowledgement_is_reported() -> None:
    late = Delivery(b"a", 5.0, 5.1, 9.0)
    assert texts(Delivery(b"a", 1.0, 1.1, 4.0, acknowledged_s=2.0), late) == [
        "b'a' was given at 5.100 s, and acknowledged at 2.000 s"
    ]
    assert texts(Delivery(b"a", 1.0, 1.1, 4.0, acknowledged_s=4.5), late) == [], "it was acknowledged too late"


def test_messages_that_nobody_acknowledged_are_reported() -> None:
    assert texts(left=(b"b", b"a"), may_forget=True) == [
        "2 messages were never given until they were acknowledged, such as b'a'"
    ]

"""PostponedTimers: due timer messages that can't be delivered because a record can't be read."""

from trio.testing import MockClock

from ha.broker.timer_postponed import PostponedTimers

RECALL, MESSAGE, LATER = 2000, 2001, 3001
"""Timer codes: a recall that is due at 1000 ms, a message that it may recall, and one that is due at 1500 ms"""


async def test_messages_wait_until_no_recall_of_their_time_is_left(autojump_clock: MockClock) -> None:
    postponed = PostponedTimers()
    for offset in (0, 1):
        postponed.add(RECALL, offset, since=5.0)
    postponed.await_recall(MESSAGE, 2)
    assert (len(postponed), sorted(postponed.offsets), postponed.recalls) == (3, [0, 1, 2], {RECALL})
    assert postponed.take(0, default_since=9.0) == 5.0
    assert list(postponed.take_waited()) == []
    postponed.take(1, default_since=9.0)
    assert list(postponed.due_ms) == [1000], "the message is still pending"
    assert list(postponed.take_waited()) == [(MESSAGE, 2)]
    assert (len(postponed), list(postponed.offsets)) == (0, [])
    assert postponed.take(2, default_since=9.0) == 9.0


async def test_messages_that_were_stored_again_are_dropped(autojump_clock: MockClock) -> None:
    postponed = PostponedTimers()
    postponed.add(RECALL, 3, since=0.0)
    postponed.add(LATER, 7, since=0.0)
    for offset in (4, 6):
        postponed.await_recall(MESSAGE, offset)
    postponed.drop_before(5)
    assert sorted(postponed.offsets) == [6, 7]
    assert (3 in postponed, 7 in postponed) == (False, True)
    assert list(postponed.take_waited()) == [(MESSAGE, 6)], "its recall is gone"


async def test_the_message_whose_last_attempt_is_longest_ago_is_retried(autojump_clock: MockClock) -> None:
    postponed = PostponedTimers()
    for offset in (0, 1, 2):
        postponed.add(LATER - 2 * offset, offset, since=0.0)
    assert postponed.due_for_retry(2, interval_s=1.0) == [(LATER - 2, 1), (LATER, 0)]
    assert postponed.due_for_retry(2, interval_s=1.0) == []
    postponed.add(LATER, 0, postponed.take(0, default_since=1.0))
    assert postponed.due_for_retry(2, interval_s=0.0) == []
    autojump_clock.jump(1.0)
    assert postponed.due_for_retry(2, interval_s=1.0) == [(LATER - 4, 2), (LATER - 2, 1)]

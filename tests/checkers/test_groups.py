"""The checkers of failover groups on histories and files written by hand: valid ones pass, faults are found."""

import pytest

from tests.checkers import kept
from tests.checkers.confirmed import Confirmed, confirmed_end
from tests.checkers.consumer_offsets import ConsumerOffsets, Place
from tests.checkers.history import Accepted, Answered, Consumed, History, Sent
from tests.checkers.in_sync import InSync
from tests.checkers.store import StoreImage
from tests.checkers.terms import EPOCH_FILE, Terms, read_epochs
from tests.checkers.violation import Violation
from tests.checkers.written import MASTER, SEGMENT, Cluster


def terms_of(*tenures: tuple[float, str, int]) -> Terms:
    terms = Terms()
    for now_s, master, epoch in tenures:
        assert terms.on_agreed(now_s, master, epoch) == []
    return terms


# ---- terms


@pytest.mark.parametrize(
    ("asked_s", "answered_s", "is_right"),
    [(1.0, 2.0, True), (4.0, 6.0, True), (5.5, 6.0, False), (0.1, 0.5, False), (0.5, 1.0, True)],
)
def test_acknowledging_member_held_the_key(asked_s: float, answered_s: float, is_right: bool) -> None:
    terms = terms_of((1.0, "m1", 1), (5.0, "", 1), (5.5, "m2", 2))
    assert (not terms.check_answer("m1", asked_s, answered_s, "it")) is is_right


@pytest.mark.parametrize(
    ("asked_s", "answered_s", "is_right"),
    [(1.5, 1.9, True), (1.9, 2.1, True), (2.5, 3.0, False), (2.5, 6.5, True), (6.5, 7.0, True)],
)
def test_key_of_an_earlier_process_does_not_make_a_master(asked_s: float, answered_s: float, is_right: bool) -> None:
    terms = terms_of((1.0, "m1", 1))
    terms.on_process_ended(2.0, "m1")
    terms.on_process_ended(4.0, "m1")  # the next one, which never had the key
    terms.on_agreed(5.0, "", 1)
    terms.on_agreed(6.0, "m1", 2)
    assert (not terms.check_answer("m1", asked_s, answered_s, "it")) is is_right


def test_term_belongs_to_one_member_and_grows() -> None:
    assert terms_of((1.0, "m1", 1)).on_agreed(2.0, "m2", 2), "m1 has the key still"
    assert terms_of((1.0, "m1", 1), (2.0, "", 1)).on_agreed(3.0, "m2", 1), "the term was m1's"
    assert terms_of((1.0, "m1", 5), (2.0, "", 5)).on_agreed(3.0, "m2", 4), "there was a higher one"
    assert not terms_of((1.0, "m1", 1), (2.0, "", 1)).on_agreed(3.0, "m1", 2)


def test_term_that_no_disk_knows_may_be_given_again_after_a_restore() -> None:
    terms = terms_of((1.0, "m2", 2), (2.0, "", 2), (3.0, "m1", 3), (4.0, "", 2))
    terms.forget_beyond(2)
    assert not terms.on_agreed(5.0, "m2", 3)
    assert terms_of((1.0, "m2", 2), (2.0, "", 2), (3.0, "m1", 3), (4.0, "", 2)).on_agreed(5.0, "m2", 3), "m1 knows it"


def test_message_is_in_the_term_of_its_acknowledging_member() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.put()
    second = cluster.history.answers[1].answered.physical_offset
    terms = terms_of((0.0, MASTER, 1), (1.0, "", 1), (2.0, "m2", 2))

    def judge(epochs: str) -> list[Violation]:
        image = StoreImage({**cluster.files[MASTER], EPOCH_FILE: epochs.encode()}, SEGMENT)
        return terms.check_log(cluster.history, image)

    assert judge("1\n0\n1-0\n") == []
    assert len(judge(f"2\n0\n1-0\n2-{second}\n")) == 2, "m2's term has two messages that it did not acknowledge"
    assert read_epochs(StoreImage({EPOCH_FILE: b"2\n0\n1-0\n7-300\n"}, SEGMENT)) == [(1, 0), (7, 300)]


# ---- the sync-state set


def in_sync_of(cluster: Cluster, ack_count: int | None = None) -> InSync:
    def read(node: str, offset: int, size: int) -> bytes:
        return StoreImage(cluster.files[node], SEGMENT).read(offset, size)

    return InSync(read, segment_size=SEGMENT, ack_count=ack_count)


def accepted(cluster: Cluster) -> Accepted:
    return cluster.history.answers[-1]


def test_message_acknowledged_by_n_members_is_on_n() -> None:
    cluster = Cluster("s1", "s2")
    judge = in_sync_of(cluster, ack_count=2)
    assert judge.on_set(frozenset({MASTER, "s1", "s2"})) == []
    cluster.put(on=(MASTER, "s2"))
    assert judge.on_acknowledged(accepted(cluster)) == []
    assert judge.on_set(frozenset({MASTER, "s1"})), "one of two has it, and either may be elected"
    cluster.put(on=(MASTER,))
    assert judge.on_acknowledged(accepted(cluster))


def test_loss_on_a_member_is_found_without_a_request() -> None:
    cluster = Cluster("s1")
    judge = in_sync_of(cluster)
    judge.on_set(frozenset({MASTER, "s1"}))
    cluster.put()
    judge.on_acknowledged(accepted(cluster))
    assert judge.check() == []
    cluster.cut("s1", 0)
    assert judge.check()


# ---- what is confirmed


def test_members_show_the_same_messages() -> None:
    cluster = Cluster("s1")
    judge = Confirmed()
    cluster.put()
    cluster.put(on=(MASTER,), entry=False)  # not confirmed: s1 may have something else there
    cluster.put(on=("s1",), entry=False)
    images = cluster.images()
    assert confirmed_end(images[MASTER]) == confirmed_end(images["s1"]) < images[MASTER].sound_end
    assert judge.check(images) == []


def test_members_showing_different_messages_are_found() -> None:
    cluster = Cluster("s1")
    cluster.put()
    cluster.put(on=(MASTER,))
    cluster.put(on=("s1",))
    [found] = Confirmed().check(cluster.images())
    assert found.checker == "confirmed"


def test_shown_messages_are_remembered() -> None:
    cluster = Cluster("s1")
    judge = Confirmed()
    cluster.put()
    cluster.put(on=(MASTER,))
    assert judge.check(cluster.images()) == []
    judge.on_crash(MASTER)
    cluster.put(on=("s1",))
    assert judge.check({"s1": cluster.image("s1")}), "m had shown another message there, and is gone"


def test_a_member_outside_the_set_may_keep_what_the_set_lost() -> None:
    cluster = Cluster("s1")
    judge = Confirmed()
    cluster.put()
    common = confirmed_end(cluster.images()["s1"])
    cluster.put(on=("s1",))
    judge.forget_beyond(common, {"s1"})
    cluster.put(on=(MASTER,))
    assert judge.check(cluster.images()) == []
    judge.on_in_set({MASTER, "s1"})
    assert judge.check(cluster.images()), "a member of the set has what the others have"


# ---- consumer offsets

PLACE = Place("g", "T", 0)


@pytest.mark.parametrize(("told", "is_right"), [(1, False), (2, True), (3, True), (4, False)])
def test_offset_is_between_the_answered_one_and_the_log_end(told: int, is_right: bool) -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.put()
    offsets = ConsumerOffsets()
    for asked in (1, 2, 4):
        offsets.on_commit(PLACE, asked)
    offsets.on_committed(PLACE, 2)
    assert (not offsets.check(PLACE, told, offsets.least(PLACE), MASTER, cluster.image())) is is_right


def test_offset_that_was_never_committed_is_found() -> None:
    cluster = Cluster()
    cluster.put()
    assert ConsumerOffsets().check(PLACE, 1, 0, MASTER, cluster.image())


# ---- what is kept


def judged(cluster: Cluster, *, is_excused: bool = False) -> tuple[list[Violation], int]:
    return kept.check(cluster.history, cluster.image(), is_excused=lambda _: is_excused)


def test_acknowledged_message_is_at_its_reported_offset() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.put()
    assert judged(cluster) == ([], 0)
    cluster.cut(MASTER, cluster.history.answers[2].answered.physical_offset)
    found, _ = judged(cluster)
    assert len(found) == 1
    assert judged(cluster, is_excused=True) == ([], 1)


def test_message_given_to_a_consumer_stays() -> None:
    cluster = Cluster()
    body_id = cluster.put("FLUSH_SLAVE_TIMEOUT")
    cluster.history.add(Consumed(2.0, "c", "T", 0, 0, body_id, "s1"))
    assert judged(cluster) == ([], 0)
    cluster.cut(MASTER, 0)
    found, _ = judged(cluster)
    assert "gave" in found[0].text


def test_rejected_message_is_not_stored() -> None:
    cluster = Cluster()
    cluster.put("SERVICE_NOT_AVAILABLE")
    found, _ = judged(cluster)
    assert "refused" in found[0].text


def test_queue_offset_is_answered_once() -> None:
    history = History()
    offsets = kept.QueueOffsets()
    for seq, queue_offset in ((0, 0), (1, 1), (2, 1)):
        history.add(Sent(1.0, "p", seq, "T", 0, b"p-%d" % seq))
        history.add(Answered(1.1, "p", seq, "PUT_OK", queue_offset, seq * 100, "m1"))
    assert [bool(offsets.on_acknowledged(each)) for each in history.answers] == [False, False, True]

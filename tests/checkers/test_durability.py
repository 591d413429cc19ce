"""Durability, queue offsets and prefixes on clusters written by hand: valid ones pass, faults are found."""

import zlib
from itertools import pairwise

import pytest

from tests.checkers import convergence, derived, durability, prefix, queue_offsets, soundness, statuses
from tests.checkers.history import Answered, Connected, Consumed, Recovered, Sent, body_id_of, make_body
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation
from tests.checkers.written import MASTER, SEGMENT, Cluster

BOTH = ("m", "s1")


def three() -> Cluster:
    """A master with SYNC_FLUSH whose PUT_OK means two copies, and two slaves; thirty messages over three segments."""
    cluster = Cluster("s1", "s2", is_sync_flush=True, copies=2)
    for number in range(30):
        cluster.put(queue_id=number % 3)
    return cluster


def judge(cluster: Cluster) -> list[Violation]:
    """Every checker of files."""
    images = cluster.images()
    found = durability.check(cluster.history, images)
    found.extend(queue_offsets.check(cluster.history, images[MASTER], MASTER))
    found.extend(prefix.check(cluster.history, images, MASTER))
    for image in images.values():
        found.extend(soundness.check(image))
        found.extend(derived.check_queues(image, is_complete=True))
    found.extend(convergence.check_logs(images, MASTER))
    found.extend(statuses.check_refused(cluster.history, images))
    return found


def checkers(found: list[Violation]) -> set[str]:
    return {violation.checker for violation in found}


def test_a_whole_cluster_passes() -> None:
    cluster = three()
    assert cluster.ends[MASTER] > 2 * SEGMENT
    assert judge(cluster) == []


def test_builder_and_golden_parser_agree_on_records() -> None:
    records = three().image().records()
    assert [body_id_of(record.body) for record in records] == [b"p-%d" % n for n in range(30)]
    assert {record.topic for record in records} == {"T"}
    assert records[-1].end == three().ends[MASTER]


# ---- durability


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_a_synced_master_may_lose_nothing(kind: str) -> None:
    cluster = three()
    cluster.crash(MASTER, kind)
    cluster.cut(MASTER, cluster.image().records()[-1].physical_offset)
    [violation] = durability.check(cluster.history, cluster.images())
    assert "p-29" in violation.text
    assert "is lost" in violation.text


def test_an_unsynced_master_may_lose_to_power_but_not_to_a_kill() -> None:
    for kind, allowed in (("power", True), ("kill", False)):
        cluster = Cluster()
        for _ in range(5):
            cluster.put()
        cluster.crash(MASTER, kind)
        cluster.cut(MASTER, cluster.image().records()[3].physical_offset)
        assert (durability.check(cluster.history, cluster.images()) == []) is allowed


def test_an_unsynced_message_on_two_nodes_survives_the_power_of_one() -> None:
    cluster = Cluster("s1", copies=2)
    for _ in range(5):
        cluster.put()
    at = cluster.image().records()[3].physical_offset
    cluster.crash(MASTER, "power")
    cluster.cut(MASTER, at)
    assert durability.check(cluster.history, cluster.images()) == []
    cluster.cut("s1", at)
    found = durability.check(cluster.history, cluster.images())
    assert [("1 must have it" in v.text, "1 of" in v.text) for v in found] == [(True, False)] * 2
    cluster.crash("s1", "power")
    assert durability.check(cluster.history, cluster.images()) == []


def test_message_acknowledged_as_replicated_but_stored_once_is_found() -> None:
    cluster = three()
    cluster.put(on=(MASTER,))
    [violation] = durability.check(cluster.history, cluster.images())
    assert "is on 1 nodes (m) where 2 must have it" in violation.text


def test_lagging_slave_does_not_violate_two_copies() -> None:
    cluster = three()
    cluster.put(on=BOTH)
    assert durability.check(cluster.history, cluster.images()) == []


def test_a_slave_that_loses_what_it_had_is_found_unless_it_lost_power() -> None:
    cluster = three()
    cluster.put(on=BOTH)
    last = cluster.image().records()[-1].physical_offset
    cluster.cut("s1", last)
    assert checkers(durability.check(cluster.history, cluster.images())) == {"durability"}
    cluster.crash("s1", "power")
    assert durability.check(cluster.history, cluster.images()) == []


def test_convergence_counts_as_stored_on_all_nodes() -> None:
    cluster = three()
    last = cluster.image().records()[-1].physical_offset
    cluster.crash("s1", "power")  # excused for two copies of earlier messages
    cluster.crash("s2", "power")
    cluster.converged()
    cluster.cut("s1", last)
    [violation] = durability.check(cluster.history, cluster.images())
    assert "3 promised, none excused" in violation.text


def test_timeout_promises_storage_on_the_master_only() -> None:
    cluster = three()
    cluster.put("FLUSH_SLAVE_TIMEOUT", on=(MASTER,))
    assert durability.check(cluster.history, cluster.images()) == []
    cluster.crash(MASTER, "kill")
    cluster.cut(MASTER, cluster.image().records()[-1].physical_offset)
    assert checkers(durability.check(cluster.history, cluster.images())) == {"durability"}
    cluster.crash(MASTER, "power")
    assert durability.check(cluster.history, cluster.images()) == []


def test_message_replaced_by_another_is_lost() -> None:
    cluster = three()
    record = cluster.image().records()[4]
    raw = bytearray(record.raw)
    body_at = raw.index(b"p-4\n")
    other = make_body(b"p-9", len(record.body))
    raw[body_at : body_at + len(other)] = other
    raw[8:12] = (zlib.crc32(other) & 0x7FFFFFFF).to_bytes(4, "big")
    for name in cluster.names:
        cluster.write(name, record.physical_offset, bytes(raw))
    text = str(durability.check(cluster.history, cluster.images()))
    assert "m has b'p-9' there" in text
    assert "stored more than once" in text


def test_message_that_was_never_sent_is_found() -> None:
    cluster = three()
    other = Cluster(MASTER)
    other.files[MASTER] = cluster.files[MASTER]
    other.history.add(Sent(0.0, "x", 0, "T", 0, b"p-0"))
    found = durability.check(other.history, {MASTER: other.image()})
    assert len(found) == 29
    assert "nobody sent b'p-1'" in found[0].text


def test_consumed_message_must_stay() -> None:
    cluster = three()
    last = cluster.image().records()[-1]
    at = cluster.now_s
    cluster.history.add(Consumed(at, "c", "T", last.queue_id, last.queue_offset, b"p-29", MASTER))
    assert durability.check(cluster.history, cluster.images()) == []
    for name in cluster.names:
        cluster.cut(name, last.physical_offset)
    cluster.history.answers.pop()  # its producer never received an acknowledgement
    cluster.crash(MASTER, "power")
    [violation] = durability.check(cluster.history, cluster.images())
    assert "gave b'p-29' to consumer c" in violation.text
    assert "now nothing stands there" in violation.text


def test_answer_after_a_crash_is_excused() -> None:
    cluster = Cluster()
    cluster.put()
    cluster.history.add(Sent(5.0, "p", 1, "T", 0, b"p-1"))
    cluster.now_s = 5.0
    cluster.crash(MASTER, "power")
    cluster.history.add(Answered(7.0, "p", 1, "PUT_OK", 1, cluster.ends[MASTER], MASTER))
    assert durability.check(cluster.history, cluster.images()) == []


# ---- queue offsets


def test_a_gap_and_a_repetition_of_queue_offsets_are_found() -> None:
    for wrong in (3, 1, 0):
        cluster = Cluster()
        cluster.put()
        cluster.put()
        cluster.put(queue_offset=wrong)
        [violation, *_] = queue_offsets.check_log(cluster.image())
        assert f"has offset {wrong} in queue T-0, where 2 comes next" in violation.text


def test_an_answer_with_another_queue_offset_than_the_record_is_found() -> None:
    cluster = three()
    last = cluster.history.answers[-1]
    changed = Answered(**{**last.answered.__dict__, "queue_offset": 77})
    last.answered = changed
    [violation] = queue_offsets.check(cluster.history, cluster.image(), MASTER)
    assert "it is stored with queue offset 9" in violation.text


def test_an_offset_is_free_again_only_after_a_lawful_loss() -> None:
    for is_sync_flush, kind, allowed in ((False, "power", True), (False, "kill", False), (True, "power", False)):
        cluster = Cluster(is_sync_flush=is_sync_flush)
        cluster.put()
        cluster.put()
        cluster.crash(MASTER, kind)
        cluster.cut(MASTER, cluster.image().records()[1].physical_offset)
        cluster.queue_offsets["T", 0] = 1
        cluster.put()
        found = queue_offsets.check(cluster.history, cluster.image(), MASTER)
        assert (found == []) is allowed, (is_sync_flush, kind)
        if not allowed:
            assert "has the queue offset of message p-1" in found[0].text


def test_two_consumers_given_different_messages_at_one_offset_are_found() -> None:
    cluster = three()
    for body_id in (b"p-0", b"p-3"):
        cluster.history.add(Consumed(cluster.now_s, "c", "T", 0, 0, body_id, MASTER))
    [violation] = queue_offsets.check(cluster.history, cluster.image(), MASTER)
    assert "both as T-0 offset 0" in violation.text


# ---- prefix, soundness, convergence


def test_a_slave_ahead_of_a_master_that_lost_its_tail_is_lawful_until_it_grows() -> None:
    cluster = Cluster("s1")
    for _ in range(10):
        cluster.put()
    kept = cluster.image().records()[6].physical_offset
    watch = prefix.Prefix(MASTER)
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.crash(MASTER, "power")
    cluster.cut(MASTER, kept)
    cluster.history.add(Recovered(cluster.now_s, MASTER, kept))
    assert watch.check(cluster.history, cluster.images()) == []
    for _ in range(8):
        cluster.put(on=(MASTER,))
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.put(on=("s1",))  # which was under way to it
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.history.add(Connected(cluster.now_s, "s1", cluster.ends["s1"]))
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.put(on=("s1",))
    [violation] = watch.check(cluster.history, cluster.images())
    assert "two histories in one log" in violation.text
    cluster.crash("s1", "wipe")
    cluster.files["s1"].clear()
    assert watch.check(cluster.history, cluster.images()) == []


def test_a_slave_may_part_anywhere_from_a_master_that_was_given_another_log() -> None:
    """The operator replaced the master's log by another slave's; this slave had followed the master before that."""
    cluster = Cluster("s1")
    for _ in range(10):
        cluster.put()
    kept = cluster.image().records()[4].physical_offset
    watch = prefix.Prefix(MASTER)
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.crash(MASTER, "wipe")
    cluster.cut(MASTER, kept)
    for _ in range(8):
        cluster.put(on=(MASTER,))
    cluster.history.add(Recovered(cluster.now_s, MASTER, cluster.ends[MASTER]))
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.history.add(Connected(cluster.now_s, "s1", cluster.ends["s1"]))
    cluster.put(on=("s1",))
    [violation] = watch.check(cluster.history, cluster.images())
    assert "two histories in one log" in violation.text


def test_a_slave_that_lost_power_may_lack_the_rest_of_a_sector_until_it_is_equal() -> None:
    cluster = three()
    log = cluster.image().read(0, SEGMENT)
    end = next(end for end in range(512, SEGMENT, 512) if any(log[end - 6 : end]))
    at, whole = end - 6, log[end - 6 : end]
    watch = prefix.Prefix(MASTER)
    cluster.write("s1", at, bytes(end - at))
    [violation] = watch.check(cluster.history, cluster.images())
    assert "s1 differs from m" in violation.text
    cluster.crash("s1", "power")
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.write("s1", at, b"\1" * (end - at))
    assert watch.check(cluster.history, cluster.images())
    cluster.write("s1", at, whole)
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.write("s1", at, bytes(end - at))
    assert watch.check(cluster.history, cluster.images())


@pytest.mark.parametrize("lost_count", [0, 1, 3])
def test_a_slave_that_lost_its_stale_tail_itself_may_follow_again(lost_count: int) -> None:
    """It loses some of a tail of three records, and is sent the next ones by its master."""
    cluster = Cluster("s1")
    for _ in range(10):
        cluster.put()
    records = cluster.image().records()
    watch = prefix.Prefix(MASTER)
    cluster.crash(MASTER, "power")
    cluster.cut(MASTER, records[7].physical_offset)
    cluster.history.add(Recovered(cluster.now_s, MASTER, records[7].physical_offset))
    assert watch.check(cluster.history, cluster.images()) == []
    cluster.crash("s1", "power")
    cluster.cut("s1", records[-1].end if not lost_count else records[-lost_count].physical_offset)
    cluster.history.add(Recovered(cluster.now_s, "s1", cluster.ends["s1"]))
    for _ in range(8):
        cluster.put(on=(MASTER,))
    begin = cluster.ends["s1"]  # it followed before the check
    cluster.write("s1", begin, cluster.image().read(begin, SEGMENT - begin))
    found = watch.check(cluster.history, cluster.images())
    if lost_count == 3:
        assert found == []
        cluster.files["s1"][f"commitlog/{0:020d}"][begin + 10] ^= 1
        [violation] = watch.check(cluster.history, cluster.images())
        assert f"s1 differs from m at physical offset {begin + 10}" in violation.text
    else:
        assert "two histories in one log" in found[0].text


def test_a_part_of_a_record_at_a_slaves_end_is_no_damage() -> None:
    cluster = three()
    last = cluster.image().records()[-1]
    segment = cluster.files["s1"][f"commitlog/{8192:020d}"]
    segment[last.physical_offset + 50 - 8192 :] = bytes(SEGMENT - (last.physical_offset + 50 - 8192))
    image = StoreImage(cluster.files["s1"], SEGMENT, end=last.physical_offset + 50, name="s1")
    assert soundness.check(image) == []
    assert prefix.check(cluster.history, {MASTER: cluster.image(), "s1": image}, MASTER) == []
    whole = StoreImage(cluster.files["s1"], SEGMENT, end=last.end, name="s1")
    [violation] = prefix.check(cluster.history, {MASTER: cluster.image(), "s1": whole}, MASTER)
    assert "s1 differs from m at physical offset" in violation.text


def test_stale_bytes_behind_the_end_are_found() -> None:
    cluster = three()
    cluster.files[MASTER][f"commitlog/{8192:020d}"][-20] = 7
    known = StoreImage(cluster.files[MASTER], SEGMENT, end=cluster.ends[MASTER], name="m")
    for image in (cluster.image(), known):
        [violation] = soundness.check(image)
        assert "bytes that are not zero stand behind it" in violation.text


def test_store_times_that_fall_are_found() -> None:
    cluster = Cluster()
    cluster.put()
    cluster.put()
    segment = cluster.files[MASTER][f"commitlog/{0:020d}"]
    segment[56:64] = (2000).to_bytes(8, "big")
    assert "before the one in front of it" in str(soundness.check(cluster.image()))
    assert soundness.check(cluster.image(), clock_is_steady=False) == []


def test_a_slave_that_stays_behind_is_found() -> None:
    cluster = three()
    cluster.put(on=BOTH)
    [violation] = convergence.check_logs(cluster.images(), MASTER)
    assert "s2 ends at" in violation.text


def test_a_log_ends_behind_the_filler_that_fills_its_last_segment() -> None:
    """A slave without the filler lacks it, and one that started behind it lacks nothing."""
    cluster = three()
    records = cluster.image().records()
    last = next(one for one, other in pairwise(records) if other.physical_offset == SEGMENT)
    for name in cluster.names:
        cluster.cut(name, SEGMENT)
    assert convergence.check_logs(cluster.images(), MASTER) == soundness.check(cluster.image()) == []
    assert cluster.image().sound_end == cluster.image().used_end == SEGMENT > last.end
    assert cluster.image().records()[-1] == last
    whole = cluster.files["s1"]
    cluster.files["s1"] = {f"commitlog/{SEGMENT:020d}": bytearray(SEGMENT)}
    assert convergence.check_logs(cluster.images(), MASTER) == []
    cluster.files["s1"] = {f"commitlog/{2 * SEGMENT:020d}": bytearray(SEGMENT)}
    assert f"s1 ends at {2 * SEGMENT}, m at {SEGMENT}" in str(convergence.check_logs(cluster.images(), MASTER))
    cluster.files["s1"] = whole
    cluster.cut("s1", last.end)
    assert f"s1 ends at {last.end}, m at {SEGMENT}" in str(convergence.check_logs(cluster.images(), MASTER))


def test_unconsumed_message_is_found() -> None:
    cluster = three()
    for record in cluster.image().records()[:-1]:
        body_id = body_id_of(record.body)
        assert body_id is not None
        cluster.history.add(Consumed(99.0, "c", "T", record.queue_id, record.queue_offset, body_id, MASTER))
    topics = frozenset({"T"})
    found = convergence.check(cluster.history, cluster.images(), MASTER, consumed_topics=topics)
    assert "1 messages of m were never consumed, the first is T-2 offset 9" in str(found)


def test_an_entry_beyond_the_flushed_end_is_found() -> None:
    cluster = three()
    image = cluster.image()
    end = image.log_range()[1]
    assert derived.check_queues(image, is_complete=True, flushed_end=end) == []
    [violation] = derived.check_queues(image, is_complete=True, flushed_end=end - 1)
    assert "but the flushed end is" in violation.text

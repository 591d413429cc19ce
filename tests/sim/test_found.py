"""Scenarios in which the simulation found a broken promise, reduced to their cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.__main__ import show
from tests.sim.disk import SimDisk
from tests.sim.run import Outcome
from tests.sim.runner import run_plan
from tests.sim.scenario import AnyPlan, Fault, GroupOptions, GroupPlan, Options, Plan


def run(options: Options | GroupOptions, *faults: Fault, seed: int = 1) -> Outcome:
    plan: AnyPlan
    if isinstance(options, Options):
        plan = Plan(seed=seed, options=options, faults=faults)
    else:
        plan = GroupPlan(seed=seed, options=options, faults=faults)
    outcome = run_plan(plan)
    assert not outcome.violations, show(outcome)
    return outcome


@pytest.mark.parametrize(("node", "seed"), [("m", 1), ("s1", 2)])
def test_what_a_failed_sync_left_unwritten_is_written_after_the_restart(node: str, seed: int) -> None:
    """A sync fails, and the kernel marks the pages clean. The node restarts, continues behind them, and loses power.

    It trusted the bytes it read: recovery after the power loss found holes before acknowledged messages, even on a
    SYNC_FLUSH master, and refused to start.
    """
    options = Options(
        role="SYNC_MASTER",
        slave_count=1,
        master_flush="SYNC_FLUSH",
        slave_flush="SYNC_FLUSH",
        segment_size=65_536,
        body_size_max=3000,
        burst_max=12,
        pause_s=0.05,
        run_s=9.0,
    )
    outcome = run(
        options,
        Fault(at_s=2.0, kind="disk_slow", node=node, duration_s=1.0, number=1),
        Fault(at_s=2.5, kind="sync_error", node=node),
        Fault(at_s=6.0, kind="power", node=node, duration_s=0.5),
        seed=seed,
    )
    assert outcome.faults["sync_error"] == 1


LOSSY: dict[str, Any] = {
    "role": "SYNC_MASTER",
    "slave_count": 1,
    "master_flush": "ASYNC_FLUSH",
    "slave_flush": "ASYNC_FLUSH",
    "start_from": "last",
    "after_power_loss": "plain",
    "segment_size": 8192,
    "producer_count": 1,
    "consumer_count": 0,
    "burst_max": 12,
    "body_size_max": 2500,
    "run_s": 3.0,
}


@pytest.mark.parametrize("lost_count", [1, 2])
def test_a_power_loss_leaves_a_log_that_ends_where_a_segment_does(
    lost_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master loses its last segments, and the remaining ones are full: records, and the fillers at their ends.

    Its log ends there, and the next message starts the next segment. An empty slave is sent no bytes: like RocketMQ's
    it takes its start offset from a heartbeat, creates the file that its master does not have yet, and reports it. The
    checkers took that for an acknowledgement of bytes that were never sent, and took the master's log to end before the
    filler.

    The slave with the longer log reports that its master is behind. With one segment more it would compare from that
    segment's start, which is its master's end: it was sent nothing from there, and reported that its master had deleted
    it.
    """

    def lose_segments(self: SimDisk) -> SimDisk:
        paths: list[Path] = sorted(
            path for path, inode in self.inodes.items() if path.parent.name == "commitlog" and any(inode.content)
        )
        for path, inode in self.inodes.items():
            if path in paths[-lost_count:]:
                assert not any(inode.durable), "what was synced is not lost"
                inode.content[:] = inode.durable
            else:
                inode.durable[:] = inode.content
        return self.after_kill()

    monkeypatch.setattr(SimDisk, "after_power_loss", lose_segments)
    outcome = run(Options(**LOSSY), Fault(at_s=2.5, kind="power", node="m", duration_s=9.0))
    assert any("ha.client_master_behind" in line for line in outcome.trace)
    [recovered] = [line for line in outcome.trace if "m INFO store.recovered" in line and "clean=False" in line]
    end = int(recovered.partition("max_offset=")[2].split()[0])
    assert end % LOSSY["segment_size"] == 0
    emptied = next(number for number, line in enumerate(outcome.trace) if "s1 is emptied" in line)
    assert any(line.endswith(f"detail='from offset {end}'") for line in outcome.trace[emptied:])


def test_a_paused_slave_takes_in_what_its_master_has_lost_meanwhile() -> None:
    """A master loses power while its slave is paused, with bytes in the slave's buffers that it receives when it
    continues.

    When the master came back both logs looked equal. Then the slave's is longer, by part of a record or more: it
    reports that its master is behind, or another one, and the operator has to empty it.
    """
    options = Options(
        role="SYNC_MASTER",
        slave_count=1,
        flush_interval_ms=5000,
        start_from="first",
        after_power_loss="plain",
        segment_size=8192,
        queue_entries=10,
        transfer_batch_bytes=1000,
        overlap_bytes=16_384,
        housekeeping_ms=3000,
        slave_timeout_ms=500,
        producer_count=1,
        burst_max=1,
        body_size_max=2500,
        queue_count=4,
        consumer_count=0,
        run_s=10.0,
        base_s=0.0001,
        jitter_s=0.02,
        window=2000,
        split_chance=0.0,
    )
    faults = (
        Fault(at_s=5.078, kind="pause", node="s1", duration_s=2.882),
        Fault(at_s=6.996, kind="power", node="m", duration_s=0.2),
    )
    outcomes = [run(options, *faults, seed=seed) for seed in range(8)]  # this happens for about half of them
    assert any("s1 is emptied" in line for outcome in outcomes for line in outcome.trace)


def test_a_disk_that_is_fast_again_is_fast_for_the_calls_under_way() -> None:
    """A call that syncs the files of many queues and indexes starts while each sync takes 6 s.

    The simulated disk made it take those 6 s for each file long after the disk was fast again, so that the node did not
    stop within a minute.
    """
    options = Options(
        role="SYNC_MASTER",
        slave_count=1,
        master_flush="SYNC_FLUSH",
        slave_flush="SYNC_FLUSH",
        segment_size=65_536,
        queue_entries=10,
        index_entries=40,
        producer_count=1,
        burst_max=8,
        queue_count=1,
        consumer_count=0,
        run_s=12.6,
        sync_flush_timeout_ms=500,
    )
    outcome = run(options, Fault(at_s=9.625, kind="disk_slow", node="m", duration_s=10.748, number=2), seed=9_300_332)
    assert outcome.statuses["FLUSH_DISK_TIMEOUT"]
    assert outcome.virtual_s < 60


def test_a_member_that_starts_again_within_its_term_is_no_master() -> None:
    """A master loses power and is back before its key ends, and before the name server knows that it is not the master.

    It does not know yet what its group has committed, and answered that consumers start at 0; now it rejects the
    request. Its knowledge may be stale: the checker took it for the master's answer, because the service still holds
    the key of its earlier process.
    """
    options = GroupOptions(
        member_count=2,
        flush="SYNC_FLUSH",
        lease_ttl_ms=3000,
        not_catch_up_ms=3000,
        segment_size=8192,
        queue_entries=10,
        index_entries=40,
        transfer_batch_bytes=32_768,
        heartbeat_ms=500,
        housekeeping_ms=1500,
        slave_timeout_ms=3000,
        producer_count=1,
        burst_max=1,
        pause_s=0.5,
        body_size_max=60,
        queue_count=3,
        consumer_count=1,
        run_s=8.0,
        base_s=0.01,
        jitter_s=0.0,
        window=16_384,
        split_chance=0.0,
        service_delay_s=0.02,
        lease_late_s=0.5,
    )
    outcome = run(
        options,
        Fault(at_s=1.281, kind="power", node="master", duration_s=0.426),
        Fault(at_s=3.528, kind="power", node="m2", duration_s=11.441),
        Fault(at_s=5.015, kind="power", node="master", duration_s=0.278),
        seed=9_100_051,
    )
    assert outcome.faults["power"] == 3


def test_a_pair_that_loses_its_connection_answers_put_ok_again_at_once() -> None:
    """A slave waited five seconds before it reconnected, during which its master answered SLAVE_NOT_AVAILABLE."""
    options = Options(
        slave_count=1, producer_count=1, consumer_count=0, burst_max=1, pause_s=0.05, run_s=12.0, base_s=0.0001,
        jitter_s=0.0, split_chance=0.0, heartbeat_ms=1000, housekeeping_ms=3000,
    )  # fmt: skip
    outcome = run(options, Fault(at_s=3.0, kind="reset", node="m", other="s1"))
    assert outcome.faults["reset"] == 1
    assert outcome.statuses["PUT_OK"] > 100
    assert outcome.statuses.total() - outcome.statuses["PUT_OK"] <= 2


def test_no_connection_is_cut_when_faults_are_over() -> None:
    """A connection is to be cut after some hundred more bytes, on a link with little traffic.

    The cut happened long after the faults, when every put must be PUT_OK.
    """
    options = Options(
        slave_count=1, slave_flush="SYNC_FLUSH", all_in_sync=True, min_in_sync_replicas=1, separate_name_server=True,
        segment_size=65_536, queue_entries=10, index_entries=40, transfer_batch_bytes=1000, heartbeat_ms=2000,
        housekeeping_ms=6000, sync_flush_timeout_ms=500, producer_count=1, burst_max=1, pause_s=0.2, queue_count=2,
        consumer_count=0, run_s=9.0, base_s=0.01, jitter_s=0.002, window=16_384, split_chance=0.6, start_from="last",
        body_size_max=600, after_power_loss="plain", overlap_bytes=2000,
    )  # fmt: skip
    cut = Fault(at_s=3.845, kind="cut_frame", node="m", other="s1", duration_s=0.717, number=65_172_202)
    isolated = Fault(at_s=5.998, kind="isolate", node="m", other="s1", duration_s=13.06)
    outcome = run(options, cut, isolated, seed=34_096_282)
    assert outcome.faults["cut_frame"] == 1


def test_a_member_that_flushed_everything_before_its_master_left_is_elected() -> None:
    """A new member with SYNC_FLUSH has flushed and acknowledged the whole log some time after its last bytes arrived.

    That it had caught up was not recorded, because no more bytes arrived. Its master took it into the set and left, and
    the group had no master from then on: a member that never had the whole log may not be elected.
    """
    options = GroupOptions(
        member_count=3, policy="alone", ack_count=3, flush="SYNC_FLUSH", lease_ttl_ms=2000, not_catch_up_ms=15_000,
        service_delay_s=0.15, lease_late_s=0.0, segment_size=16_384, queue_entries=10, index_entries=300,
        transfer_batch_bytes=32_768, heartbeat_ms=1000, housekeeping_ms=3000, slave_timeout_ms=500,
        sync_flush_timeout_ms=5000, producer_count=1, burst_max=1, pause_s=1.0, body_size_max=60, queue_count=3,
        consumer_count=0, run_s=4.4, base_s=0.01, jitter_s=0.02, window=16_384, split_chance=0.0,
    )  # fmt: skip
    stop = Fault(at_s=1.429, kind="stop", node="m2", other="m3", duration_s=7.689)
    assert run(options, stop, seed=44_072_704).term_count > 1


def test_an_operator_who_gives_the_master_a_slaves_log_leaves_no_gap_in_it() -> None:
    """The master's log ends at unrepairable damage; its slave was empty and started far behind that.

    The operator put the slave's segments behind the master's. The next start found the segments between them missing,
    and deleted everything from the slave, including acknowledged messages, because nothing showed that it had been
    flushed.
    """
    options = Options(
        role="SYNC_MASTER", slave_count=1, master_flush="SYNC_FLUSH", after_power_loss="plain", overlap_bytes=65_536,
        segment_size=8192, queue_entries=10, index_entries=40, transfer_batch_bytes=32_768, heartbeat_ms=500,
        housekeeping_ms=2500, sync_flush_timeout_ms=500, producer_count=3, burst_max=1, pause_s=0.2, body_size_max=2500,
        queue_count=3, run_s=20.0, base_s=0.0001, jitter_s=0.0, split_chance=0.0, window=16_384, learn_master=True,
        start_from="last",
    )  # fmt: skip
    flip = Fault(at_s=2.59, kind="flip_bit", node="m", other="p1", duration_s=9.915)
    outcome = run(options, flip, seed=8_823_021)
    assert any("s1's log to" in line and "replaces m's, which is damaged" in line for line in outcome.trace)


def test_a_candidate_publishes_what_it_learns_of_the_group_while_it_stands() -> None:
    """The master hands over, and the service is restored to an earlier state while all members are candidates.

    Before they learned of the handover they had published which record they knew, and did not correct it: one of them
    was elected by the older record.
    """
    options = GroupOptions(
        member_count=2, policy="count", ack_count=2, flush="SYNC_FLUSH", lease_ttl_ms=2000, not_catch_up_ms=15_000,
        service_delay_s=0.15, lease_late_s=0.0, segment_size=65_536, queue_entries=10, index_entries=40,
        transfer_batch_bytes=1000, heartbeat_ms=1000, housekeeping_ms=3000, slave_timeout_ms=3000,
        sync_flush_timeout_ms=500, producer_count=1, burst_max=1, pause_s=0.5, body_size_max=600, queue_count=2,
        consumer_count=0, run_s=8.8, base_s=0.001, jitter_s=0.0, window=65_536, split_chance=0.0,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=3.761, kind="cut_off", node="master", other="m1", duration_s=0.782, number=914_154_106),
        Fault(at_s=4.11, kind="switch", node="m1", other="m2", duration_s=0.042, number=362_108_907),
        Fault(at_s=4.88, kind="switch", node="master", other="m1", duration_s=3.126, number=671_779_338),
        Fault(at_s=5.84, kind="service_restored", node="master", other="p1", number=403_874_071),
        seed=79_016_813_958,
    )
    assert outcome.faults["service_restored"] == 1


def test_nobody_is_blamed_for_not_knowing_a_record_that_no_member_heard_of() -> None:
    """The set changes, the service goes down before the master learns of it, and is restored to the state before."""
    options = GroupOptions(
        member_count=2, policy="count", ack_count=2, flush="SYNC_FLUSH", lease_ttl_ms=2000, not_catch_up_ms=3000,
        service_delay_s=0.15, lease_late_s=0.0, segment_size=8192, queue_entries=10, index_entries=300,
        transfer_batch_bytes=1_048_576, heartbeat_ms=1000, housekeeping_ms=3000, slave_timeout_ms=500,
        sync_flush_timeout_ms=5000, producer_count=1, burst_max=8, pause_s=0.2, body_size_max=2000, queue_count=3,
        consumer_count=0, run_s=6.0, base_s=0.001, jitter_s=0.02, window=4000, split_chance=0.0,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=1.293, kind="service_down", node="master", other="m2", duration_s=9.503, number=791_588_004),
        Fault(at_s=3.152, kind="service_restored", node="master", other="p1", number=81_628_499),
        seed=79_016_814_480,
    )
    assert outcome.faults["service_restored"] == 1


def test_a_member_outside_the_set_keeps_what_the_set_lost_until_the_operator_decides() -> None:
    """A connection is reset, so the master is alone in the set; then it loses power, and bytes that the other member
    has.

    That member was down when the master was elected again, so it has more of the log than the group from then on.
    """
    options = GroupOptions(
        member_count=2, policy="all", ack_count=2, flush="ASYNC_FLUSH", lease_ttl_ms=2000, not_catch_up_ms=15_000,
        service_delay_s=0.02, lease_late_s=0.0, segment_size=65_536, queue_entries=50, index_entries=300,
        transfer_batch_bytes=1_048_576, heartbeat_ms=1000, housekeeping_ms=3000, slave_timeout_ms=500,
        sync_flush_timeout_ms=5000, producer_count=1, burst_max=1, pause_s=0.5, body_size_max=600, queue_count=2,
        consumer_count=0, run_s=6.1, base_s=0.001, jitter_s=0.002, window=16_384, split_chance=0.6,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=2.419, kind="power_in_write", node="m1", other="m1", duration_s=0.033, number=203_539_200),
        Fault(at_s=2.467, kind="reset", node="m1", other="m2", duration_s=7.724, number=595_945_732),
        Fault(at_s=3.13, kind="power", node="m2", other="m1", duration_s=3.855, number=835_149_525),
        seed=79_016_814_341,
    )
    assert any("operator: m2 is emptied" in line for line in outcome.trace)


def test_pages_that_a_power_loss_left_do_not_make_a_node_a_holder() -> None:
    """A slave reports bytes and loses power before the answer arrives at the producer.

    Its disk has the pages of that message by chance, but none of those before it, so its log ends before the message.
    """
    options = Options(
        role="SYNC_MASTER", slave_count=2, master_flush="ASYNC_FLUSH", slave_flush="ASYNC_FLUSH",
        flush_interval_ms=5000, segment_size=8192, queue_entries=50, index_entries=300, transfer_batch_bytes=32_768,
        heartbeat_ms=1000, housekeeping_ms=3000, slave_timeout_ms=3000, sync_flush_timeout_ms=5000, producer_count=3,
        burst_max=12, pause_s=0.2, body_size_max=2500, queue_count=3, consumer_count=0, run_s=6.5, base_s=0.01,
        jitter_s=0.0, window=16_384, split_chance=0.0, start_from="first", after_power_loss="plain", overlap_bytes=2000,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=1.446, kind="power_in_write", node="s1", other="s2", duration_s=0.048, number=884_262_841),
        Fault(at_s=3.456, kind="power_in_write", node="m", other="s2", duration_s=0.086, number=1_005_975_905),
        seed=84_645_645_431,
    )
    assert outcome.faults["power_in_write"] == 2


def test_a_master_is_elected_once_the_leases_from_before_a_restore_have_ended() -> None:
    """The timer for the end of those leases was rounded down, so the old master seemed to have its key still."""
    options = GroupOptions(
        member_count=2, flush="SYNC_FLUSH", lease_ttl_ms=3000, lease_late_s=0.0, producer_count=1, consumer_count=0,
        run_s=6.0, base_s=0.0001, jitter_s=0.0, split_chance=0.0,
    )  # fmt: skip
    outcome = run(options, Fault(at_s=3.755, kind="service_restored", node="master", number=798_060_780), seed=908)
    assert outcome.term_count > 1


def test_a_term_that_no_disk_knows_is_given_again_after_a_restore() -> None:
    """A member with a full disk is elected and killed before it could write the record of its term and serve.

    Then the service is restored from an older state. The newest record on any disk is of the term before, so the next
    master gets the same term.
    """
    options = GroupOptions(
        segment_size=16384, queue_entries=200, index_entries=40, transfer_batch_bytes=1000, heartbeat_ms=2000,
        housekeeping_ms=6000, slave_timeout_ms=500, producer_count=1, burst_max=1, pause_s=1.0, body_size_max=600,
        queue_count=1, consumer_count=0, run_s=14.0, base_s=0.001, jitter_s=0.0, window=4000, split_chance=0.6,
        policy="count", min_in_sync_replicas=2, flush="SYNC_FLUSH", not_catch_up_ms=1000, service_delay_s=0.02,
        lease_late_s=0.0, clock_speed=1.08,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=1.608, kind="kill_in_write", node="m3", other="m3", duration_s=9.238, number=26_542_070),
        Fault(at_s=2.971, kind="switch", node="m2", other="m3", duration_s=4.23, number=452_647_327),
        Fault(at_s=3.319, kind="disk_full", node="m1", other="m1", duration_s=2.419, number=3_050_241),
        Fault(at_s=3.969, kind="apart", node="master", other="m3", duration_s=7.517, number=686_146_809),
        Fault(at_s=6.421, kind="kill", node="master", other="m3", duration_s=3.114, number=832_253_693),
        Fault(at_s=8.84, kind="service_restored", node="master", other="p1", number=900_514_041),
        seed=27_933_977_129,
    )
    assert any("operator puts back GroupRecord(epoch=2" in line for line in outcome.trace)


def test_a_slave_whose_checksums_cover_a_flipped_bit_is_emptied_when_more_of_it_is_damaged() -> None:
    """A bit that no CRC covers flips in a killed slave before its block has a checksum, so the next start makes one of
    the flipped bit. Then the file is truncated.

    The master's bytes are not what was written there, so nothing can repair the slave. Its master closed the connection
    while it waited for the repair, and the operator saw only that, and waited, too.
    """
    options = Options(
        role="SYNC_MASTER", slave_count=1, master_flush="SYNC_FLUSH", slave_flush="SYNC_FLUSH", overlap_bytes=16_384,
        segment_size=65_536, queue_entries=10, index_entries=40, transfer_batch_bytes=1000, heartbeat_ms=1000,
        housekeeping_ms=5000, slave_timeout_ms=500, sync_flush_timeout_ms=5000, producer_count=1, burst_max=3,
        pause_s=1.0, body_size_max=60, queue_count=1, consumer_count=1, run_s=20.0, base_s=0.01, jitter_s=0.02,
        window=2000, split_chance=0.2, learn_master=True, start_from="last", after_power_loss="plain",
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=1.424, kind="power", node="s1", other="p1", duration_s=3.089, number=595_354_798),
        Fault(at_s=5.122, kind="flip_bit", node="s1", other="m", duration_s=8.585, number=1_008_634_001),
        Fault(at_s=13.14, kind="disk_full", node="s1", other="p1", duration_s=1.094, number=14_777_738),
        Fault(at_s=13.876, kind="pause", node="s1", other="p1", duration_s=3.991, number=702_339_298),
        Fault(at_s=17.475, kind="truncate_file", node="s1", other="p1", duration_s=0.058, number=621_528_740),
        seed=84_645_653_409,
    )
    assert any("is not what was written here" in line for line in outcome.trace)
    assert any("s1 is emptied" in line for line in outcome.trace)


def test_a_member_does_not_join_without_what_the_set_before_has_acknowledged() -> None:
    """A master alone in its set flushes messages while another member joins: the set alone had acknowledged them.

    They were answered PUT_OK when the flush ended, and the set by then contained the member, which did not have them.
    """
    options = GroupOptions(
        segment_size=65536, queue_entries=10, index_entries=40, transfer_batch_bytes=32768, heartbeat_ms=2000,
        housekeeping_ms=6000, slave_timeout_ms=500, sync_flush_timeout_ms=500, body_size_max=600, queue_count=1,
        run_s=6.0, base_s=0.01, jitter_s=0.0, window=16384, split_chance=0.6, flush="SYNC_FLUSH", not_catch_up_ms=1000,
        lease_late_s=2.0, clock_speed=1.08,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=1.192, kind="apart", node="m3", other="p1", duration_s=0.328, number=769_425_422),
        Fault(at_s=3.586, kind="apart", node="master", other="m2", duration_s=4.38, number=944_091_305),
        Fault(at_s=3.739, kind="cut_off", node="master", other="m1", duration_s=7.661, number=932_727_231),
        Fault(at_s=3.796, kind="cut_off", node="master", other="m2", duration_s=0.838, number=772_283_404),
        Fault(at_s=4.878, kind="kill", node="m3", other="p1", duration_s=0.345, number=871_934_458),
        seed=27_933_974_920,
    )
    assert outcome.faults["cut_off"] == 2


def test_an_answer_of_the_service_from_before_its_restore_comes_late() -> None:
    """A member's link is slow. The answer is of a higher revision than all that follow the restore.

    The member took it for the newest state and ignored those, so it stood in an election that was long over.
    """
    options = GroupOptions(
        segment_size=8192, queue_entries=200, slave_timeout_ms=500, sync_flush_timeout_ms=500, burst_max=1,
        body_size_max=60, consumer_count=0, run_s=8.8, base_s=0.01, jitter_s=0.0, window=16384, split_chance=0.0,
        member_count=2, flush="SYNC_FLUSH", not_catch_up_ms=1000, service_delay_s=0.15, lease_late_s=0.0,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=3.482, kind="sync_error", node="m2", other="m2", duration_s=6.925, number=788_795_333),
        Fault(at_s=3.824, kind="kill", node="slave", other="p1", duration_s=3.0),
        Fault(at_s=5.685, kind="service_slow", node="m2", other="m2", duration_s=0.857, number=975_311_929),
        Fault(at_s=5.824, kind="service_restored", node="master", other="p1", number=454_138_878),
        seed=27_933_979_271,
    )
    assert outcome.faults["service_restored"] == 1


def test_a_part_of_a_record_that_the_set_has_acknowledged_excludes_no_member() -> None:
    """A slave receives part of a record, and acknowledges it. It is elected, and removes that part.

    The former master, which has the whole record, knew that part as confirmed, and refused to follow.
    """
    options = GroupOptions(
        segment_size=8192, queue_entries=10, housekeeping_ms=3000, sync_flush_timeout_ms=500, producer_count=1,
        body_size_max=600, queue_count=2, run_s=6.5, base_s=0.001, jitter_s=0.0, window=4000, split_chance=0.0,
        policy="count", ack_count=3, not_catch_up_ms=1000, lease_late_s=0.0,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=1.771, kind="pause", node="master", other="p1", duration_s=0.139, number=872_251_734),
        Fault(at_s=2.647, kind="lossy", node="m3", other="m3", duration_s=0.636, number=585_308_264),
        Fault(at_s=3.369, kind="pause", node="master", other="m2", duration_s=3.935, number=711_707_769),
        Fault(at_s=3.538, kind="kill", node="slave", other="p1", duration_s=3.0),
        seed=27_933_978_808,
    )
    assert outcome.cut_count


def test_a_queue_entry_is_compared_when_dispatch_has_passed_the_range_that_was_healed() -> None:
    """A killed slave's log is damaged, and an entry of a queue in a later kill. Dispatch waits for the repair.

    The scrub went through the store when the range was healed, before it was dispatched, found nothing to compare, and
    the wrong entry stayed until the round after that.
    """
    options = Options(
        role="ASYNC_MASTER", slave_count=2, master_flush="SYNC_FLUSH", slave_flush="ASYNC_FLUSH", all_in_sync=True,
        segment_size=32_768, queue_entries=50, index_entries=300, transfer_batch_bytes=32_768, heartbeat_ms=2000,
        housekeeping_ms=10_000, sync_flush_timeout_ms=500, producer_count=2, burst_max=3, pause_s=0.2,
        body_size_max=600, queue_count=3, consumer_count=2, run_s=10.0, base_s=0.001, jitter_s=0.0, window=2000,
        split_chance=0.0, start_from="first", after_power_loss="plain", overlap_bytes=16_384,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=3.567, kind="kill", node="m", other="s1", duration_s=2.045, number=819_311_818),
        Fault(at_s=3.733, kind="disk_slow", node="m", other="p1", duration_s=3.677, number=441_707_557),
        Fault(at_s=4.752, kind="flip_bit", node="s2", other="m", duration_s=0.918, number=785_324_178),
        Fault(at_s=8.299, kind="flip_bit", node="s2", other="p1", duration_s=0.436, number=340_815_840),
        seed=84_645_652_944,
    )
    assert any("queue.entries_repaired topic=flights queue_id=2 first=0" in line for line in outcome.trace)


def test_a_connection_that_is_half_open_has_ended_before_nothing_is_said_to_disturb_the_cluster() -> None:
    """The slave's machine has forgotten its connection, and neither end has noticed when the faults are over.

    All logs were equal, so the simulator expected PUT_OK, although that slave could not acknowledge anything yet.
    """
    options = Options(
        segment_size=16384, queue_entries=200, index_entries=40, heartbeat_ms=2000, housekeeping_ms=10_000,
        slave_timeout_ms=500, sync_flush_timeout_ms=5000, producer_count=1, burst_max=1, pause_s=0.5, body_size_max=60,
        queue_count=1, consumer_count=0, run_s=10.0, base_s=0.001, jitter_s=0.0, window=65536, split_chance=0.0,
        role="SYNC_MASTER", slave_count=2, master_flush="SYNC_FLUSH", slave_flush="SYNC_FLUSH", all_in_sync=True,
        start_from="last", after_power_loss="plain",
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=2.024, kind="pause", node="m", other="s1", duration_s=13.6, number=37_166_802),
        Fault(at_s=4.297, kind="power", node="m", other="s2", duration_s=1.151, number=941_191_643),
        Fault(at_s=8.447, kind="half_open", node="m", other="s1", duration_s=13.433, number=876_798_510),
        seed=84_645_649_814,
    )
    assert outcome.faults["half_open"] == 1


def test_a_master_appends_before_the_end_of_its_recovery_is_recorded() -> None:
    """A master returns from a power loss with a shorter log, and takes a message at once.

    The checker took the end of that message for the end of recovery, and so the slaves' bytes there for wrong ones.
    """
    options = Options(
        segment_size=32768, queue_entries=200, index_entries=300, transfer_batch_bytes=1000, heartbeat_ms=1000,
        housekeeping_ms=5000, slave_timeout_ms=500, sync_flush_timeout_ms=5000, producer_count=2, burst_max=3,
        pause_s=0.5, body_size_max=600, queue_count=1, consumer_count=2, run_s=30.0, base_s=0.0001, jitter_s=0.0,
        window=65536, split_chance=0.0, role="SYNC_MASTER", slave_count=3, master_flush="ASYNC_FLUSH",
        slave_flush="SYNC_FLUSH", learn_master=True, start_from="first", after_power_loss="plain", overlap_bytes=2000,
    )  # fmt: skip
    outcome = run(
        options,
        Fault(at_s=3.605, kind="pause", node="m", other="s3", duration_s=0.113, number=830_406_565),
        Fault(at_s=4.385, kind="clog", node="m", other="s3", duration_s=0.734, number=234_474_374),
        Fault(at_s=9.683, kind="disk_slow", node="m", other="s3", duration_s=3.078, number=299_023_082),
        Fault(at_s=15.779, kind="power_in_write", node="m", other="s1", duration_s=14.793, number=218_219_265),
        seed=84_645_653_210,
    )
    assert outcome.faults["power_in_write"] == 1

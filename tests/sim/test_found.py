"""Scenarios in which the simulation found a broken promise, reduced to their cause.

Each test runs the plan `found/NAME.json`, where `test_NAME` is the test; options that it omits have their defaults. The
simulator writes such a file when a seed fails, and `python -m tests.sim --plan FILE` runs it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ha.protocol.record import RecordHead, scan_record
from tests.checkers import derived
from tests.sim.__main__ import show
from tests.sim.disk import SECTOR, SimDisk
from tests.sim.run import Outcome
from tests.sim.runner import run_plan
from tests.sim.scenario import AnyPlan
from tests.sim.timers import TIMED_TOPIC
from tests.sim.workload import TOPIC

QUEUE_ID_AT = 15
"""The low byte of the queue id in a record"""
QUEUE_OFFSET_AT = 20
BORN_HOST_AT = 48
STORE_TIME_AT = 56
BODY_SIZE_AT = 84
SLOT_COUNT_AT = 32
"""The high byte of the number of used slots in an index file's header"""


@pytest.fixture
def plan(request: pytest.FixtureRequest) -> AnyPlan:
    """The plan of the requesting test."""
    name = request.function.__name__.removeprefix("test_")
    file = Path(__file__).with_name("found") / f"{name}.json"
    found: AnyPlan = msgspec.json.decode(file.read_bytes(), type=AnyPlan)
    return found


@pytest.fixture
def outcome(plan: AnyPlan) -> Outcome:
    """The outcome of the requesting test's plan; no promise is broken."""
    return run(plan)


def run(plan: AnyPlan, **changes: Any) -> Outcome:
    """Runs `plan` with `changes`, which may break no promise."""
    outcome = run_plan(msgspec.structs.replace(plan, **changes))
    assert not outcome.violations, show(outcome)
    return outcome


def records_in(disk: SimDisk, topic: str = "") -> list[tuple[Path, int]]:
    """Returns file and position of each record of a log; only of one topic, if given."""
    found: list[tuple[Path, int]] = []
    for path in sorted(path for path in disk.inodes if path.parent.name == "commitlog"):
        raw, at = bytes(disk.inodes[path].content), 0
        while isinstance(head := scan_record(raw, at, len(raw)), RecordHead):
            if topic in ("", head.topic):
                found.append((path, at))
            at += head.total_size
    return found


def stored_at(disk: SimDisk, path: Path, at: int) -> int:
    """Returns the store time of the record at `at`, in ms."""
    return int.from_bytes(disk.inodes[path].content[at + STORE_TIME_AT : at + STORE_TIME_AT + 8], "big")


def flip_at(monkeypatch: pytest.MonkeyPatch, find: Callable[[SimDisk], tuple[Path, int]], mask: int) -> None:
    """Makes the damage of a plan flip the bits `mask` of the byte whose file and position `find` returns."""

    def flip(self: SimDisk, kind: str, folder: str) -> tuple[Path, int, int]:
        assert (kind, folder) == ("flip_bit", "")
        path, place = find(self)
        for held in (self.inodes[path].content, self.inodes[path].durable):
            held[place] ^= mask
        self.world.note(f"{self.name} flip_bit {path} at {place}")
        return path, place, place + 1

    monkeypatch.setattr(SimDisk, "damage", flip)


@pytest.mark.parametrize(("node", "seed"), [("m", 1), ("s1", 2)])
def test_what_a_failed_sync_left_unwritten_is_written_after_the_restart(node: str, seed: int, plan: AnyPlan) -> None:
    """A sync fails, and the kernel marks the pages clean. The node restarts, continues behind them, and loses power.

    It trusted the bytes it read: recovery after the power loss found holes before acknowledged messages, even on a
    SYNC_FLUSH master, and refused to start.
    """
    faults = tuple(msgspec.structs.replace(fault, node=node) for fault in plan.faults)
    assert run(plan, faults=faults, seed=seed).faults["sync_error"] == 1


@pytest.mark.parametrize("lost_count", [1, 2])
def test_a_power_loss_leaves_a_log_that_ends_where_a_segment_does(
    lost_count: int, plan: AnyPlan, monkeypatch: pytest.MonkeyPatch
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
    outcome = run(plan)
    assert any("ha.client_master_behind" in line for line in outcome.trace)
    [recovered] = [line for line in outcome.trace if "m INFO store.recovered" in line and "clean=False" in line]
    end = int(recovered.partition("max_offset=")[2].split()[0])
    assert end % plan.options.segment_size == 0
    emptied = next(number for number, line in enumerate(outcome.trace) if "s1 is emptied" in line)
    assert any(line.endswith(f"detail='from offset {end}'") for line in outcome.trace[emptied:])


def test_a_paused_slave_takes_in_what_its_master_has_lost_meanwhile(plan: AnyPlan) -> None:
    """A master loses power while its slave is paused, with bytes in the slave's buffers that it receives when it
    continues.

    When the master came back both logs looked equal. Then the slave's is longer, by part of a record or more: it
    reports that its master is behind, or another one, and the operator has to empty it.
    """
    outcomes = [run(plan, seed=seed) for seed in range(8)]  # this happens for about half of them
    assert any("s1 is emptied" in line for outcome in outcomes for line in outcome.trace)


def test_a_disk_that_is_fast_again_is_fast_for_the_calls_under_way(outcome: Outcome) -> None:
    """A call that syncs the files of many queues and indexes starts while each sync takes 6 s.

    The simulated disk made it take those 6 s for each file long after the disk was fast again, so that the node did not
    stop within a minute.
    """
    assert outcome.statuses["FLUSH_DISK_TIMEOUT"]
    assert outcome.virtual_s < 60


def test_a_member_that_starts_again_within_its_term_is_no_master(outcome: Outcome) -> None:
    """A master loses power and is back before its key ends, and before the name server knows that it is not the master.

    It does not know yet what its group has committed, and answered that consumers start at 0; now it rejects the
    request. Its knowledge may be stale: the checker took it for the master's answer, because the service still holds
    the key of its earlier process.
    """
    assert outcome.faults["power"] == 3


def test_a_pair_that_loses_its_connection_answers_put_ok_again_at_once(outcome: Outcome) -> None:
    """A slave waited five seconds before it reconnected, during which its master answered SLAVE_NOT_AVAILABLE."""
    assert outcome.faults["reset"] == 1
    assert outcome.statuses["PUT_OK"] > 100
    assert outcome.statuses.total() - outcome.statuses["PUT_OK"] <= 2


def test_no_connection_is_cut_when_faults_are_over(outcome: Outcome) -> None:
    """A connection is to be cut after some hundred more bytes, on a link with little traffic.

    The cut happened long after the faults, when every put must be PUT_OK.
    """
    assert outcome.faults["cut_frame"] == 1


def test_a_member_that_flushed_everything_before_its_master_left_is_elected(outcome: Outcome) -> None:
    """A new member with SYNC_FLUSH has flushed and acknowledged the whole log some time after its last bytes arrived.

    That it had caught up was not recorded, because no more bytes arrived. Its master took it into the set and left, and
    the group had no master from then on: a member that never had the whole log may not be elected.
    """
    assert outcome.term_count > 1


def test_an_operator_who_gives_the_master_a_slaves_log_leaves_no_gap_in_it(outcome: Outcome) -> None:
    """The master's log ends at unrepairable damage; its slave was empty and started far behind that.

    The operator put the slave's segments behind the master's. The next start found the segments between them missing,
    and deleted everything from the slave, including acknowledged messages, because nothing showed that it had been
    flushed.
    """
    assert any("s1's log to" in line and "replaces m's, which is damaged" in line for line in outcome.trace)


def test_a_candidate_publishes_what_it_learns_of_the_group_while_it_stands(outcome: Outcome) -> None:
    """The master hands over, and the service is restored to an earlier state while all members are candidates.

    Before they learned of the handover they had published which record they knew, and did not correct it: one of them
    was elected by the older record.
    """
    assert outcome.faults["service_restored"] == 1


def test_the_service_is_not_restored_while_a_process_ends_after_a_failed_sync(outcome: Outcome) -> None:
    """The simulator took the master for present, which was the only one to know the newest record."""
    assert outcome.faults["sync_error"] == 1
    assert not outcome.faults["service_restored"]


def test_nobody_is_blamed_for_not_knowing_a_record_that_no_member_heard_of(outcome: Outcome) -> None:
    """The set changes, the service goes down before the master learns of it, and is restored to the state before."""
    assert outcome.faults["service_restored"] == 1


def test_a_member_outside_the_set_keeps_what_the_set_lost_until_the_operator_decides(outcome: Outcome) -> None:
    """A connection is reset, so the master is alone in the set; then it loses power, and bytes that the other member
    has.

    That member was down when the master was elected again, so it has more of the log than the group from then on.
    """
    assert any("operator: m2 is emptied" in line for line in outcome.trace)


def test_pages_that_a_power_loss_left_do_not_make_a_node_a_holder(outcome: Outcome) -> None:
    """A slave reports bytes and loses power before the answer arrives at the producer.

    Its disk has the pages of that message by chance, but none of those before it, so its log ends before the message.
    """
    assert outcome.faults["power_in_write"] == 2


def test_a_master_is_elected_once_the_leases_from_before_a_restore_have_ended(outcome: Outcome) -> None:
    """The timer for the end of those leases was rounded down, so the old master seemed to have its key still."""
    assert outcome.term_count > 1


def test_an_incomplete_set_waits_for_a_member_that_restarts_outside_of_it(outcome: Outcome) -> None:
    """A master alone in its set loses its log with the power. The other member has it all, and restarts meanwhile.

    The set had shrunk by a request that was under way when the power was lost: the other member had acknowledged all.
    The master was elected again while the other one was in no view, between its former lease and its next record.
    """
    assert any("epoch=2 master=1" in line for line in outcome.trace)


def test_a_key_that_a_restored_service_still_has_ends_with_its_lease(outcome: Outcome) -> None:
    """The older state has the lease of the master's present key, which the master gives up.

    The checker took it for the holder until all leases from before the restore had ended, as if they had been lost.
    """
    assert outcome.faults["service_restored"] == 1


def test_a_torn_record_at_the_end_of_a_slave_is_copied_again(plan: AnyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slave had flushed the first bytes of a record. Then the record's sectors reached the disk, except for the
    rest of that first one, before it lost the power. Only bodies have a checksum, so it kept the record.

    It reported `diverged`, and an operator had to empty it.
    """
    power_loss = SimDisk.after_power_loss

    def tear(self: SimDisk) -> SimDisk:
        path, begin = records_in(self)[-1]
        flushed, sector = begin + BORN_HOST_AT, -(-begin // SECTOR) * SECTOR
        torn = self.inodes[path]
        is_synced = torn.durable[begin:] == torn.content[begin:]
        if self.name != "s1" or is_synced or not flushed < sector <= begin + BODY_SIZE_AT:
            return power_loss(self)
        for inode in self.inodes.values():
            inode.durable[:] = inode.content
        torn.content[flushed:sector] = bytes(sector - flushed)
        return self.after_kill()

    monkeypatch.setattr(SimDisk, "after_power_loss", tear)
    # The first of these seeds, but another one once timing changes: a sector ends in these fields of every 14th record.
    outcomes = (run(plan, seed=seed) for seed in range(plan.seed, plan.seed + 200))
    assert any("ha.torn_record_removed from=" in line for outcome in outcomes for line in outcome.trace)


def test_a_master_before_a_restore_is_master_no_more_once_another_is_elected(outcome: Outcome) -> None:
    """The older state has the members' leases, but not yet the key of the master, which gives its term up and is
    elected again.

    The checker took it for the master of its old term until all leases from before the restore had ended.
    """
    assert outcome.faults["service_restored"] == 1


def test_a_term_that_no_disk_knows_is_given_again_after_a_restore(outcome: Outcome) -> None:
    """A member with a full disk is elected and killed before it could write the record of its term and serve.

    Then the service is restored from an older state. The newest record on any disk is of the term before, so the next
    master gets the same term.
    """
    assert any("operator puts back GroupRecord(epoch=2" in line for line in outcome.trace)


def test_a_slave_whose_checksums_cover_a_flipped_bit_is_emptied_when_more_of_it_is_damaged(outcome: Outcome) -> None:
    """A bit that no CRC covers flips in a killed slave before its block has a checksum, so the next start makes one of
    the flipped bit. Then the file is truncated.

    The master's bytes are not what was written there, so nothing can repair the slave. Its master closed the connection
    while it waited for the repair, and the operator saw only that, and waited, too.
    """
    assert any("is not what was written here" in line for line in outcome.trace)
    assert any("s1 is emptied" in line for line in outcome.trace)


def test_a_member_does_not_join_without_what_the_set_before_has_acknowledged(outcome: Outcome) -> None:
    """A master alone in its set flushes messages while another member joins: the set alone had acknowledged them.

    They were answered PUT_OK when the flush ended, and the set by then contained the member, which did not have them.
    """
    assert outcome.faults["cut_off"] == 2


def test_an_answer_of_the_service_from_before_its_restore_comes_late(outcome: Outcome) -> None:
    """A member's link is slow. The answer is of a higher revision than all that follow the restore.

    The member took it for the newest state and ignored those, so it stood in an election that was long over.
    """
    assert outcome.faults["service_restored"] == 1


def test_a_part_of_a_record_that_the_set_has_acknowledged_excludes_no_member(outcome: Outcome) -> None:
    """A slave receives part of a record, and acknowledges it. It is elected, and removes that part.

    The former master, which has the whole record, knew that part as confirmed, and refused to follow.
    """
    assert outcome.cut_count


def test_a_member_is_emptied_that_kept_what_the_set_lost_before_any_message(outcome: Outcome) -> None:
    """A member stops, then the whole set loses power, and with it a log that contains no acknowledged message.

    The stopped member has that log, which the set had confirmed, so it asks for the operator. The simulated operator
    acted only if an acknowledged message was lost.
    """
    assert any("operator: m1 is emptied" in line for line in outcome.trace)


def test_a_master_ends_its_term_when_the_service_has_lost_the_group(outcome: Outcome) -> None:
    """The service is restored to a state from before the group's first record while the master changes the set.

    The master assumed that there is a record, and its process ended with an assertion.
    """
    assert outcome.faults["service_restored"] == 1


def test_a_candidate_that_lost_its_lease_waits_for_what_others_know(outcome: Outcome) -> None:
    """It is cut off from the service while another member is elected, and the service is restored to the state before.

    Before it took the master's key it waited for a lease, and got another one. It did not ask again whether the others
    had had the time to publish what they know, and was elected by the older record.
    """
    assert outcome.faults["service_restored"] == 1


def test_a_record_on_a_restored_lease_does_not_show_what_its_member_knows(outcome: Outcome) -> None:
    """A member becomes master and restarts, and the service is restored to the state of the election, with its leases.

    The member's key was attached to the lease of its earlier process, so it could not publish that it knows a newer
    record. The other one, which had just started, saw that all members stand, and was elected after one lease time.
    """
    assert outcome.faults["service_restored"] == 1


def test_a_half_open_connection_has_ended_before_nothing_disturbs_the_cluster(outcome: Outcome) -> None:
    """The slave's machine has forgotten its connection, and neither end has noticed when the faults are over.

    All logs were equal, so the simulator expected PUT_OK, although that slave could not acknowledge anything yet.
    """
    assert outcome.faults["half_open"] == 1


def test_a_master_appends_before_the_end_of_its_recovery_is_recorded(outcome: Outcome) -> None:
    """A master returns from a power loss with a shorter log, and takes a message at once.

    The checker took the end of that message for the end of recovery, and so the slaves' bytes there for wrong ones.
    """
    assert outcome.faults["power_in_write"] == 1


def test_a_node_whose_log_lost_its_end_by_damage_is_no_holder(outcome: Outcome) -> None:
    """A slave is killed, its first segment is cut off, and the answer to a message that it has is still on its way.

    The next start truncates the log before the message, whose pages counted until then.
    """
    assert outcome.faults["truncate_file"] == 1


def test_a_process_that_never_had_the_key_is_no_master_when_it_ends(outcome: Outcome) -> None:
    """A master loses power and starts again while its key has not expired. The new process, which is no master, tells a
    consumer the offsets that it knows, and is killed.

    The checker took the kill for the end of the key's own process, and judged that answer as a master's.
    """
    assert outcome.faults["kill"] == 1


def test_a_sync_that_fails_while_a_master_stops_ends_its_process(outcome: Outcome) -> None:
    """The sync is that of the delivery progress, whose code leaves the failure to the store.

    The store had ended its services by then, and the process ended as if everything had been saved.
    """
    assert outcome.faults["sync_error"] == 1


def test_a_master_that_stops_on_a_full_disk_may_repeat_timer_messages(outcome: Outcome) -> None:
    """The delivery progress can't be saved, which is logged. The checker expected each message once."""
    assert outcome.faults["disk_full"] == 1


def test_a_master_that_stops_on_a_slow_disk_may_repeat_timer_messages(outcome: Outcome) -> None:
    """The delivery progress waits for a sync that takes longer than the broker has for saving when it stops.

    The broker did not log that, and the checker expected each message once.
    """
    assert any("broker.save_timed_out" in line for line in outcome.trace)


def test_a_clock_that_is_set_back_may_repeat_the_timer_messages_since_then(outcome: Outcome) -> None:
    """The delivery progress has the latest due time, which no later message exceeds, and the master stops.

    The checker expected each message once.
    """
    assert outcome.faults["clock"] == 1


def test_a_clock_is_set_back_while_a_due_timer_message_is_delivered(outcome: Outcome) -> None:
    """Its copy gets the store time of the record before it. The checker took that for a delivery before its time."""
    assert outcome.faults["clock"] == 1


def test_clocks_that_are_set_back_delay_timer_messages_by_as_much(outcome: Outcome) -> None:
    """The master's clock is set back three times by a minute. The simulator waited two minutes for what was due."""
    assert outcome.faults["clock"] == 3


def test_timer_messages_are_delivered_before_the_logs_are_compared(outcome: Outcome) -> None:
    """There is no fault, but a message becomes due between the convergence of the logs and their comparison."""
    assert not outcome.faults


def test_a_timer_message_that_is_being_delivered_is_pending(outcome: Outcome) -> None:
    """The master counted only what it had not begun to deliver. The simulator stopped the nodes during a delivery."""
    assert outcome.faults["sync_error"] == 2


def test_an_operator_verifies_a_slaves_log_before_a_master_gets_it(outcome: Outcome) -> None:
    """A bit flips in the topic of a slave's record, which no CRC of the record covers, and the master loses its tail.

    The simulated operator gave that log to the master without its checksums, and the other slave was the one that
    differed.
    """
    assert outcome.faults["flip_bit"] == 1


def test_a_copy_that_is_stored_is_not_made_again_while_no_record_can_be_stored(outcome: Outcome) -> None:
    """A POP message becomes due on a master without the slaves that a record needs, but not its copy.

    The copy was stored, and its removal from the state was undone with the record, so it was copied again each second.
    """
    assert outcome.statuses["IN_SYNC_REPLICAS_NOT_ENOUGH"]


def test_a_connection_to_a_machine_that_lost_power_has_ended_before_the_cluster_is_calm(outcome: Outcome) -> None:
    """A slave has not noticed yet that its master lost power and is back, with a log of the same end.

    All logs were equal, so the simulator expected PUT_OK, although that slave was not connected.
    """
    assert outcome.faults["power"] == 1


def test_a_damaged_timer_message_waits_for_a_slave_that_is_not_known_yet(outcome: Outcome) -> None:
    """A master with a damaged segment restarts, and knows its slave 1.5 s later.

    It gave the damage up at once, as no peer was known, and dropped a due timer message that the slave had.
    """
    assert outcome.faults["flip_bit"] == 1


def test_a_damaged_entry_of_a_queue_does_not_free_its_queue_offset(outcome: Outcome) -> None:
    """A bit flips in the last entry of a consume queue, so that it points far behind the log's end; then a restart.

    Recovery removed it with the entries of records that it was about to dispatch again. The record was an older one, so
    the queue ended before it, and the next message got its queue offset.
    """
    assert outcome.faults["flip_bit"] == 1


def test_a_log_that_was_cut_off_is_not_kept_before_a_slaves(outcome: Outcome) -> None:
    """A master's log is cut off at damage that its slave, which began behind it, can't repair.

    Half a minute later the simulated operator put the slave's log behind what the master had written meanwhile.
    """
    assert sum("replaces m's, which is damaged" in line for line in outcome.trace) == 2


def test_an_operator_may_need_two_looks_for_damage_that_no_slave_can_heal(outcome: Outcome) -> None:
    """The first ends the master's log before the damage, the second empties the slave. Then the time was over."""
    looks = [line for line in outcome.trace if "replaces m's, which is damaged" in line or "s1 is emptied" in line]
    assert len(looks) == 2


def test_a_cluster_has_not_converged_while_its_damage_may_still_be_healed(outcome: Outcome) -> None:
    """A scrub found the damage half a second before all else had converged.

    A late consumer waited until it was hopeless, and the simulator did not wait as long for the consumer.
    """
    assert any("hopeless=True" in line for line in outcome.trace)


def test_a_message_that_a_hidden_flip_moved_to_another_queue_is_lost_to_pop(
    plan: AnyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of a record's queue id flips before the bytes have a checksum; the master restarts.

    The message was in flight. Nothing is in its place, so POP gives it up, as it does with deleted ones. Then the
    operator, who compares the logs, gives the master the slave's. The checker still expected an acknowledgement.
    """

    def find(disk: SimDisk) -> tuple[Path, int]:
        path, at = records_in(disk, TOPIC)[-2]
        return path, at + QUEUE_ID_AT

    flip_at(monkeypatch, find, 4)
    outcome = run(plan)
    assert any("pop.dropped" in line for line in outcome.trace)
    assert any("replaces m's, which is damaged" in line for line in outcome.trace)


def test_members_that_lost_their_first_records_elect_one_of_them(outcome: Outcome) -> None:
    """The first master loses its first records with its power, the second one is killed before the first byte.

    A member of the set whose log had no term was taken for one with a replaced disk, so nobody was ever elected.
    """
    assert any("elected_in_doubt" in line for line in outcome.trace), outcome.trace


def test_a_former_master_does_not_answer_an_older_offset_than_before(outcome: Outcome) -> None:
    """A new master has taken over a commit that waits for the other members, and its lease ends before they have it.

    A request that came while it was master, and was answered after that, got the offset before the commit.
    """
    took_over = [line for line in outcome.trace if "group_log.epoch_began" in line and "ahead=1" in line]
    assert took_over, outcome.trace


def test_a_group_is_given_what_it_popped_before_a_power_loss(outcome: Outcome) -> None:
    """A sync takes seconds, and the power fails. The log loses the records of pops whose offsets are in a file.

    The file was written without waiting for the log, so the messages in flight were skipped.
    """
    assert outcome.faults["power"] == 1


def test_the_queues_of_a_slave_without_records_begin_where_the_next_ones_do(outcome: Outcome) -> None:
    """A slave that has just copied its master's last segment loses all of it with its power, and the master loses more.

    Then the master's queues continue before the places where the slave's had begun: it took what came first for
    messages that had been removed from its queues, and its consumers never got them.
    """
    assert any(" s2 WARNING ha.client_master_behind" in line for line in outcome.trace), outcome.trace


def test_what_a_slave_requests_acknowledges_no_message(outcome: Outcome) -> None:
    """A master loses its tail with its power, and grows past the end of a slave that is away. Messages wait for another
    slave when this one returns, requests the bytes before its end, and finds that its history is another one.

    What it requested was taken for an acknowledgement of messages that it does not have.
    """
    assert any(" s2 WARNING ha.client_diverged" in line for line in outcome.trace), outcome.trace


def test_a_message_whose_queue_offset_a_hidden_flip_changed_is_not_delivered(
    plan: AnyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit flips in the queue offset of a message in the log of an ASYNC_MASTER, before its bytes have a checksum.

    The operator keeps that log, and no node can know the right offset. The checkers still expected it.
    """

    def find(disk: SimDisk) -> tuple[Path, int]:
        path, at = records_in(disk, TOPIC)[-1]
        return path, at + QUEUE_OFFSET_AT + 6

    flip_at(monkeypatch, find, 0x20)
    outcome = run(plan)
    assert any("operator: s1 is emptied" in line for line in outcome.trace)


def test_an_entry_of_the_index_holds_no_more_than_68_years(plan: AnyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A high bit of a store time flips before the bytes have a checksum, and later records continue at that time.

    An entry has an int32 for the seconds since the file's first record; the checker expected the whole difference.
    """

    def find(disk: SimDisk) -> tuple[Path, int]:
        path, at = records_in(disk)[-1]
        return path, at + STORE_TIME_AT + 2

    flip_at(monkeypatch, find, 4)
    run(plan)
    monkeypatch.setattr(derived, "_SECONDS_MAX", 1 << 62)
    found = run_plan(plan).violations
    assert found
    assert all("says 2147483647 s after" in str(each) for each in found)


def test_pop_consumers_on_slow_links_acknowledge_everything_in_the_end(outcome: Outcome) -> None:
    """Without any fault. An acknowledgement takes a tenth of a second, and most messages came again before it.

    Consumers acknowledged one message after the other, and hid those of a pop for 0.3 s and more.
    """
    assert sum("acknowledged" in line for line in outcome.trace) > 1000


def test_logs_that_end_in_the_same_filler_are_compared_before_it(outcome: Outcome) -> None:
    """A master loses its tail with its power, and grows past its slave's end. The slave's log ends in the filler of a
    segment that has one in the master's new log, too, of more bytes than the slave compared.

    It took the master's log for its own, and appended to it.
    """
    assert any(" s1 WARNING ha.client_diverged" in line for line in outcome.trace), outcome.trace


def test_a_log_copied_up_to_damage_leaves_its_slave_to_be_emptied(outcome: Outcome) -> None:
    """A master loses all its log with its power, and its slave's log is damaged in its middle.

    The simulated operator gave the master the slave's log up to the damage, and left the slave waiting for bytes that
    the master, which had gone on from there, did not have.
    """
    assert any("operator: s1 is emptied" in line for line in outcome.trace)


def test_the_slots_of_an_index_are_counted_at_start(plan: AnyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips in the count of used slots in the header of the index file that keys are put into.

    The count was taken from the header, and written with every change.
    """

    def find(disk: SimDisk) -> tuple[Path, int]:
        return max(path for path in disk.inodes if path.parent.name == "index"), SLOT_COUNT_AT

    flip_at(monkeypatch, find, 1)
    assert run(plan).faults["flip_bit"] == 1


def test_a_damaged_size_in_a_queue_hides_no_message(outcome: Outcome) -> None:
    """A bit flips in the size in a queue's last entry that stays when a master starts after a kill.

    By this size the record reached behind the log's end, and later ones were taken for records that have an entry.
    """
    assert any("flip_bit /store/consumequeue/flights/0/" in line for line in outcome.trace)


def test_a_flipped_bit_may_change_a_store_time(plan: AnyPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hits a record before its bytes have a checksum, so no node notices it; the checker expected rising times."""

    def find(disk: SimDisk) -> tuple[Path, int]:
        path, at = records_in(disk, TOPIC)[-1]
        return path, at + STORE_TIME_AT + 6

    flip_at(monkeypatch, find, 0x40)  # 16 s earlier
    assert run(plan).faults["flip_bit"] == 1


def test_a_master_that_is_killed_while_it_starts_has_another_history(outcome: Outcome) -> None:
    """It lost its log with the power, and stored messages before its start was complete, which no checker had seen.

    The checker compared what it stored then with the logs of its slaves.
    """
    assert any("m INFO store.recovered" in line and "max_offset=0 " in line for line in outcome.trace)


def test_a_due_time_that_a_flipped_bit_has_changed_is_not_known(outcome: Outcome) -> None:
    """A bit flips in the properties of a timer message before their block has a checksum; no CRC covers them.

    The checker expected the delivery of a message whose due time could not be read any more.
    """
    assert any("timer.dropped" in line for line in outcome.trace)


def test_a_flipped_bit_may_change_the_store_time_of_a_delivered_timer_message(
    plan: AnyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hits the copy before its bytes have a checksum. The checker took that for a delivery before its time."""

    def find(disk: SimDisk) -> tuple[Path, int]:
        path, at = records_in(disk, TIMED_TOPIC)[-1]
        return path, at + STORE_TIME_AT + 6

    flip_at(monkeypatch, find, 0x80)
    assert run(plan).faults["flip_bit"] == 1


def test_pop_begins_again_where_a_queue_ended_when_its_log_was_replaced(outcome: Outcome) -> None:
    """An operator replaces a damaged log by a slave's, which has records of POP, but no message of their queues.

    The next messages got queue offsets below the next one to pop. The first pop corrected that to the queue's end by
    then, after messages that nobody had got.
    """
    assert any("pop.offset_corrected" in line for line in outcome.trace)


def test_a_master_that_loses_its_role_before_a_snapshot_has_delivered_no_delayed_message(outcome: Outcome) -> None:
    """A master that is cut off delivers a timer message before its group has a complete snapshot of the tables.

    The copy was truncated, but the progress stayed in its tables, so it did not deliver the message in its next term.
    """
    assert any("ha.truncation_started" in line for line in outcome.trace)


def test_a_write_that_fails_as_a_node_opens_leaves_bytes_behind_the_end(outcome: Outcome) -> None:
    """A process is paused while it opens its store. When it resumes, a write to the log fails after a part of it.

    The log is looked at only then, and the checker took the written part for records that recovery had not found.
    """
    assert any("m EIO write 000" in line for line in outcome.trace)


def test_on_a_full_disk_no_checksum_shows_damage(outcome: Outcome) -> None:
    """Zeros hit the end of a record's properties in a master's log while its disk is full, so that it has no checksums.

    The checker expected checksums four seconds after a sync, so the operator did not compare the logs.
    """
    assert any("replaces m's" in line for line in outcome.trace)


def test_a_master_with_a_slaves_log_does_not_keep_its_own_delivery_progress(
    plan: AnyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage takes the end of a master's log, and the operator gives the master a slave's shorter log.

    It kept the progress of timer messages whose delivered copies were lost with the end, so it did not deliver them.
    """
    cut_off, damage = plan.faults[0], plan.faults[-1]

    def lose_end(self: SimDisk, kind: str, folder: str) -> tuple[Path, int, int]:
        assert (kind, folder) == ("zero_range", "")
        since = int((damage.at_s - cut_off.at_s + 0.1) * 1000)
        records = records_in(self)
        times = [stored_at(self, path, at) for path, at in records]
        path, begin = records[next(i for i, time in enumerate(times) if time >= times[-1] - since)]
        for other, inode in self.inodes.items():
            if other.parent == path.parent and other >= path:
                start = begin if other == path else 0
                for held in (inode.content, inode.durable):
                    held[start:] = bytes(len(held) - start)
        self.world.note(f"{self.name} {kind} {path} at {begin}")
        return path, begin, len(self.inodes[path].content)

    monkeypatch.setattr(SimDisk, "damage", lose_end)
    outcome = run(plan)
    assert any("operator: s1's log to" in line for line in outcome.trace)


def test_a_member_that_can_not_read_the_end_of_its_log_is_not_promoted(outcome: Outcome) -> None:
    """A read fails while its broker reads the records of the tables that are not dispatched yet.

    The node ended, and the group had to wait for its lease.
    """
    assert any("member.not_promoted" in line and "the disk can't read it" in line for line in outcome.trace)


def test_a_member_whose_log_can_not_be_read_at_its_promotion_goes_on(outcome: Outcome) -> None:
    """A read fails while its store looks for the last record's end. The node ended."""
    assert any("member.not_promoted" in line and "Input/output error" in line for line in outcome.trace)

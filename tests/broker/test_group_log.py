"""Tables in the log of a failover group: answered changes survive, whatever end of a log is lost."""

import errno
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from ha.broker.group_log import RECORD_BYTES_MAX
from ha.broker.group_state import TablesState
from ha.broker.journal import Logged
from ha.broker.queue_read import QueueRead, ReadStatus
from ha.protocol import java_json
from ha.protocol.bodies import GroupConfig, TopicConfig
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message
from ha.protocol.topic_names import TABLES_TOPIC
from ha.store.commitlog import UNLIMITED
from ha.store.consume_queue import ConsumeQueue
from ha.store.message_store import MessageStore
from tests.broker.group_member import CONFIG, Member, copy_log, cut_copy, open_member
from tests.store.disks import MemoryDisk


def topic(name: str, queue_count: int = 4) -> TopicConfig:
    return TopicConfig(topic_name=name, read_queue_nums=queue_count, write_queue_nums=queue_count)


def record_ends(store: MessageStore) -> list[int]:
    """Ends (bytes) of the records of the tables."""
    queue = store.queues.get(TABLES_TOPIC, 0)
    assert queue is not None
    return [entry.physical_offset + entry.size for entry in queue.read(0, queue.max_offset)]


async def test_slave_has_everything_its_master_answered() -> None:
    async with open_member(MemoryDisk()) as master, open_member(MemoryDisk(), 2) as slave:
        await master.become_master(1)
        assert await master.tables.topics.update(topic("T")) == ""
        assert await master.tables.groups.find_or_create("g") is not None
        for _ in range(10):
            await master.put("T")
        await master.committed("g", "T", 0, 7)
        confirmed = master.end
        await copy_log(master.store, slave.store, confirmed)
        await slave.settled()
        assert slave.tables.topics.get("T") == topic("T")
        assert slave.tables.groups.get("g") == GroupConfig(group_name="g")
        assert slave.tables.offsets.get("g", "T", 0) == 7
        assert slave.state() == master.state()
        assert slave.group_log.is_whole


async def test_change_is_answered_when_its_record_is_in_the_log() -> None:
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        await master.settled()
        before = master.end
        await master.committed("g", "T", 0, 7)
        assert master.end > before
        before = master.end
        await master.committed("g", "T", 0, 7)
        assert master.end == before, "nothing is new"


async def test_topic_created_twice_at_once_is_logged_once() -> None:
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        topics = master.tables.topics
        before = topics.data_version.counter
        made = []

        async def create() -> None:
            made.append(await topics.ensure("T", 4))

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(create)
        assert made == [topic("T"), topic("T")]
        assert topics.data_version.counter == before + 1


async def test_many_commits_become_one_record() -> None:
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        await master.settled()
        before = master.group_log.statistics()
        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(master.committed, f"g{number}", "T", 0, 0)
        answered = master.group_log.statistics()
        assert answered.record_count - before.record_count <= 2
        for offset in range(1, 50):  # nobody waits
            for number in range(1000):
                master.tables.offsets.commit(f"g{number}", "T", 0, offset)
            await trio.sleep(0.002)
        await master.settled()
        assert master.group_log.statistics().record_count - answered.record_count <= 2


async def test_waiters_fail_when_nothing_can_be_stored() -> None:
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        await master.settled()
        master.standing.stop_storing("a planned switch")
        assert "planned switch" in await master.tables.topics.update(topic("T"))
        assert master.tables.topics.get("T") is None
        assert master.tables.offsets.commit("g", "T", 0, 5)
        assert "planned switch" in await master.tables.offsets.logged()
        master.standing.store_again()
        await master.settled()
        await master.committed("h", "T", 0, 1)
        # Offsets are written once that is possible, although the commits failed; refused topics are not.
        state = master.state()
        assert state.offsets == {"T@g": {0: 5}, "T@h": {0: 1}}
        assert "T" not in state.topics


async def test_waiters_fail_when_the_snapshot_of_a_term_cannot_be_stored() -> None:
    """Requests waited until the snapshot could be stored, on a full disk without end."""
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        master.standing.stop_storing("a planned switch")
        with trio.fail_after(1):
            assert "planned switch" in await master.tables.topics.update(topic("T"))
        master.standing.store_again()
        await master.committed("g", "T", 0, 1)
        assert master.group_log.statistics().snapshot_count == 1


async def test_nothing_is_acknowledged_after_the_lease() -> None:
    """A request that relies on a record being written was answered without a look at the lease."""
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        await master.settled()
        journal, answers = master.group_log.journal, []

        def end_lease(logged: Logged) -> None:
            answers.append(logged.status)
            master.standing.extend(trio.current_time())

        async with master.store.log.appends_held():
            assert master.tables.offsets.commit("g", "T", 0, 7)
            journal.call_when_logged(end_lease)
            await trio.testing.wait_all_tasks_blocked()
            journal.call_when_logged(lambda logged: answers.append(logged.status))
        await master.settled()
        assert answers == [PutStatus.PUT_OK, PutStatus.SERVICE_NOT_AVAILABLE]


async def test_stepping_down_drops_changes_that_are_not_in_the_log() -> None:
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        await master.committed("g", "T", 0, 5)
        await master.settled()
        master.tables.offsets.commit("g", "T", 0, 9)  # not written yet
        answers: list[str] = []

        async def change() -> None:
            answers.append(await master.tables.topics.update(topic("T")))

        async with trio.open_nursery() as nursery, master.store.log.appends_held():
            nursery.start_soon(change)
            await trio.testing.wait_all_tasks_blocked()
            master.standing.become_slave(2)
            await trio.testing.wait_all_tasks_blocked()
            assert "no longer, the master" in answers[0]
            assert master.tables.offsets.get("g", "T", 0) == 5
            assert master.tables.topics.get("T") is None


async def test_4771_offset_is_never_ahead_of_a_truncated_log() -> None:
    """apache/rocketmq#4771: consumers commit offsets of messages that only the master has. The next master has a
    shorter log, but has copied these offsets, so that the messages sent to it next are never consumed.

    Here the offset is in the log behind the messages that it counts, and is lost with them.
    """
    disk = MemoryDisk()
    async with open_member(disk) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        assert await old.tables.topics.update(topic("T")) == ""
        for _ in range(5):
            await old.put("T")
        await old.committed("g", "T", 0, 4)
        await old.settled()
        confirmed = old.end
        for _ in range(5):
            await old.put("T")
        await old.committed("g", "T", 0, 10)  # by a master whose replicas are all away
        await old.settled()
        await old.group_log.save()

        await copy_log(old.store, new.store, confirmed)
        await new.become_master(2)
        assert new.tables.offsets.get("g", "T", 0) == 4
        await new.put("T", body=b"sent to the new master")
        await new.settled()
        assert new.tables.offsets.get("g", "T", 0) == 4
        # The old master returns with files that are ahead; its log is truncated to the common part.
        async with open_member(await cut_copy(old.store, confirmed, disk), 1) as back:
            assert back.tables.offsets.get("g", "T", 0) == 4
            await copy_log(new.store, back.store, new.end)
            await back.settled()
            assert back.state() == new.state()


async def test_4771_without_a_snapshot_offsets_are_limited_to_queue_ends() -> None:
    disk = MemoryDisk()
    async with open_member(disk) as old:
        for _ in range(5):
            await old.store.log.put([message("T")])
        await old.settled()
        confirmed = old.end
        await old.become_master(1)
        await old.put("T")
        await old.committed("g", "T", 0, 6)
        await old.settled()
        await old.group_log.save()
        async with open_member(await cut_copy(old.store, confirmed, disk)) as back:
            assert back.tables.offsets.get("g", "T", 0) == 5


async def test_log_is_truncated_while_it_is_read() -> None:
    async with open_member(MemoryDisk()) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        await old.committed("g", "T", 0, 0)
        await old.settled()
        common = old.end
        await copy_log(old.store, new.store, common)
        for number in range(5):
            assert await old.tables.groups.find_or_create(f"lost-{number}") is not None
        await old.settled()
        old.standing.become_slave(2)
        await old.store.truncate(common)
        await new.become_master(2)
        for number in range(7):
            assert await new.tables.groups.find_or_create(f"found-{number}") is not None
        await new.settled()
        await copy_log(new.store, old.store, new.end)
        await old.settled()
        assert old.state() == new.state()
        assert old.group_log.is_whole


async def test_new_master_applies_undispatched_records() -> None:
    async with open_member(MemoryDisk()) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        await old.settled()
        await copy_log(old.store, new.store, old.end)
        await new.settled()
        new.store.log.limit_dispatch(new.end)
        for _ in range(5):
            await old.put("T")
        await old.committed("g", "T", 0, 3)
        assert await old.tables.topics.update(topic("T")) == ""
        await copy_log(old.store, new.store, old.end, dispatch=False)
        assert new.tables.offsets.get("g", "T", 0) is None
        await new.store.become_master()
        await new.become_master(2)
        assert new.tables.offsets.get("g", "T", 0) == 3
        assert new.tables.topics.get("T") == topic("T")
        new.tables.offsets.commit("g", "T", 0, 4)
        await trio.sleep(1)
        async with new.store.log.appends_held():  # the next commit is not in the log yet
            new.tables.offsets.commit("g", "T", 0, 5)
            new.store.log.limit_dispatch(UNLIMITED)
            await trio.sleep(1)
            assert new.tables.offsets.get("g", "T", 0) == 5, "dispatched records are older"
        await new.settled()
        assert new.tables.offsets.get("g", "T", 0) == 5
        assert new.group_log.is_whole


@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_a_former_master_knows_that_it_is_behind(is_cut_off: bool) -> None:
    """What it took over undispatched may be acknowledged; its tables lack that until the next master confirms it, or
    has another log."""
    async with open_member(MemoryDisk()) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        await old.settled()
        common = old.end
        await copy_log(old.store, new.store, common)
        await new.settled()
        new.store.log.limit_dispatch(common)
        await old.committed("g", "T", 0, 0)
        await copy_log(old.store, new.store, old.end, dispatch=False)
        await new.store.become_master()
        await new.become_master(2)
        assert (new.tables.are_behind, new.tables.are_complete) == (False, True)
        new.standing.become_slave(2)
        assert (new.tables.are_behind, new.tables.are_complete) == (True, False)
        if is_cut_off:
            await new.store.truncate(common)
        else:
            new.store.log.limit_dispatch(UNLIMITED)
        await new.settled()
        assert (new.tables.are_behind, new.tables.are_complete) == (False, True)


async def test_a_former_master_whose_record_another_one_replaced_is_not_behind() -> None:
    async with open_member(MemoryDisk()) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        await old.settled()
        await copy_log(old.store, new.store, old.end)
        common = old.end
        await old.committed("g", "T", 0, 0)
        old.standing.become_slave(2)
        await old.store.truncate(common)
        await new.become_master(2)
        await new.settled()
        await copy_log(new.store, old.store, new.end)
        await old.settled()
        assert not old.tables.are_behind


async def test_file_of_another_history_is_ignored() -> None:
    """Both logs have a record of the tables at the same offset; only the epoch differs."""
    disk = MemoryDisk()
    async with open_member(disk) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        await old.settled()
        common = old.end
        await copy_log(old.store, new.store, common)
        old.group_log._want_snapshot()
        await old.settled()
        await old.committed("g", "T", 0, 0)
        await old.committed("g", "T", 1, 0)
        await old.settled()
        await old.group_log.save()
        assert sorted(disk.list_dir(CONFIG))[:2] == ["broker.json", "consumerOffset.json"]
        assert len(disk.list_dir(CONFIG)) == 6
        await new.become_master(2)
        await new.settled()
        await new.committed("h", "T", 0, 0)
        await new.committed("h", "T", 1, 0)
        await new.settled()
        assert record_ends(new.store) == record_ends(old.store)
        async with open_member(await cut_copy(new.store, new.end, disk)) as back:
            assert back.state() == new.state()
            assert back.group_log.is_whole


async def test_nothing_is_acknowledged_before_the_term_begins() -> None:
    async with open_member(MemoryDisk()) as master:
        await master.group_log.begin_epoch(1)
        await trio.sleep(1)
        answered: list[str] = []
        assert master.tables.offsets.commit("g", "T", 0, 0)

        async def again() -> None:
            assert master.tables.offsets.commit("g", "T", 0, 0)
            answered.append(await master.tables.offsets.logged())

        async with trio.open_nursery() as nursery:
            await trio.sleep(1)
            nursery.start_soon(again)
            await trio.sleep(1)
            assert answered == []
            master.standing.become_master(1)
            await master.group_log.write_epoch(1)
        assert answered == [""]
        await master.settled()
        assert record_ends(master.store)


async def test_records_dispatched_during_loading_are_applied() -> None:
    disk = MemoryDisk()
    async with open_member(disk) as old:
        await old.become_master(1)
        await old.settled()
        async with open_member(MemoryDisk(), 2, before_serving=partial(copy_log, old.store, end=old.end)) as slave:
            await slave.settled()
            assert slave.group_log.is_whole


async def test_unreadable_record_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are incomplete then, until the next snapshot."""
    async with open_member(MemoryDisk()) as old, open_member(MemoryDisk(), 2) as slave:
        await old.become_master(1)
        await old.settled()
        await old.committed("g", "T", 0, 0)
        await old.settled()
        read = slave.group_log._reader.read

        async def without_the_second(queue: ConsumeQueue, offset: int, count_max: int = 256) -> QueueRead:
            if offset == 1:
                return QueueRead(ReadStatus.OFFSET_FOUND_NULL, 1, 0, 2)
            return await read(queue, offset, 1)

        monkeypatch.setattr(slave.group_log._reader, "read", without_the_second)
        await copy_log(old.store, slave.store, old.end)
        await trio.sleep(30)
        assert slave.group_log.is_whole
        assert slave.group_log.position.queue_offset == 0
        await trio.sleep(40)
        assert not slave.group_log.is_whole
        assert slave.group_log.position.queue_offset == 1
        old.group_log._want_snapshot()
        await old.settled()
        await copy_log(old.store, slave.store, old.end)
        await slave.settled()
        assert slave.group_log.is_whole
        assert slave.state() == old.state()


async def test_new_master_waits_while_too_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients connect to a new master at once. It ended."""
    async with open_member(MemoryDisk()) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        for _ in range(3):
            await old.put("T")
        await old.committed("g", "T", 0, 3)
        await old.settled()
        read = new.group_log._reader.read
        tries = 0

        async def read_later(queue: ConsumeQueue, offset: int, count_max: int = 256) -> QueueRead:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return await read(queue, offset, count_max)

        monkeypatch.setattr(new.group_log._reader, "read", read_later)
        await copy_log(old.store, new.store, old.end)
        await new.store.become_master()
        await new.become_master(2)
        assert new.group_log.journal.is_open
        assert new.tables.offsets.get("g", "T", 0) == 3


async def test_new_master_waits_for_undispatched_records_while_too_many_files_are_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended."""
    async with open_member(MemoryDisk()) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        await old.settled()
        await copy_log(old.store, new.store, old.end)
        await new.settled()
        new.store.log.limit_dispatch(new.end)
        assert await old.tables.topics.update(topic("T")) == ""
        await copy_log(old.store, new.store, old.end, dispatch=False)
        log = new.store.log
        read, tries = log.read_all, 0

        async def read_later(offset: int, size: int) -> bytes:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return await read(offset, size)

        await new.store.become_master()
        monkeypatch.setattr(log, "read_all", read_later)
        await new.become_master(2)
        assert tries >= 4
        assert new.tables.topics.get("T") == topic("T")


async def test_blank_entries_are_skipped() -> None:
    """They replace entries that a queue lost. A new master waited a minute for each."""
    disk = MemoryDisk()
    async with open_member(disk) as old:
        await old.become_master(1)
        await old.committed("g", "T", 0, 0)
        await old.settled()

    async def lose_entries(store: MessageStore) -> None:
        queue = store.queues.get(TABLES_TOPIC, 0)
        assert queue is not None
        queue.keep_end(queue.max_offset + 3, store.log.max_offset.value)

    async with open_member(disk, before_serving=lose_entries) as member:
        with trio.fail_after(1):
            await member.become_master(2)
        assert member.tables.offsets.get("g", "T", 0) == 0
        assert not member.group_log.is_whole


async def test_files_are_written_after_a_cancelled_attempt() -> None:
    """The save at shutdown took the tables for written."""
    disk = MemoryDisk()
    async with open_member(disk) as member:
        await member.become_master(1)
        assert await member.tables.topics.update(topic("T")) == ""
        await member.committed("g", "T", 0, 0)
        await member.settled()
        with trio.CancelScope() as scope:
            scope.cancel()
            await member.group_log.save()
        await member.group_log.save()
        files = [disk.read_bytes(CONFIG / name) for name in ("topics.json", "consumerOffset.json")]
    assert b'"T":{' in files[0]
    assert b'"T@g":{0:0' in files[1]


async def test_failover_never_moves_an_offset_back() -> None:
    """Ten masters in turn die with an end of the log that no other member has."""
    answered: dict[tuple[str, int], int] = {}
    disk = MemoryDisk()
    async with open_member(disk) as first:
        await first.become_master(1)
        for number in range(40):
            await first.put("T", number % 4)
        await first.settled()
        confirmed = first.end
    for epoch in range(2, 12):
        async with open_member(disk, epoch - 1) as dead:
            disk = await cut_copy(dead.store, confirmed, disk)
        async with open_member(disk, epoch) as master:
            await master.become_master(epoch)
            for (group, queue_id), offset in answered.items():
                assert (master.tables.offsets.get(group, "T", queue_id) or 0) == offset
            for number in range(20):
                place = f"g{number % 5}", number % 4
                offset = min(10, answered.get(place, 0) + 1)
                await master.committed(place[0], "T", place[1], offset)
                answered[place] = offset
            await master.settled()
            confirmed = master.end
            for number in range(5):
                master.tables.offsets.commit(f"g{number}", "T", 0, 10)  # lost with it
            await master.settled()
            await master.group_log.save()
    assert min(answered.values()) == 10


async def test_commit_repeated_at_a_new_master_waits_for_a_record_of_its_term() -> None:
    """The record of the commit may be on this member alone: its former master had no acknowledgement for it."""
    async with open_member(MemoryDisk()) as old, open_member(MemoryDisk(), 2) as new:
        await old.become_master(1)
        await old.put("T")
        await old.committed("g", "T", 0, 1)
        await old.settled()
        await copy_log(old.store, new.store, old.end)
        await new.store.become_master()
        await new.become_master(2)
        await new.settled()
        for is_first in (True, False):
            end = new.end
            await new.committed("g", "T", 0, 1)
            assert (new.end > end) == is_first


async def test_reset_of_an_earlier_term_moves_no_group_that_has_gone_on() -> None:
    """The group was offline at the reset, and consumed at another master before this one leads again."""
    async with open_member(MemoryDisk()) as first, open_member(MemoryDisk(), 2) as second:
        await first.become_master(1)
        for _ in range(10):
            await first.put("T")
        await first.committed("g", "T", 0, 8)
        assert first.tables.offsets.reset("g", "T", 0, 2)
        assert await first.tables.offsets.logged() == ""
        await first.settled()
        await copy_log(first.store, second.store, first.end)
        await second.settled()
        first.standing.become_slave(2)
        await second.store.become_master()
        await second.become_master(2)
        assert second.tables.offsets.get("g", "T", 0) == 2
        await second.committed("g", "T", 0, 9)
        await second.settled()
        await copy_log(second.store, first.store, second.end)
        await first.settled()
        second.standing.become_slave(3)
        await first.store.become_master()
        await first.become_master(3)
        assert first.tables.offsets.take_reset("g", "T", 0) is None
        await first.committed("g", "T", 0, 10)
        assert first.tables.offsets.get("g", "T", 0) == 10


async def test_reset_outlives_a_term_if_the_group_stays_where_it_is() -> None:
    async with open_member(MemoryDisk()) as member:
        await member.become_master(1)
        for _ in range(10):
            await member.put("T")
        assert member.tables.offsets.reset("g", "T", 0, 2)
        assert await member.tables.offsets.logged() == ""
        await member.settled()
        member.standing.become_slave(2)
        await member.become_master(3)
        assert member.tables.offsets.take_reset("g", "T", 0) == 2


async def test_incomplete_snapshot_at_the_end_of_the_log_is_ignored() -> None:
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        for number in range(3000):
            master.tables.offsets.commit(f"group-{number:05}", "SomeTopic", 0, number)
            master.tables.offsets.commit(f"group-{number:05}", "SomeTopic", 1, number)
        await master.put("SomeTopic")
        await master.settled()
        state = master.state()
        first = len(record_ends(master.store))
        master.group_log._want_snapshot()
        await master.settled()
        ends = record_ends(master.store)[first:]
        assert len(ends) > 2
        for number, end in enumerate(ends):
            async with open_member(await cut_copy(master.store, end, None), 2) as other:
                assert other.state() == state, number
                assert other.group_log.is_whole


async def test_ten_thousand_groups() -> None:
    size = 8 << 20
    async with open_member(MemoryDisk(), segment_size=size) as master:
        await master.become_master(1)
        await master.settled()
        before = master.group_log.statistics()
        groups = [GroupConfig(group_name=f"consumer-group-{number:05}") for number in range(10_000)]
        assert await master.tables.groups.update(groups) == ""
        for number in range(10_000):
            for queue_id in range(8):
                master.tables.offsets.commit(f"consumer-group-{number:05}", "orders", queue_id, 1_000_000 + number)
        await master.settled()
        taken = master.group_log.statistics()
        assert taken.written_bytes - before.written_bytes < 16 << 20  # all of it twice, as a snapshot became due
        queue = master.store.queues.get(TABLES_TOPIC, 0)
        assert queue is not None
        assert max(entry.size for entry in queue.read(0, queue.max_offset)) < RECORD_BYTES_MAX + 1024
        disk = await cut_copy(master.store, master.end, None)
        async with open_member(disk, 2, segment_size=size) as other:
            assert other.state() == master.state()
            assert other.group_log.is_whole


async def test_newest_segment_alone_restores_the_tables() -> None:
    disk, size = MemoryDisk(), 256 << 10
    async with open_member(disk, segment_size=size) as master:
        await master.become_master(1)
        await master.committed("idle", "T", 0, 0)
        assert await master.tables.topics.update(topic("T")) == ""
        for number in range(40):
            for _ in range(8):
                await master.put("T", body=b"x" * 4000)
            await master.committed("busy", "T", 0, number)
            await trio.sleep(0.02)
        await master.settled()
        log = master.store.log
        assert len(log.segments) >= 4
        while len(log.segments) > 1:
            await log.delete_first()
        master.store.queues.correct_min(log.min_offset)
        state = master.state()
    assert disk.list_dir(CONFIG) == ["broker.json"]
    async with open_member(disk, segment_size=size) as again:
        assert again.group_log.is_whole
        assert again.state() == state


async def test_group_starts_from_files_written_before_it() -> None:
    disk = MemoryDisk()
    file = CONFIG / "consumerOffset.json"
    disk.write_bytes(file, b'{"offsetTable":{"T@g":{0:3}}}')
    async with open_member(disk) as master:
        for _ in range(5):
            await master.store.log.put([message("T")])
        await master.settled()
        await master.become_master(1)
        assert master.tables.offsets.get("g", "T", 0) == 3
        await master.settled()
        assert master.group_log.is_whole
        await master.committed("g", "T", 0, 4)
        await master.settled()
        killed = disk.kill()
        await master.group_log.save()
    for left in (disk, killed):
        async with open_member(left) as again:
            assert again.tables.offsets.get("g", "T", 0) == 4
    # The broker runs without its group for a while.
    disk.write_bytes(file, b'{"offsetTable":{"T@g":{0:5}}}')
    for _ in range(2):
        async with open_member(disk) as again:
            assert again.tables.offsets.get("g", "T", 0) == 5
            assert not again.group_log.is_whole
    async with open_member(disk) as again:
        await again.become_master(2)
        await again.settled()
    async with open_member(disk) as again:
        assert again.group_log.is_whole
        assert again.tables.offsets.get("g", "T", 0) == 5


async def test_messages_deleted_outside_the_group_stay_deleted() -> None:
    """The next start forgot the deletion, so every member that built its queues later had the messages again."""
    disk = MemoryDisk()
    async with open_member(disk) as master:
        await master.become_master(1)
        await master.put("T")
        await master.settled()
        await master.group_log.save()
        outside = master.tables.topics.snapshot()
    outside.deleted_topics = {"T": 1 << 20}
    outside.data_version = outside.data_version.next(1)
    disk.write_bytes(CONFIG / "topics.json", java_json.dumps(outside))
    async with open_member(disk) as again:
        assert again.tables.topics.deleted == {"T": 1 << 20}
        assert again.tables.topics.data_version == outside.data_version


async def test_a_change_of_which_a_part_is_stored_is_undone_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first record waited in vain, the second was refused: its topic was in use, but not in the log."""
    monkeypatch.setattr("ha.broker.group_log.RECORD_BYTES_MAX", 1500)
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        await master.settled()
        outcomes = [PutStatus.FLUSH_SLAVE_TIMEOUT, PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH]
        settle = master.puts.settle

        async def fail(puts: list[Any]) -> None:
            await settle(puts[:1])
            if len(puts) > 1:
                for put, status in zip(puts, outcomes, strict=True):
                    put.status = status

        monkeypatch.setattr(master.puts, "settle", fail)
        faults: list[str] = []

        async def create(name: str) -> None:
            faults.append(await master.tables.topics.update(topic(name)))

        async with trio.open_nursery() as nursery:
            for letter in "ab":
                nursery.start_soon(create, letter * 100)
        assert all("IN_SYNC_REPLICAS_NOT_ENOUGH" in fault for fault in faults)
        await trio.sleep(2)  # until the snapshot is written
        assert not {"a" * 100, "b" * 100} & master.tables.topics.table.keys()
        end = master.end
        async with open_member(MemoryDisk(), 2) as slave:
            await copy_log(master.store, slave.store, end)
            await slave.settled()
            assert slave.state() == master.state()


async def test_removal_that_was_not_stored_does_not_remove_newer_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One write has two records: the first one, with the removal, is not stored, and the second one is."""
    monkeypatch.setattr("ha.broker.group_log.RECORD_BYTES_MAX", 1500)
    async with open_member(MemoryDisk()) as master, open_member(MemoryDisk(), 2) as slave:
        await master.become_master(1)
        groups = [letter * 100 for letter in "abcdef"]
        for group in groups:
            await master.committed(group, "T", 0, 7)
        await master.settled()
        settle = master.puts.settle

        async def fail_the_first(puts: list[Any]) -> None:
            monkeypatch.setattr(master.puts, "settle", settle)
            puts[0].status = PutStatus.SERVICE_NOT_AVAILABLE
            await settle(puts[1:])

        monkeypatch.setattr(master.puts, "settle", fail_the_first)
        for group in groups:
            master.tables.offsets.remove(group=group)
        master.tables.offsets.commit(groups[0], "T", 0, 3)
        await trio.sleep(2)  # until everything is written
        await copy_log(master.store, slave.store, master.end)
        await slave.settled()
        assert slave.state().offsets == {f"T@{groups[0]}": {0: 3}}


async def test_record_of_a_later_version_is_skipped() -> None:
    async with open_member(MemoryDisk()) as master:
        await master.become_master(1)
        await master.committed("g", "T", 0, 0)
        await master.settled()
        assert master.group_log.is_whole
        await master.store.log.put([message(TABLES_TOPIC, b'{"version":2,"epoch":1,"other":true}')])
        await master.store.log.put([message(TABLES_TOPIC, b"no JSON at all")])
        await master.settled()
        assert not master.group_log.is_whole
        master.group_log._want_snapshot()
        await master.settled()
        assert master.group_log.is_whole


async def test_record_with_a_wrong_body_crc_is_skipped() -> None:
    """It was corrupted on the way to the slave, whose tables are incomplete then, until the next snapshot."""
    async with open_member(MemoryDisk()) as master, open_member(MemoryDisk(), 2) as slave:
        await master.become_master(1)
        await master.settled()
        before = master.end
        await master.committed("g", "T", 0, 7)
        await copy_log(master.store, slave.store, before)
        await slave.settled()
        assert slave.group_log.is_whole
        raw = bytearray(await master.store.log.read(before, master.end - before))
        raw[raw.index(b"T@g")] ^= 1
        await slave.store.log.append_raw(before, bytes(raw))
        await slave.settled()
        assert not slave.group_log.is_whole
        assert slave.group_log.position.queue_offset == master.group_log.position.queue_offset
        assert slave.tables.offsets.table == {}
        master.group_log._want_snapshot()
        await master.settled()
        await copy_log(master.store, slave.store, master.end)
        await slave.settled()
        assert slave.group_log.is_whole
        assert slave.state() == master.state()


async def test_delayed_messages_continue_at_the_logged_offset() -> None:
    async with open_member(MemoryDisk()) as master, open_member(MemoryDisk(), 2) as slave:
        await master.become_master(1)
        master.tables.delay_offsets.set(3, 5)
        await master.settled()
        await copy_log(master.store, slave.store, master.end)
        await slave.settled()
        assert slave.tables.delay_offsets.get(3) == 5


async def test_messages_of_a_deleted_topic_leave_every_member() -> None:
    async with open_member(MemoryDisk()) as master, open_member(MemoryDisk(), 2) as slave:
        await master.become_master(1)
        assert await master.tables.topics.update(topic("T", 1)) == ""
        await master.put("T")
        await master.settled()
        before = master.end
        await master.put("T")
        assert await master.tables.topics.delete_messages(["T"], before) == ""
        await master.settled()
        await copy_log(master.store, slave.store, master.end)
        await slave.settled()
        for member in (master, slave):
            assert member.tables.topics.deleted == {"T": before}
            queue = member.store.queues.get("T", 0)
            assert queue is not None
            assert (queue.min_offset, queue.max_offset) == (1, 2)


def message(topic: str, body: bytes = b"message") -> Message:
    return Message(topic, 0, body)


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 9)),
        st.tuples(st.just("topic"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("delete topic"), st.integers(0, 2)),
        st.tuples(st.just("group"), st.integers(0, 2)),
        st.tuples(st.just("delete group"), st.integers(0, 2)),
        st.tuples(st.just("forget"), st.integers(0, 2)),
        st.tuples(st.just("delay"), st.integers(1, 3), st.integers(0, 9)),
        st.just(("snapshot",)),
        st.just(("epoch",)),
        st.just(("save",)),
        st.just(("pause",)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(changes=CHANGES, cut=st.integers(0, 1000), files=st.integers(0, 1000))
def test_tables_equal_any_remaining_part_of_the_log(changes: list[tuple[Any, ...]], cut: int, files: int) -> None:
    """Random changes; the log ends at any of its records, and the files are of any time: the tables are what the log
    said then."""

    trio.run(tables_of_any_prefix, changes, cut, files, clock=MockClock(autojump_threshold=0))


async def tables_of_any_prefix(changes: list[tuple[Any, ...]], cut: int, files: int) -> None:
    disk = MemoryDisk()
    async with open_member(disk) as master:
        known: list[tuple[int, TablesState]] = []
        saved: list[MemoryDisk | None] = [None]
        epoch = 1
        await master.become_master(epoch)
        await master.settled()
        known.append((master.end, master.state()))
        for change in (*changes, ("pause",)):
            match change:
                case ("epoch",):
                    await master.settled()
                    known.append((master.end, master.state()))
                    epoch += 1
                    master.standing.become_slave(epoch)
                    await master.become_master(epoch)
                case ("save",):
                    await master.group_log.save()
                    saved.append(disk.kill())
                case _:
                    await make(master, change)
            if change[0] not in ("commit", "forget"):  # which go with what comes next
                await master.settled()
                known.append((master.end, master.state()))
        ends = record_ends(master.store)
        end = ends[cut % len(ends)]
        # Between two of them is one record with all changes, or a snapshot that contains them.
        possible = [[state for at, state in known if at <= end][-1]]
        if end not in [at for at, _ in known]:
            possible += [state for at, state in known if at > end][:1]
        left = await cut_copy(master.store, end, saved[files % len(saved)])
        async with open_member(left, 2) as other:
            expected = other.state()
            assert expected in possible
            assert other.group_log.is_whole
            await other.group_log.save()
        async with open_member(left, 2) as again:
            assert again.state() == expected
            await copy_log(master.store, again.store, master.end)
            await again.settled()
            assert again.state() == master.state()


async def make(master: Member, change: tuple[Any, ...]) -> None:
    tables = master.tables
    match change:
        case ("commit", group, queue_id, offset):
            tables.offsets.commit(f"g{group}", "T", queue_id, offset)
        case ("topic", number, queue_count):
            assert await tables.topics.update(topic(f"T{number}", queue_count)) == ""
        case ("delete topic", number):
            assert await tables.topics.delete(f"T{number}") == ""
        case ("group", number):
            assert await tables.groups.find_or_create(f"g{number}") is not None
        case ("delete group", number):
            assert await tables.groups.delete(f"g{number}") == ""
        case ("forget", number):
            tables.offsets.remove(group=f"g{number}")
        case ("delay", level, offset):
            tables.delay_offsets.set(level, offset)
        case ("snapshot",):
            master.group_log._want_snapshot()

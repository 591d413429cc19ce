"""The journal of a failover group: collecting changes, calling waiters, and adding unstored changes again."""

from ha.broker.group_state import Replica, TablesState, TablesView, pack, snapshot_parts
from ha.broker.journal import ACKNOWLEDGED, NO_MASTER, Journal, Logged
from ha.protocol.access_bodies import UserConfig
from ha.protocol.bodies import DataVersion, GroupConfig, LogPosition, TopicConfig
from ha.protocol.codes import PutStatus
from ha.protocol.group_records import SnapshotPart, TablesRecord, encode_tables_record

REFUSED = Logged(PutStatus.SERVICE_NOT_AVAILABLE, "full")
TIMED_OUT = Logged(PutStatus.FLUSH_SLAVE_TIMEOUT, "slow")


def opened(*, acknowledges: bool = True) -> Journal:
    journal = Journal(lambda epoch: acknowledges)
    journal.open(1)
    journal.settle(1, ACKNOWLEDGED)
    return journal


def test_closed_journal_collects_and_acknowledges_nothing() -> None:
    journal = Journal(lambda epoch: True)
    journal.offset("T@g", 0, 5)
    told: list[Logged] = []
    journal.call_when_logged(told.append)
    assert told == [NO_MASTER]
    journal.open(1)
    assert journal.take(10_000) == []


def test_several_commits_of_a_queue_become_one() -> None:
    journal = opened()
    for offset in range(10):
        journal.offset("T@g", 0, offset)
    assert journal.take(10_000) == [TablesRecord(epoch=1, offsets={"T@g": {0: 9}})]


def test_waiters_are_called_after_all_earlier_changes() -> None:
    journal, told = opened(), []
    journal.call_when_logged(lambda logged: told.append(("at once", logged)))
    journal.offset("T@g", 0, 5)
    journal.call_when_logged(lambda logged: told.append(("first", logged)))
    journal.take(10_000)
    journal.call_when_logged(lambda logged: told.append(("nothing new, but that is not acknowledged", logged)))
    assert told == [("at once", ACKNOWLEDGED)]
    journal.settle(1, TIMED_OUT)
    assert told[1:] == [("first", TIMED_OUT)]
    # A later acknowledgement covers everything before it.
    assert journal.take(10_000) == [TablesRecord(epoch=1)]
    journal.settle(1, ACKNOWLEDGED)
    assert told[2:] == [("nothing new, but that is not acknowledged", ACKNOWLEDGED)]


def test_changes_that_no_request_waits_for_are_not_acknowledged_while_they_are_written() -> None:
    journal = opened()
    journal.offset("T@g", 0, 5)  # a oneway commit
    journal.take(10_000)
    told: list[Logged] = []
    journal.call_when_logged(told.append)  # a commit of the same offset
    assert told == []
    journal.settle(1, TIMED_OUT)
    assert journal.take(10_000) == [TablesRecord(epoch=1)]
    journal.settle(1, ACKNOWLEDGED)
    assert told == [ACKNOWLEDGED]


def test_a_term_begins_with_changes_that_may_not_be_acknowledged() -> None:
    journal = Journal(lambda epoch: True)
    journal.open(1)
    told: list[Logged] = []
    assert journal.take(10_000) == []
    journal.call_when_logged(told.append)
    assert told == []
    assert journal.take(10_000) == [TablesRecord(epoch=1)]
    journal.settle(1, ACKNOWLEDGED)
    assert told == [ACKNOWLEDGED]
    journal.call_when_logged(told.append)
    assert told == [ACKNOWLEDGED] * 2


def test_nothing_is_acknowledged_after_the_lease() -> None:
    told: list[Logged] = []
    opened(acknowledges=False).call_when_logged(told.append)
    assert told == [NO_MASTER]


def test_unstored_changes_are_added_again_unless_replaced() -> None:
    journal = opened()
    journal.offset("T@g", 0, 5)
    journal.offset("T@g", 1, 5)
    journal.offset("T@gone", 0, 5)
    journal.offsets_removed("T@back")
    journal.offset("T@back", 2, 2)
    journal.delay(1, 7)
    journal.topic("T", TopicConfig(topic_name="T"), DataVersion(counter=1))
    records = journal.take(10_000)
    journal.offset("T@g", 1, 6)
    journal.offsets_removed("T@gone")
    journal.delay(2, 8)
    journal.settle(1, REFUSED, records)
    # Not the topic: its request has failed.
    [again] = journal.take(10_000)
    assert again.offsets == {"T@g": {0: 5, 1: 6}, "T@back": {2: 2}}
    assert sorted(again.removed_offsets) == ["T@back", "T@gone"]
    assert again.delays == {1: 7, 2: 8}
    assert again.topics == {}


def test_offset_removed_in_one_record_and_set_in_the_next() -> None:
    journal = opened()
    older = [TablesRecord(epoch=1, removed_offsets=["T@g"]), TablesRecord(epoch=1, offsets={"T@g": {0: 1}})]
    journal.settle(1, REFUSED, older)
    [again] = journal.take(10_000)
    assert (again.removed_offsets, again.offsets) == (["T@g"], {"T@g": {0: 1}})


def test_outcome_of_another_term_is_ignored() -> None:
    journal = opened()
    journal.offset("T@g", 0, 5)
    told: list[Logged] = []
    journal.call_when_logged(told.append)
    records = journal.take(10_000)
    journal.close()
    assert told == [NO_MASTER]
    journal.open(2)
    journal.settle(1, REFUSED, records)
    assert journal.take(10_000) == []


def view(state: TablesState) -> TablesView:
    return TablesView(
        state.topics,
        state.deleted_topics,
        state.groups,
        state.offsets,
        state.delays,
        state.users,
        state.topics_version,
        state.groups_version,
        state.users_version,
    )


def some_tables() -> TablesState:
    return TablesState(
        topics={f"T{number}": TopicConfig(topic_name=f"T{number}") for number in range(50)},
        deleted_topics={f"D{number}": 1 << 40 for number in range(300)},
        groups={f"g{number}": GroupConfig(group_name=f"g{number}") for number in range(50)},
        offsets={f"T{number}@g": {queue: queue for queue in range(600)} for number in range(5)},
        delays={1: 3},
        users={f"u{number}": UserConfig(username=f"u{number}", password="p" * 100) for number in range(50)},
        topics_version=DataVersion(counter=7),
        groups_version=DataVersion(counter=8),
        users_version=DataVersion(counter=9),
    )


def test_records_are_bounded() -> None:
    state = some_tables()
    records = list(pack(view(state), 4, 20_000))
    assert len(records) > 3
    assert max(len(encode_tables_record(record)) for record in records) <= 20_000
    again = TablesState()
    for record in records:
        assert record.epoch == 4
        again.apply(record)
    assert again == state


def test_snapshot_parts_have_the_current_values() -> None:
    """A change between two parts is in a separate record, or in a later part."""
    state = some_tables()
    state.groups_version = DataVersion(counter=9)
    replica = Replica(TablesState(offsets={"old@g": {0: 1}}, groups={"old": GroupConfig(group_name="old")}))
    for number, part in enumerate(snapshot_parts(view(state), 4, 20_000)):
        replica.take(part, LogPosition(queue_offset=number))
        for change in (
            TablesRecord(epoch=4, offsets={f"T{number % 5}@g": {3: 1000 + number}}),
            TablesRecord(epoch=4, removed_offsets=[f"T{(number + 1) % 5}@g"]),
            TablesRecord(epoch=4, groups={f"g{7 * number % 50}": None, f"new{number}": GroupConfig(group_name="n")}),
        ):
            if part.snapshot is None or part.snapshot.is_last:
                break
            state.apply(change)
            replica.take(change, LogPosition(queue_offset=number))
    assert replica.is_whole
    assert replica.state == state


def test_snapshot_with_a_missing_part_is_ignored() -> None:
    parts = list(snapshot_parts(view(some_tables()), 4, 20_000))
    for missing in range(len(parts)):
        replica = Replica(TablesState())
        for number, part in enumerate(parts):
            if number != missing:
                replica.take(part, LogPosition(queue_offset=number))
        assert not replica.is_whole
    replica = Replica(TablesState())
    for part in parts[:-1]:
        replica.take(part, LogPosition())
    replica.take(TablesRecord(epoch=5, delays={1: 4}), LogPosition())  # of the next master
    parts[-1].snapshot = SnapshotPart(len(parts) - 1, True)
    replica.take(parts[-1], LogPosition())
    assert not replica.is_whole

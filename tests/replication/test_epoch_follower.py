"""A member that follows a master: which one, from where, what it truncates, and when it acknowledges."""

import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ha.errors import DiskFull
from ha.protocol.auto_switch_frame import EpochFrameHeader, EpochReport, MasterHandshake, SlaveHandshake
from ha.protocol.epoch_file import EpochEntry
from ha.replication.epoch_follower import TO_FOLLOW
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.statistics import Condition, HAClientState
from ha.store.commitlog import UNLIMITED
from tests.replication.members import SLAVE, MasterOfMembers, Member, leading
from tests.replication.memory_log import records

WHOLE = HAOptions(start_from="first", overlap_bytes_max=0)
BYTES = bytes(range(256)) * 40


@asynccontextmanager
async def following(
    member: Member, options: HAOptions = WHOLE, *, is_learner: bool = False
) -> AsyncIterator[tuple[HAClient, MasterOfMembers]]:
    """A running client and its scripted master."""
    async with trio.open_nursery() as nursery:
        master = MasterOfMembers(nursery)
        client = HAClient(
            member.log, options, master.connect, member=member, broker_id=SLAVE, run_id=77, is_learner=is_learner
        )
        nursery.start_soon(client.run)
        client.set_master("10.0.0.1:10912")
        await wait_all_tasks_blocked()
        yield client, master
        nursery.cancel_scope.cancel()


async def test_run_id_is_sent_only_to_masters_that_read_it() -> None:
    async with following(await Member(BYTES).begin((1, 0))) as (client, master):
        for reads in (False, True, False):
            client.set_master(None)
            client.set_master("10.0.0.1:10912", reads_run_ids=reads)
            await trio.sleep(10)
        told = [message.run_id for _, message, _ in master.said if isinstance(message, SlaveHandshake)]
        assert told[-3:] == [0, 77, 0]


def condition_of(client: HAClient) -> Condition:
    return client.statistics().condition


# The greeting


@pytest.mark.parametrize(("start_from", "from_last"), [("first", False), ("last", True)])
@pytest.mark.parametrize("is_learner", [False, True])
async def test_nothing_but_the_handshake_is_sent_before_the_answer(
    start_from: str, from_last: bool, is_learner: bool
) -> None:
    options = msgspec.structs.replace(WHOLE, start_from=start_from)
    async with following(await Member(BYTES).begin((1, 0)), options, is_learner=is_learner) as (_, master):
        await trio.sleep(19)
        assert master.said == [(0.0, SlaveHandshake(SLAVE, from_last, is_learner), 0)]
        await master.answer(len(BYTES), (1, 0))
        assert master.said[1:] == [(19.0, EpochReport(len(BYTES)), 0)]


async def test_a_master_that_does_not_answer_is_disconnected() -> None:
    async with following(Member()) as (client, master):
        await trio.sleep(20.002)
        assert condition_of(client) is Condition.HOUSEKEEPING_TIMEOUT
        assert master.closed_at == [20.001]


async def test_heartbeats_follow_the_request() -> None:
    async with following(await Member(bytes(433)).begin((1, 0))) as (_, master):
        await master.answer(433, (1, 0))
        await trio.sleep(11)
        assert master.said[1:] == [(at, EpochReport(433), 0) for at in (0.0, 5.001, 10.002)]


async def test_a_frame_before_the_request_is_malformed() -> None:
    async with following(Member()) as (client, master):
        await master.frame(0, b"x", 1, 0)
        assert condition_of(client) is Condition.MALFORMED_FRAME


async def test_a_second_handshake_is_malformed() -> None:
    async with following(Member()) as (client, master):
        await master.answer(0, (1, 0))
        await master.answer(0, (1, 0))
        assert condition_of(client) is Condition.MALFORMED_FRAME


# Appending and confirming


async def test_terms_are_recorded_before_their_bytes() -> None:
    """A frame of a 5.3.3 master that ends with its epoch carries the next one."""
    member = Member()
    async with following(member) as (client, master):
        await master.answer(2456, (1, 0), (3, 1535))
        assert member.history == [(1, 0)]
        await master.frame(0, BYTES[:1535], 3, 1535)
        assert member.history == [(1, 0)]
        histories = []

        async def note() -> None:
            histories.append(list(member.history))

        member.log.before_append = note
        await master.frame(1535, BYTES[1535:2456], 3, 1535)
        assert histories == [[(1, 0), (3, 1535)]]
        assert master.reports == [0, 1535, 2456]
        assert member.log.content == BYTES[:2456]
        assert condition_of(client) is Condition.CONNECTED


async def test_confirmed_up_to_the_frames_offset_and_the_logs_end() -> None:
    member = await Member(bytes(100)).begin((1, 0))
    async with following(member) as (_, master):
        await master.answer(200, (1, 0))
        assert member.log.dispatch_limit.value == UNLIMITED
        await master.frame(100, b"", 1, 0, confirm=50)
        assert member.log.dispatch_limit.value == 50
        await master.frame(100, bytes(60), 1, 0, confirm=200)
        assert member.log.dispatch_limit.value == 160
        await master.frame(160, bytes(60), 1, 0, confirm=190)
        assert member.log.dispatch_limit.value == 200
        await master.frame(220, b"", 1, 0, confirm=90)
        assert member.log.dispatch_limit.value == 200


async def test_a_heartbeat_at_offset_minus_one_is_accepted() -> None:
    member = Member()
    async with following(member) as (client, master):
        await master.answer(0, (1, 0))
        await master.frame(-1, b"", 1, 0)
        assert condition_of(client) is Condition.CONNECTED
        await master.frame(0, b"abc", 1, 0)
        assert master.reports == [0, 3]


async def test_a_frame_of_a_term_after_the_handshakes_is_refused() -> None:
    member = await Member(bytes(100)).begin((1, 0))
    async with following(member) as (client, master):
        await master.answer(100, (1, 0))
        await master.frame(100, b"abc", 2, 100)
        assert condition_of(client) is Condition.MALFORMED_FRAME
        assert len(member.log.content) == 100


async def test_a_member_compares_the_end_of_its_log() -> None:
    content = records(100, body_sizes=(9, 9))
    member = await Member(content).begin((1, 0))
    async with following(member, HAOptions(start_from="first", overlap_bytes_max=10)) as (client, master):
        await master.answer(100, (1, 0))
        assert master.reports == [1]  # no head of a record begins later
        await master.streams[-1].send_all(EpochFrameHeader(1, 99, 1, 0, 100).encode() + content[1:-1])
        await wait_all_tasks_blocked()
        assert member.log.dispatch_limit.value == UNLIMITED  # nothing is known to be the master's yet
        await master.streams[-1].send_all(b"x")
        await wait_all_tasks_blocked()
        assert condition_of(client) is Condition.DIVERGED
        assert member.log.dispatch_limit.value == UNLIMITED


# What is cut off


@pytest.mark.parametrize(
    ("own_history", "own_end", "master_history", "master_end", "cut", "history"),
    [
        # The same, and one that is behind
        ([(1, 0)], 1000, [(1, 0)], 1000, None, [(1, 0)]),
        ([(1, 0)], 800, [(1, 0)], 1000, None, [(1, 0)]),
        # A new term: in the history here before its first byte
        ([(1, 0)], 1000, [(1, 0), (2, 1000)], 1500, None, [(1, 0), (2, 1000)]),
        ([(1, 0)], 900, [(1, 0), (2, 1000)], 1500, None, [(1, 0)]),
        # Bytes of a master that no member followed
        ([(1, 0)], 1200, [(1, 0), (2, 1000)], 1500, 1000, [(1, 0), (2, 1000)]),
        ([(1, 0), (2, 1000)], 1200, [(1, 0), (3, 1000)], 1500, 1000, [(1, 0), (3, 1000)]),
        ([(1, 0), (2, 1000)], 1200, [(1, 0), (3, 1100)], 1500, 1000, [(1, 0)]),
        ([(1, 0), (2, 1000)], 1200, [(1, 0), (2, 1000), (4, 1100)], 1100, 1100, [(1, 0), (2, 1000), (4, 1100)]),
        # The master lost its tail, or had less when it was elected
        ([(1, 0)], 1200, [(1, 0)], 1000, 1000, [(1, 0)]),
        # Terms without bytes
        ([(1, 0), (2, 1000)], 1000, [(1, 0), (3, 1000)], 1000, None, [(1, 0), (3, 1000)]),
        ([(1, 0), (2, 1000)], 1000, [(1, 0), (3, 1200)], 1300, None, [(1, 0)]),
        ([(1, 0)], 1000, [(1, 0), (2, 1000), (3, 1000)], 1000, None, [(1, 0), (3, 1000)]),
        # A log from before there was a history
        ([], 1000, [(1, 500), (2, 1500)], 2000, None, [(1, 500)]),
        ([], 1000, [(1, 1000)], 1000, None, [(1, 1000)]),
    ],
)
async def test_the_log_is_truncated_to_the_masters(
    own_history: list[tuple[int, int]],
    own_end: int,
    master_history: list[tuple[int, int]],
    master_end: int,
    cut: int | None,
    history: list[tuple[int, int]],
) -> None:
    member = await Member(BYTES[:own_end]).begin(*own_history)
    async with following(member) as (client, master):
        await master.answer(master_end, *master_history)
        end = own_end if cut is None else cut
        assert member.cuts == ([] if cut is None else [cut])
        assert member.history == history
        assert master.reports == [end]
        assert condition_of(client) is not Condition.STALE_MASTER


async def test_no_request_is_sent_before_truncation() -> None:
    member = await Member(BYTES[:1200]).begin((1, 0))
    async with following(member) as (_, master):
        cutting = trio.Event()
        cut = member.truncate

        async def slowly(offset: int) -> None:
            await cutting.wait()
            await cut(offset)

        member.truncate = slowly  # type: ignore[method-assign]
        await master.answer(1500, (1, 0), (2, 1000))
        await trio.sleep(1)
        assert master.reports == []
        cutting.set()
        await wait_all_tasks_blocked()
        assert master.reports == [1000]


async def test_confirmed_bytes_are_never_truncated(caplog: pytest.LogCaptureFixture) -> None:
    member = await Member(BYTES[:1200]).begin((1, 0))
    member.log.limit_dispatch(1001)
    with caplog.at_level(logging.WARNING):
        async with following(member) as (client, master):
            for connection in range(3):
                await master.answer(1500, (1, 0), (2, 1000))
                assert condition_of(client) is Condition.CONFIRMED_DIVERGED
                assert len(master.streams) == connection + 1
                await trio.sleep(5.001)
            assert master.reports == []
            assert member.cuts == []
            assert "the log here is confirmed up to 1001" in client.statistics().detail
    assert caplog.text.count("ha.client_confirmed_diverged") == 1


async def test_a_part_of_a_record_is_truncated_although_it_is_confirmed() -> None:
    """The new master had received only that part of the record, acknowledged it, and removed it when it was elected."""
    member = await Member(BYTES[:1200]).begin((1, 0))
    member.record_size = 100
    member.log.limit_dispatch(1099)
    async with following(member) as (_, master):
        await master.answer(1500, (1, 0), (2, 1000))
        assert (member.cuts, master.reports) == ([1000], [1000])
        assert member.log.dispatch_limit.value == 1000, "the next master's record there may be shorter"


@pytest.mark.parametrize("record_size", [99, 0])
async def test_a_confirmed_or_damaged_record_is_not_truncated(record_size: int) -> None:
    member = await Member(BYTES[:1200]).begin((1, 0))
    member.record_size = record_size
    member.log.limit_dispatch(1099)
    async with following(member) as (client, master):
        await master.answer(1500, (1, 0), (2, 1000))
        assert condition_of(client) is Condition.CONFIRMED_DIVERGED
        assert member.cuts == []


async def test_bytes_confirmed_before_the_truncation_point_stay_confirmed() -> None:
    member = await Member(BYTES[:1200]).begin((1, 0))
    member.log.limit_dispatch(1000)
    async with following(member) as (_, master):
        await master.answer(1500, (1, 0), (2, 1000))
        assert (member.cuts, master.reports) == ([1000], [1000])


@pytest.mark.parametrize("begin", [0, 8192])
async def test_a_term_without_bytes_excludes_no_member(begin: int) -> None:
    """A member that was elected before the group's first message, and lost its lease before it wrote one: its segment
    is there, and its term is only in its own history."""
    member = await Member(first_offset=begin).begin((1, begin))
    assert (member.log.min_offset, member.log.max_offset.value) == (begin, begin)
    async with following(member) as (client, master):
        await master.answer(begin, (2, begin))
        await master.frame(begin, b"first", 2, begin)
        assert condition_of(client) is Condition.CONNECTED
        assert member.history == [(2, begin)]
        assert member.log.content == b"first"
        assert member.cuts == []


async def test_without_a_common_term_nothing_is_truncated() -> None:
    member = await Member(BYTES[:1200]).begin((1, 100))
    async with following(member) as (client, master):
        await master.answer(1500, (2, 0))
        assert condition_of(client) is Condition.NO_COMMON_EPOCH
        assert client.statistics().detail == f"terms here: 1 from 100; of the master: 2 from 0; {TO_FOLLOW}"
        assert (member.cuts, member.history) == ([], [(1, 100)])


async def test_a_log_without_a_history_is_not_truncated() -> None:
    member = Member(BYTES[:1200])
    async with following(member) as (client, master):
        await master.answer(1000, (1, 0))
        assert condition_of(client) is Condition.MASTER_BEHIND
        assert member.cuts == []


async def test_an_empty_log_forgets_its_history() -> None:
    """A power loss may leave the files of a log and its history, but empty."""
    member = await Member(first_offset=0).begin((1, 0))
    async with following(member) as (client, master):
        await master.answer(1000, (3, 0))
        await master.frame(0, BYTES[:1000], 3, 0)
        assert condition_of(client) is Condition.CONNECTED
        assert member.history == [(3, 0)]
        assert bytes(member.log.content) == BYTES[:1000]


# Having all that a master has


@pytest.mark.parametrize("ack_flushed", [False, True])
async def test_caught_up_when_it_has_what_the_master_had(ack_flushed: bool) -> None:
    options = msgspec.structs.replace(WHOLE, ack_flushed=ack_flushed)
    member = await Member(BYTES[:500]).begin((1, 0))
    member.log.flushes = False
    async with following(member, options) as (client, master):
        await master.answer(1000, (1, 0))
        await master.frame(500, BYTES[500:900], 1, 0)
        member.log.flush()
        await master.frame(900, b"", 1, 0)
        assert not client.has_caught_up.is_set()
        await master.frame(900, BYTES[900:1000], 1, 0)
        assert client.has_caught_up.is_set() is not ack_flushed
        member.log.flush()
        assert client.has_caught_up.is_set(), "when it is acknowledged, whether or not more comes"


async def test_a_log_to_be_truncated_has_not_caught_up() -> None:
    member = await Member(BYTES[:1200]).begin((1, 0))
    async with following(member) as (client, master):
        await master.answer(1100, (1, 0), (2, 1000))
        assert not client.has_caught_up.is_set()
        await master.frame(1000, BYTES[:100], 2, 1000)
        assert client.has_caught_up.is_set()


async def test_truncation_inside_a_record_is_refused() -> None:
    member = await Member(BYTES[:1200]).begin((1, 0))

    async def refuse(offset: int) -> None:
        raise ValueError("inside a record")

    member.truncate = refuse  # type: ignore[method-assign]
    async with following(member) as (client, master):
        await master.answer(1500, (1, 0), (2, 1000))
        assert condition_of(client) is Condition.NO_COMMON_EPOCH
        assert "inside a record" in client.statistics().detail


@pytest.mark.parametrize("error", [DiskFull(Path("/store"), 0), OSError(errno.EMFILE, "Too many open files")], ids=repr)
async def test_a_truncation_that_the_disk_refuses_is_retried(error: Exception) -> None:
    member = await Member(BYTES[:1200]).begin((1, 0))

    async def refuse(offset: int) -> None:
        raise error

    member.truncate = refuse  # type: ignore[method-assign]
    async with following(member) as (client, master):
        await master.answer(1500, (1, 0), (2, 1000))
        assert condition_of(client) is Condition.APPEND_FAILED
        assert client.statistics().detail == str(error)
        await trio.sleep(5.5)
        assert len(master.streams) == 2


async def test_an_emptied_log_has_no_history() -> None:
    member = await Member().begin((1, 0), (2, 500))
    async with following(member) as (_, master):
        await master.answer(900, (1, 0), (3, 600))
        assert member.history == [(1, 0)]
        assert master.reports == [0]


async def test_an_obstacle_is_tried_less_and_less_often() -> None:
    """A member's first attempts are soon, but each one costs the master a connection and lines in its log."""
    member = await Member(bytes(100)).begin((1, 0))
    async with following(member, msgspec.structs.replace(WHOLE, reconnect_interval_s=0.1)) as (client, master):

        async def answer_all() -> None:
            answered_count = 0
            while True:
                await trio.sleep(0.01)
                if len(master.streams) > answered_count:
                    answered_count = len(master.streams)
                    await master.answer(100, (2, 0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_all)
            await trio.sleep(60)
            assert client.statistics().ended_counts.keys() == {Condition.NO_COMMON_EPOCH}
            assert len(master.streams) < 20
            nursery.cancel_scope.cancel()


async def test_obstacles_of_an_earlier_term_delay_nothing_in_the_next() -> None:
    """Messages of the new term may wait for this member, also if the same node is master again."""
    member = await Member(bytes(100)).begin((1, 0))
    async with following(member, msgspec.structs.replace(WHOLE, reconnect_interval_s=0.1)) as (client, master):
        for _ in range(8):
            await master.streams[-1].send_all(b"\xff" * 20)
            await trio.sleep(6)
        await master.answer(100, (1, 0))
        await master.frame(100, b"", 1, 0)
        assert condition_of(client) is Condition.CONNECTED
        attempt_count = len(master.streams)
        client.adopt_epoch(2)
        await trio.sleep(0.2)
        assert len(master.streams) == attempt_count + 1


async def test_a_later_term_ends_the_wait_after_an_obstacle() -> None:
    """The same node is master again."""
    member = await Member(bytes(100)).begin((1, 0))
    async with following(member, msgspec.structs.replace(WHOLE, reconnect_interval_s=0.1)) as (client, master):
        for _ in range(8):
            await trio.sleep(6)
            await master.streams[-1].send_all(b"\xff" * 20)
        await wait_all_tasks_blocked()
        attempt_count = len(master.streams)
        client.adopt_epoch(2)
        await wait_all_tasks_blocked()
        assert len(master.streams) == attempt_count + 1


# Whom it follows


async def test_a_master_of_an_earlier_term_is_refused() -> None:
    member = await Member(bytes(100)).begin((1, 0), (5, 90))
    async with following(member) as (client, master):
        await master.answer(100, (1, 0), (4, 80))
        assert condition_of(client) is Condition.STALE_MASTER
        assert client.statistics().detail == "its last term is 4, the group has had 5"
        assert (master.reports, member.cuts) == ([], [])


async def test_a_term_seen_in_a_handshake_is_remembered() -> None:
    member = await Member(bytes(100)).begin((1, 0))
    async with following(member) as (client, master):
        await master.answer(2000, (1, 0), (7, 1900))
        assert client.min_epoch == 7
        assert member.history == [(1, 0)]
        await master.streams[-1].aclose()
        await trio.sleep(5.5)
        await master.answer(2000, (1, 0), (6, 1900))
        assert condition_of(client) is Condition.STALE_MASTER


async def test_a_later_term_ends_the_connection_and_nothing_more_is_acknowledged() -> None:
    member = await Member(bytes(100)).begin((1, 0))
    async with following(member) as (client, master):
        await master.answer(100, (1, 0))
        assert master.reports == [100]
        appending = trio.Event()

        async def wait() -> None:
            with trio.CancelScope(shield=True):
                await appending.wait()

        member.log.before_append = wait
        await master.frame(100, b"abc", 1, 0)
        client.adopt_epoch(2)
        # The append in progress completes, but is not reported.
        appending.set()
        await client.state.wait_value(HAClientState.READY)
        await wait_all_tasks_blocked()
        assert master.reports == [100]
        assert condition_of(client) is Condition.STALE_MASTER
        await trio.sleep(5.5)
        await master.answer(103, (1, 0))
        assert condition_of(client) is Condition.STALE_MASTER
        await trio.sleep(5.5)
        await master.answer(103, (1, 0), (2, 103))
        assert master.reports[1:] == [103]
        await master.frame(103, b"", 2, 103)
        assert condition_of(client) is Condition.CONNECTED


async def test_a_pending_request_is_not_sent_after_a_later_term() -> None:
    """Over a socket, where reports are sent without a turn of the event loop."""
    member = await Member(bytes(1200)).begin((1, 0))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def connect(address: str) -> trio.abc.Stream:
        return trio.SocketStream(trio.socket.from_stdlib_socket(theirs))

    client = HAClient(member.log, WHOLE, connect, member=member, broker_id=SLAVE)

    async def cut(offset: int) -> None:
        member.log.cut(offset)
        client.adopt_epoch(2)

    member.truncate = cut  # type: ignore[method-assign]
    with ours:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            client.set_master("10.0.0.1:10912")
            await wait_all_tasks_blocked()
            assert ours.recv(100) == SlaveHandshake(SLAVE).encode()
            ours.sendall(MasterHandshake(1000, (EpochEntry(1, 0),)).encode())
            await client.state.wait_transition(HAClientState.READY)
            assert len(member.log.content) == 1000
            assert ours.recv(100) == b""
            nursery.cancel_scope.cancel()


async def test_a_term_that_is_not_later_changes_nothing() -> None:
    member = await Member(bytes(100)).begin((1, 0), (3, 50))
    async with following(member) as (client, master):
        await master.answer(100, (1, 0), (3, 50))
        client.adopt_epoch(3)
        client.adopt_epoch(2)
        await trio.sleep(1)
        assert len(master.streams) == 1
        assert client.min_epoch == 3


async def test_without_a_master_nothing_more_is_acknowledged() -> None:
    """As a member that stands for election does: its acknowledgements must not count for the old term."""
    member = await Member(bytes(100)).begin((1, 0))
    async with following(member) as (client, master):
        await master.answer(100, (1, 0))
        await master.streams[-1].send_all(b"")
        client.set_master(None)
        member.log.max_offset.raise_to(100)
        await client.state.wait_value(HAClientState.READY)
        await trio.sleep(20)
        assert master.reports == [100]
        assert len(master.streams) == 1
        assert condition_of(client) is Condition.NO_MASTER


async def test_a_master_replaced_during_the_connect_is_not_followed(nursery: trio.Nursery) -> None:
    member = await Member(bytes(100)).begin((1, 0))
    master = MasterOfMembers(nursery)

    async def connect(address: str) -> trio.abc.Stream:
        await trio.sleep(1)
        return await master.connect(address)

    client = HAClient(member.log, WHOLE, connect, member=member, broker_id=SLAVE)
    nursery.start_soon(client.run)
    client.set_master("10.0.0.1:10912")
    await wait_all_tasks_blocked()
    client.set_master(None)
    await trio.sleep(10)
    assert master.said == []


# Both sides


@asynccontextmanager
async def pair(
    service: HAService,
    slave: Member,
    options: HAOptions | None = None,
    truncate: Callable[[int], Awaitable[None]] | None = None,
) -> AsyncIterator[HAClient]:
    """A slave that follows a service."""
    async with trio.open_nursery() as nursery:

        async def connect(address: str) -> trio.abc.Stream:
            ours, theirs = memory_stream_pair()
            nursery.start_soon(service.handle, theirs, "10.0.0.2:40000")
            return ours

        options = options or HAOptions(start_from="first", transfer_batch_size_bytes=1000)
        client = HAClient(slave.log, options, connect, truncate=truncate, member=slave, broker_id=SLAVE)
        nursery.start_soon(client.run)
        client.set_master("10.0.0.1:10912")
        await wait_all_tasks_blocked()
        yield client
        nursery.cancel_scope.cancel()


async def test_an_empty_member_gets_all_of_the_log_and_of_its_history() -> None:
    master = await Member(BYTES).begin((1, 0), (2, 4096), (5, 9000))
    slave = Member()
    service = leading(master)
    async with pair(service, slave):
        assert slave.log.content == master.log.content
        assert slave.history == master.history
        assert service.leadership is not None
        assert service.leadership.proposed_set.value == frozenset({1, SLAVE})
        service.leadership.confirm_set({1, SLAVE})
        master.log.put(b"abc")
        await wait_all_tasks_blocked()
        assert service.acknowledged_by_set() == len(BYTES) + 3
        assert master.log.dispatch_limit.value == len(BYTES) + 3
        await trio.sleep(6)
        assert slave.log.dispatch_limit.value == len(BYTES) + 3


async def test_a_returning_master_truncates_its_tail() -> None:
    old = await Member(BYTES[:3000] + b"never acknowledged").begin((1, 0))
    old.log.limit_dispatch(3000)
    new = await Member(BYTES[:3000]).begin((1, 0), (2, 3000))
    new.log.put(BYTES[3000:5000])
    async with pair(leading(new), old) as client:
        assert old.cuts == [3000]
        assert old.log.content == new.log.content
        assert old.history == [(1, 0), (2, 3000)]
        assert condition_of(client) is Condition.CONNECTED
        assert [entry for entry in old.epochs.entries if entry == EpochEntry(2, 3000)]


def torn_log() -> tuple[bytes, int]:
    """The beginning of BYTES without the last byte of a sector, and where that byte is."""
    torn = bytearray(BYTES[:3000])
    at = next(end - 1 for end in range(2048, 3000, 512) if torn[end - 1])
    torn[at] = 0
    return bytes(torn), at


async def test_a_member_copies_a_torn_record_again() -> None:
    master = await Member(BYTES).begin((1, 0))
    torn, at = torn_log()
    slave = await Member(torn).begin((1, 0))

    async def truncate(offset: int) -> None:
        assert offset == at
        await slave.truncate(offset - 10)

    async with pair(leading(master), slave, truncate=truncate) as client:
        assert slave.cuts == [at - 10]
        assert slave.log.content == master.log.content
        assert slave.history == [(1, 0)]
        assert condition_of(client) is Condition.CONNECTED


async def test_a_master_whose_bytes_are_damaged_is_not_shorter() -> None:
    """It waits until they are repaired, perhaps with the bytes of this member."""
    master = await Member(BYTES).begin((1, 0))
    slave = await Member(BYTES[:3000]).begin((1, 0))
    master.log.hot_bytes = 0
    master.log.damage(2500, 2600)
    async with pair(leading(master), slave) as client:
        await trio.sleep(60)
        assert condition_of(client) is Condition.NO_DATA_YET
        assert "the master has the bytes from 2500 to the end here at 3000" in client.statistics().detail
        assert client.statistics().connection_count == 1
        master.log.heal()
        await trio.sleep(1)
        assert condition_of(client) is Condition.CONNECTED
        assert slave.log.content == master.log.content


async def test_a_member_waits_for_damaged_bytes_at_which_it_starts_to_compare() -> None:
    """It reconnected again and again until they were repaired."""
    master = await Member(BYTES).begin((1, 0))
    slave = await Member(BYTES[:3000]).begin((1, 0))
    master.log.hot_bytes = 0
    master.log.damage(0, 100)
    async with pair(leading(master), slave) as client:
        await trio.sleep(60)
        assert condition_of(client) is Condition.OUT_OF_RANGE
        assert "the master sends nothing from 1, before the end here at 3000" in client.statistics().detail
        assert client.statistics().connection_count == 1
        master.log.heal()
        await trio.sleep(1)
        assert condition_of(client) is Condition.CONNECTED
        assert slave.log.content == master.log.content


async def test_a_torn_record_stays_while_the_disk_is_full() -> None:
    master = await Member(BYTES).begin((1, 0))
    torn, _ = torn_log()
    slave = await Member(torn).begin((1, 0))
    is_full = True

    async def truncate(offset: int) -> None:
        if is_full:
            raise DiskFull(Path("/logcut"), 0)
        await slave.truncate(offset)

    async with pair(leading(master), slave, truncate=truncate) as client:
        assert condition_of(client) is Condition.APPEND_FAILED
        assert slave.log.content == torn
        is_full = False
        await trio.sleep(6)
        assert slave.log.content == master.log.content


async def test_a_node_that_does_not_lead_refuses_members() -> None:
    master = await Member(BYTES).begin((1, 0))
    slave = Member()
    async with pair(HAService(master.log, member=master), slave) as client:
        assert condition_of(client) is Condition.MASTER_CLOSED
        assert slave.log.content == b""

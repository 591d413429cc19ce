"""A broker whose role changes while it runs: what it stores, acknowledges and answers, and what outlives a term.

Times are virtual and exact. Clients keep their connection throughout.
"""

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.acknowledgement import STEPPED_DOWN
from ha.broker.group_log import GroupLog
from ha.broker.options import BrokerRole, ReplicaPolicy
from ha.broker.put_request import PutRequest
from ha.broker.standing import FOREVER, Standing
from ha.broker.timers import SEEN
from ha.errors import DiskFailed
from ha.protocol import java_json
from ha.protocol.bodies import DelayOffsets
from ha.protocol.codes import PutStatus, RequestCode, ResponseCode
from ha.protocol.group_requests import LockedQueuesBody, LockQueuesBody, QueueBody
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import OP_TOPIC
from ha.store.commitlog import UNLIMITED
from tests.broker.node import Node, StalledSync, open_node
from tests.broker.test_put import message, put, slave_of
from tests.replication.members import MemberSide, lead
from tests.store.disks import MemoryDisk, run_inline

Step = Callable[..., Awaitable[None]]

SYNC = {"role": BrokerRole.SYNC_MASTER}
OK, UNKNOWN, REFUSED = PutStatus.PUT_OK, PutStatus.FLUSH_SLAVE_TIMEOUT, PutStatus.SERVICE_NOT_AVAILABLE


class Hold:
    """Runs blocking calls inline, except between `begin` and `end`, when the log gets no further segment."""

    def __init__(self) -> None:
        self._go_on = trio.Event()
        self._go_on.set()

    def begin(self) -> None:
        self._go_on = trio.Event()

    def end(self) -> None:
        self._go_on.set()

    async def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        await self._go_on.wait()
        return await run_inline(call, *arguments)


class TermSteps:
    """Stands for the group's log: calls `before` a term's first put is admitted, and `after`."""

    def __init__(self, before: Step, after: Step | None = None) -> None:
        self.begin_epoch = before
        self._after = after

    async def write_epoch(self, epoch: int) -> None:
        await trio.lowlevel.checkpoint()
        if self._after is not None:
            await self._after(epoch)

    async def step_down(self) -> None:
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


def slave_standing() -> Standing:
    return Standing("b0", 2, is_slave=True, is_elected=True)


@asynccontextmanager
async def member(folder: Path, **changes: Any) -> AsyncIterator[Node]:
    """A slave member of a group with one message in its log, so that a slave's report is not 0."""
    async with open_node(folder, standing=slave_standing(), **changes) as node:
        await node.store.log.put([message(b"first")])
        yield node


async def put_later(node: Node, nursery: trio.Nursery, *messages: Any) -> dict[str, Any]:
    """Puts in another task and returns once that waits; the outcome is added to the result."""
    found: dict[str, Any] = {}

    async def run() -> None:
        found["statuses"], found["took_s"], found["remark"] = await put(node, *messages)

    nursery.start_soon(run)
    await wait_all_tasks_blocked()
    return found


async def test_role_decides_on_each_send(tmp_path: Path) -> None:
    async with member(tmp_path) as node:
        refused = await node.send()
        assert (refused.code, "SLAVE of b0" in (refused.remark or "")) == (14, True)
        assert await node.broker.become_master(1)
        assert (await node.send()).code == 0
        await node.broker.become_slave(2)
        assert (await node.send()).code == 14
        assert await node.broker.become_master(3)
        assert (await node.send()).code == 0
        assert node.broker.standing.epoch == 3
        assert node.client.statistics().opened == 1  # one connection through all of this


async def test_step_down_answers_waiting_puts_as_unconfirmed(tmp_path: Path) -> None:
    async with member(tmp_path, **SYNC) as node, slave_of(node) as slave, trio.open_nursery() as nursery:
        await node.broker.become_master(1)
        found = await put_later(node, nursery, message(b"a"), message(b"b"))
        assert not found
        await node.broker.become_slave(1)
        await wait_all_tasks_blocked()
        assert found == {"statuses": [UNKNOWN, UNKNOWN], "took_s": 0.0, "remark": STEPPED_DOWN}
        await slave.acknowledge()  # too late
        assert found["statuses"] == [UNKNOWN, UNKNOWN]
        with trio.fail_after(1):
            await node.broker.put_service.acknowledgements.wait_all_answered()


async def test_step_down_answers_waiting_puts_in_their_order(tmp_path: Path) -> None:
    async with member(tmp_path, **SYNC) as node, slave_of(node):
        await node.broker.become_master(1)
        answered: list[PutRequest] = []
        for body in (b"a", b"b", b"c"):
            node.broker.put_service.submit([PutRequest(messages=(message(body),), on_done=answered.extend)])
        assert not answered
        await node.broker.become_slave(1)
        assert [each.results[0].queue_offset for each in answered] == [1, 2, 3]  # after the one of `slave_of`


async def test_acknowledgement_of_another_term_does_not_count(tmp_path: Path) -> None:
    async with member(tmp_path, **SYNC) as node, slave_of(node) as slave, trio.open_nursery() as nursery:
        await node.broker.become_master(1)
        found = await put_later(node, nursery)
        node.broker.standing.become_slave(2)  # by another task that notices the lost lease first
        node.broker.standing.become_master(3)
        await slave.acknowledge()
        await wait_all_tasks_blocked()
        assert found["statuses"] == [UNKNOWN]


async def test_nothing_is_acknowledged_once_the_lease_has_ended(tmp_path: Path) -> None:
    async with member(tmp_path, **SYNC) as node, slave_of(node) as slave, trio.open_nursery() as nursery:
        await node.broker.become_master(1, trio.current_time() + 2)
        first = await put_later(node, nursery)
        await trio.sleep(1)
        await slave.acknowledge()
        await wait_all_tasks_blocked()
        assert first == {"statuses": [OK], "took_s": 1.0, "remark": ""}
        second = await put_later(node, nursery)
        await trio.sleep(1)
        # No task has noticed the end of the lease, as after a pause of the process.
        await slave.acknowledge()
        await wait_all_tasks_blocked()
        assert second["statuses"] == [UNKNOWN]
        statuses, _, remark = await put(node)
        assert statuses == [REFUSED]
        assert "lease ended" in remark
        assert (await node.send()).code == 14
        node.broker.standing.extend(trio.current_time() + 2)
        third = await put_later(node, nursery)
        await slave.acknowledge()
        await wait_all_tasks_blocked()
        assert third["statuses"] == [OK]


async def test_puts_waiting_for_a_segment_at_the_end_of_the_term_are_not_stored(tmp_path: Path) -> None:
    hold = Hold()
    async with (
        member(tmp_path, run_blocking=hold, store_changes={"segment_size": 4096}) as node,
        trio.open_nursery() as nursery,
    ):
        await node.broker.become_master(1)
        hold.begin()
        found = await put_later(node, nursery, *[message(bytes(900)) for _ in range(12)])
        assert not found
        end = node.store.log.max_offset.value
        done = trio.Event()

        async def step_down() -> None:
            await node.broker.become_slave(1)
            done.set()

        nursery.start_soon(step_down)
        await wait_all_tasks_blocked()
        assert not done.is_set(), "something may still be appended"
        hold.end()
        with trio.fail_after(1):
            await done.wait()
        await wait_all_tasks_blocked()
        assert node.store.log.max_offset.value == -(-end // 4096) * 4096, (
            "no more than the rest of the segment is filled"
        )
        stored_count = node.broker.put_service.stored_count
        assert found["statuses"] == [OK] * stored_count + [REFUSED] * (12 - stored_count)


async def test_flush_does_not_confirm_puts_of_a_former_master(tmp_path: Path) -> None:
    disk = StalledSync()
    async with member(tmp_path, run_blocking=disk, flush_sync=True) as node, trio.open_nursery() as nursery:
        await node.broker.become_master(1, trio.current_time() + 2)
        disk.stall_s = 1
        first = await put_later(node, nursery)
        await trio.sleep(1)
        await wait_all_tasks_blocked()
        assert first["statuses"] == [OK]
        second = await put_later(node, nursery)
        await trio.sleep(2)
        await wait_all_tasks_blocked()
        assert second["statuses"] == [UNKNOWN]


async def test_planned_switch_refuses_new_puts_and_acknowledges_waiting_ones(tmp_path: Path) -> None:
    async with member(tmp_path, **SYNC) as node, slave_of(node) as slave, trio.open_nursery() as nursery:
        await node.broker.become_master(1)
        found = await put_later(node, nursery)
        node.broker.standing.stop_storing("it hands over to member 3")
        assert (await put(node))[0] == [REFUSED]
        refused = await node.send()
        assert (refused.code, "hands over" in (refused.remark or "")) == (14, True)
        await slave.acknowledge()
        await wait_all_tasks_blocked()
        assert found["statuses"] == [OK]


async def test_step_down_during_a_promotion_wins(tmp_path: Path) -> None:
    async with member(tmp_path) as node, trio.open_nursery() as nursery:
        broker, go_on = node.broker, trio.Event()
        outcome: list[bool] = []

        async def slow(epoch: int) -> None:
            await go_on.wait()

        broker.group_log = cast(GroupLog, TermSteps(before=slow))

        async def promote() -> None:
            outcome.append(await broker.become_master(1))

        nursery.start_soon(promote)
        await wait_all_tasks_blocked()
        nursery.start_soon(broker.become_slave, 2)
        await wait_all_tasks_blocked()
        go_on.set()
        await wait_all_tasks_blocked()
        assert outcome == [False]
        assert (broker.standing.is_slave, broker.standing.epoch) == (True, 2)
        assert await broker.become_master(3), "and it can be master again"


@pytest.mark.parametrize("step_count", range(8))
async def test_step_down_during_a_promotion_leaves_the_journal_closed(tmp_path: Path, step_count: int) -> None:
    """While the services of the former role ended, it went unnoticed: the slave no longer followed its group's log."""
    async with member(tmp_path, keeps_tables_in_log=True) as node:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.broker.become_master, 1)
            for _ in range(step_count):
                await trio.lowlevel.checkpoint()
            await node.broker.become_slave(1)
        assert node.broker.group_log is not None
        assert node.broker.group_log.journal.is_open is not node.broker.standing.is_slave


@pytest.mark.parametrize("step_count", range(6))
async def test_cancelled_step_down_leaves_a_broker_that_can_become_master(tmp_path: Path, step_count: int) -> None:
    """A member that loses its id while it adopts another term is cancelled, and plays its next role afterwards."""
    async with member(tmp_path) as node, trio.open_nursery() as nursery:
        await node.broker.become_slave(1)
        with trio.CancelScope() as scope:

            async def cancel() -> None:
                for _ in range(step_count):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            nursery.start_soon(cancel)
            await node.broker.become_slave(2)
        with trio.fail_after(10):
            await node.broker.become_master(3)
        assert (await put(node, message(b"later")))[0] == [OK]


async def test_group_log_is_called_before_and_after_puts_are_admitted(tmp_path: Path) -> None:
    async with member(tmp_path) as node:
        seen: list[Any] = []

        async def before(epoch: int) -> None:
            seen.append((epoch, (await put(node))[0]))

        async def after(epoch: int) -> None:
            seen.append((epoch, (await put(node))[0]))

        node.broker.group_log = cast(GroupLog, TermSteps(before, after))
        await node.broker.become_master(5)
        assert seen == [(5, [REFUSED]), (5, [OK])]


# ---- readers


async def test_held_pulls_are_answered_when_the_role_changes(tmp_path: Path) -> None:
    async with member(tmp_path, slave_read_enable=True) as node, trio.open_nursery() as nursery:
        await node.broker.become_master(1)
        await node.send()
        await node.dispatched()
        answers: list[tuple[float, int, str]] = []

        async def pull() -> None:
            began = trio.current_time()
            answer = await node.pull(offset=2, sysFlag=6)
            answers.append((trio.current_time() - began, answer.code, answer.ext_fields["suggestWhichBrokerId"]))

        for change in (lambda: node.broker.become_slave(1), lambda: node.broker.become_master(2)):
            nursery.start_soon(pull)
            await wait_all_tasks_blocked()
            assert not answers
            await change()
            await wait_all_tasks_blocked()
            assert answers == [(0.0, 19, "0")]
            answers.clear()


async def test_slave_member_serves_reads_if_allowed(tmp_path: Path) -> None:
    async with member(tmp_path / "no") as node:
        assert (await node.pull()).code == 14
    async with member(tmp_path / "yes", slave_read_enable=True) as node:
        await node.broker.become_master(1)
        await node.send()
        await node.dispatched()
        await node.broker.become_slave(2)
        answer = await node.pull(offset=1)
        assert [record.body for record in node.records(answer)] == [b"hello"]
        beyond = await node.pull(offset=9, suspendTimeoutMillis=0)
        assert (beyond.code, beyond.ext_fields["nextBeginOffset"]) == (20, "9"), "the master shall judge"
        await node.broker.become_master(3)
        beyond = await node.pull(offset=9, suspendTimeoutMillis=0)
        assert (beyond.code, beyond.ext_fields["nextBeginOffset"]) == (21, "2")


async def test_queue_locks_end_with_the_term(tmp_path: Path) -> None:
    queue = QueueBody(broker_name="b0", queue_id=0, topic="TT")
    body = java_json.dumps(LockQueuesBody(consumer_group="g", client_id="c1", mq_set=[queue]))
    async with member(tmp_path) as node:

        async def held() -> list[QueueBody]:
            answer = await node.ask(RequestCode.LOCK_BATCH_MQ, body)
            assert answer.code == 0
            return java_json.read_as(LockedQueuesBody, answer.body).queues

        assert await held() == []
        await node.broker.become_master(1, trio.current_time() + 5)
        assert await held() == [queue]
        await trio.sleep(5)
        assert await held() == [], "the lease is over: another member may be giving it to somebody else"
        await node.broker.become_slave(2)
        assert len(node.broker.queue_locks) == 0
        assert await held() == []


# ---- what only a master does


async def delay_offsets(node: Node) -> dict[int, int]:
    answer = await node.ask(RequestCode.GET_ALL_DELAY_OFFSET)
    return java_json.read_as(DelayOffsets, answer.body).offset_table


async def test_delayed_messages_are_delivered_by_the_current_master(tmp_path: Path) -> None:
    async with member(tmp_path) as node:
        await node.broker.become_master(1)
        # 10 s
        assert (await node.send(b"late", i="DELAY\x013\x02")).code == 0
        await trio.sleep(5)
        await node.broker.become_slave(1)
        await trio.sleep(60)
        assert node.broker.delay.statistics().delivered_count == 0
        await node.broker.become_master(2)
        await trio.sleep(20)  # it saves how far it is
        assert node.broker.delay.statistics().delivered_count == 1
        assert await delay_offsets(node) == {3: 1}
        await node.broker.become_slave(2)
        await node.broker.become_master(3)
        await trio.sleep(60)
        assert node.broker.delay.statistics().delivered_count == 1


async def test_timer_messages_are_delivered_by_the_current_master(tmp_path: Path) -> None:
    async with member(tmp_path) as node:
        await node.broker.become_master(1)
        for delay_s in (10, 100):
            assert (await node.send(b"%d" % delay_s, i=f"TIMER_DELAY_SEC\x01{delay_s}\x02")).code == 0
        await trio.sleep(5)
        await node.broker.become_slave(1)
        await trio.sleep(60)
        assert node.broker.timers.statistics().delivered_count == 0
        await node.broker.become_master(2)
        await trio.sleep(20)
        statistics = node.broker.timers.statistics()
        assert (statistics.delivered_count, statistics.pending_count) == (1, 1)
        table = await delay_offsets(node)
        assert table[SEEN] == 2
        await node.broker.become_slave(2)
        await node.broker.become_master(3)
        await trio.sleep(60)
        assert node.broker.timers.statistics().delivered_count == 2
        assert node.broker.timers.statistics().pending_count == 0


async def half(node: Node) -> RemotingCommand:
    answer = await node.send(b"half", h=4, i="TRAN_MSG\x01true\x02PGROUP\x01pg\x02UNIQ_KEY\x01U1\x02", f=4)
    assert answer.code == 0
    return answer


async def end_half(node: Node, sent: RemotingCommand, commit_or_rollback: int) -> RemotingCommand:
    return await node.ask(
        RequestCode.END_TRANSACTION,
        producerGroup="pg",
        tranStateTableOffset=sent.ext_fields["queueOffset"],
        commitLogOffset=int(sent.ext_fields["msgId"][-16:], 16),
        commitOrRollback=commit_or_rollback,
        fromTransactionCheck=False,
        msgId="U1",
    )


async def test_former_master_ends_no_transaction(tmp_path: Path) -> None:
    async with member(tmp_path) as node:
        await node.broker.become_master(1)
        sent = await half(node)
        await node.broker.become_slave(1)
        for what in (8, 12):
            assert (await end_half(node, sent, what)).code == 11
        await node.broker.become_master(2, trio.current_time())
        for what in (8, 12):
            assert (await end_half(node, sent, what)).code == 14
        node.broker.standing.extend(FOREVER)
        assert (await end_half(node, sent, 8)).code == 0


async def test_waiting_rollback_is_answered_and_dropped(tmp_path: Path) -> None:
    """Its half message may be truncated and replaced by another one, which must not count as rolled back."""
    hold = Hold()
    async with (
        member(tmp_path, run_blocking=hold, store_changes={"segment_size": 4096}) as node,
        trio.open_nursery() as nursery,
    ):
        await node.broker.become_master(1)
        sent = await half(node)
        hold.begin()
        await put_later(
            node, nursery, *[message(bytes(900)) for _ in range(12)]
        )  # the op message has to wait for these
        answers: list[int] = []

        async def roll_back() -> None:
            answers.append((await end_half(node, sent, 12)).code)

        nursery.start_soon(roll_back)
        await wait_all_tasks_blocked()
        nursery.start_soon(node.broker.become_slave, 1)
        await wait_all_tasks_blocked()
        assert answers == [14]
        hold.end()
        await wait_all_tasks_blocked()
        await node.broker.become_master(2)
        await trio.sleep(45)
        assert not node.store.queues.topics().get(OP_TOPIC), "nothing was said about it"
        statistics = node.broker.transactions.statistics()
        assert (statistics.open_count, statistics.unasked_count) == (1, 1)


async def test_rollback_reads_its_half_message_after_the_step_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Hold()
    async with member(tmp_path) as node, trio.open_nursery() as nursery:
        await node.broker.become_master(1)
        sent = await half(node)
        hold.begin()
        read = node.store.log.read

        async def slow_read(*arguments: Any) -> memoryview:
            await hold(int)
            return await read(*arguments)

        monkeypatch.setattr(node.store.log, "read", slow_read)
        answers: list[int] = []

        async def roll_back() -> None:
            answers.append((await end_half(node, sent, 12)).code)

        nursery.start_soon(roll_back)
        await wait_all_tasks_blocked()
        await node.broker.become_slave(1)
        hold.end()
        await wait_all_tasks_blocked()
        assert answers == [14]
        assert node.broker.transactions.statistics().rolled_back_count == 0


async def test_sent_back_message_is_on_the_next_master(tmp_path: Path) -> None:
    """The consumer skips it, so that the copy is the only one."""
    async with member(tmp_path, **SYNC) as node, slave_of(node) as slave, trio.open_nursery() as nursery:
        await node.broker.become_master(1)
        codes: list[int] = []

        async def give_back() -> None:
            codes.append((await node.ask(RequestCode.CONSUMER_SEND_MSG_BACK, offset=0, group="g", delayLevel=3)).code)

        nursery.start_soon(give_back)
        await wait_all_tasks_blocked()
        assert codes == []
        await slave.acknowledge()
        await wait_all_tasks_blocked()
        assert codes == [0]
        nursery.start_soon(give_back)
        await wait_all_tasks_blocked()
        await node.broker.become_slave(1)
        await wait_all_tasks_blocked()
        assert codes == [0, 1], "the consumer now sends it itself, to the current master"


# ---- acknowledged by the sync-state set


@asynccontextmanager
async def leading(folder: Path, *others: int, **changes: Any) -> AsyncIterator[tuple[Node, dict[int, MemberSide]]]:
    """The master of a term whose sync-state set is itself and `others`, connected and in sync."""
    async with member(folder, by_set=True, **SYNC, **changes) as node, trio.open_nursery() as nursery:
        end = node.store.log.max_offset.value
        await node.store.epochs.append(1, end)
        lead(node.ha, cast(Any, node.store), *others)
        sides = {}
        for broker_id in others:
            side = sides[broker_id] = MemberSide(node.ha, broker_id)
            side.start(nursery)
            await side.greet()
            await wait_all_tasks_blocked()
            await side.report(end)
        await wait_all_tasks_blocked()
        await node.broker.become_master(1)
        yield node, sides
        nursery.cancel_scope.cancel()


async def test_single_member_of_the_set_waits_for_no_replica(tmp_path: Path) -> None:
    async with leading(tmp_path) as (node, _):
        assert await put(node) == ([OK], 0.0, "")


async def test_put_waits_for_every_member_of_the_set(tmp_path: Path) -> None:
    async with leading(tmp_path, 2, 3) as (node, sides), trio.open_nursery() as nursery:
        found = await put_later(node, nursery, message(b"a"), message(b"b"))
        end = node.store.log.max_offset.value
        await sides[2].report(end)
        await wait_all_tasks_blocked()
        assert not found
        await sides[3].report(end)
        await wait_all_tasks_blocked()
        assert found == {"statuses": [OK, OK], "took_s": 0.0, "remark": ""}


@pytest.mark.parametrize("least", [1, 2, 3])
async def test_set_below_the_minimum_stores_nothing(tmp_path: Path, least: int) -> None:
    policy = ReplicaPolicy(in_sync_replicas=1, min_in_sync_replicas=least)
    async with leading(tmp_path, 2, replica_policy=policy) as (node, sides), trio.open_nursery() as nursery:
        end = node.store.log.max_offset.value
        found = await put_later(node, nursery)
        if least < 3:
            assert not found
            await sides[2].report(node.store.log.max_offset.value)
            await wait_all_tasks_blocked()
            assert found["statuses"] == [OK]
        else:
            assert (found["statuses"], found["took_s"]) == ([PutStatus.IN_SYNC_REPLICAS_NOT_ENOUGH], 0.0)
            assert found["remark"].startswith("in-sync replicas not enough: 2 in sync, minInSyncReplicas=3")
            assert node.store.log.max_offset.value == end


async def test_new_master_resets_no_consumer_before_it_serves_older_messages(tmp_path: Path) -> None:
    """Its predecessor may have served more. In a queue that stays shorter, a higher offset is corrected. An operator's
    reset is answered at once."""
    async with member(tmp_path) as node:
        assert await node.broker.become_master(1)
        log = node.store.log
        await node.send(b"0")
        await node.dispatched()
        log.limit_dispatch(log.max_offset.value)
        await node.send(b"1")
        await node.send(b"2")
        await node.store.epochs.append(2, log.max_offset.value)
        early = await node.pull(3)
        assert (early.code, early.ext_fields["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "3")
        assert node.broker.tables.offsets.reset("g", "TT", 0, 0)
        reset = await node.pull(3)
        assert (reset.code, reset.ext_fields["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "0")
        log.limit_dispatch(UNLIMITED)
        await node.dispatched()
        assert [record.body for record in node.records(await node.pull(3))] == [b"2"]
        beyond = await node.pull(9)
        assert (beyond.code, beyond.ext_fields["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "4")


async def test_a_disk_that_fails_while_a_put_waits_for_a_segment_does_not_hold_up_a_change_of_role(
    tmp_path: Path,
) -> None:
    """The change waits, shielded from cancellation, until no put is queued; the process never ended."""
    hold, disk = Hold(), MemoryDisk()

    async def step_down() -> None:
        async with (
            member(tmp_path, disk=disk, run_blocking=hold, store_changes={"segment_size": 4096}) as node,
            trio.open_nursery() as nursery,
        ):
            await node.broker.become_master(1)
            hold.begin()
            await put_later(node, nursery, *[message(bytes(900)) for _ in range(12)])
            nursery.start_soon(node.broker.become_slave, 1)
            await wait_all_tasks_blocked()
            disk.refuse = lambda operation, path: errno.EIO if operation == "pwrite" else None
            hold.end()
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await step_down()
    assert caught.group_contains(DiskFailed)

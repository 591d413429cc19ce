"""Slaves whose position is not in their master's log."""

from __future__ import annotations

from random import Random

import pytest
import trio

from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.progress import SlaveState
from ha.replication.statistics import Condition
from tests.replication.link import following
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog
from tests.replication.slave_side import SlaveSide

CONTENT = Random(3388).randbytes(5 * SEGMENT_SIZE)


async def test_3388_slave_position_deleted_on_the_master(caplog: pytest.LogCaptureFixture) -> None:
    """apache/rocketmq#3388: a slave came back after days; the master no longer had the bytes after its end, sent
    heartbeats forever, and a SYNC_MASTER answered SLAVE_NOT_AVAILABLE. The only hint was "Slave fall behind master:
    xxx".

    In halog both sides report the two offsets, once in the log and always in their status, and the slave names the
    setting that resolves it; with haOutOfRange=resync it restarts at the master's first offset.
    """
    master, slave = MemoryLog(CONTENT), MemoryLog(CONTENT[:1000])
    master.delete_before(2 * SEGMENT_SIZE)
    service = HAService(master, HAOptions())
    async with following(service, slave) as (client, _):
        await service.wait_state(SlaveState.OUT_OF_RANGE)
        why = service.explain(len(CONTENT))
        assert f"the log begins at {2 * SEGMENT_SIZE}" in why
        assert not service.is_slave_ok(len(CONTENT))
        await trio.sleep(120)
        # By then it has asked, and knows: silence alone would look like a master without new messages.
        statistics = client.statistics()
        assert statistics.condition is Condition.OUT_OF_RANGE, statistics
        assert sum("ha.slave_out_of_range" in record.message for record in caplog.records) <= 2
        assert slave.content == CONTENT[:1000]

    async with following(service, slave, HAOptions(out_of_range="resync")):
        await service.wait_state(SlaveState.TRANSFER)
        await trio.sleep(20)
        assert (slave.min_offset, bytes(slave.content)) == (2 * SEGMENT_SIZE, CONTENT[2 * SEGMENT_SIZE :])
        assert slave.aside == [(0, CONTENT[:1000])]
        assert service.is_slave_ok(len(CONTENT))


async def test_3388_slave_ahead_of_its_master(caplog: pytest.LogCaptureFixture) -> None:
    """The reverse case of an offset unknown to the master: the master's log is shorter, because it was restored or
    emptied, or belongs to another master. RocketMQ's slave reconnects forever, and neither side says why.

    In halog the slave reports both ends and what to do, and its own log stays as it is.
    """
    master, slave = MemoryLog(CONTENT[:2000]), MemoryLog(CONTENT)
    service = HAService(master, HAOptions())
    async with following(service, slave) as (client, _):
        await trio.sleep(600)
        statistics = client.statistics()
        assert statistics.condition is Condition.MASTER_BEHIND
        assert f"the log here ends at {len(CONTENT)}, the master's at 2000" in statistics.detail
        assert "stop this slave and empty its store" in statistics.detail
        assert slave.content == CONTENT
        assert "no slave is connected; the last one" in service.explain(2000)
        assert statistics.connection_count <= 600 / 5 + 1
        assert sum("ha.client_master_behind" in record.message for record in caplog.records) == 1


async def test_2784_rocketmq_slave_out_of_range_is_reported_and_not_counted() -> None:
    """apache/rocketmq#2784, #5579: such a slave continued, with an error in a loop ("findMappedFile-ByOffset failure,
    index -275"); the advice on the tracker is to empty it.

    A RocketMQ slave can't be informed. It gets heartbeats, puts do not wait for it, and the remark reports its
    position.
    """
    master = MemoryLog(CONTENT)
    master.delete_before(3 * SEGMENT_SIZE)
    service = HAService(master, HAOptions())
    async with trio.open_nursery() as nursery:
        slave = SlaveSide(service, "10.0.0.2:40000")
        slave.start(nursery)
        await slave.report(5000)
        await trio.sleep(18)
        assert [(offset, body) for _, offset, body in slave.frames] == [(5000, b"")] * len(slave.frames)
        assert slave.frames
        assert service.acknowledged() == []
        assert service.explain(len(CONTENT)) == (
            f"slave 10.0.0.2 asks for offset 5000, the log begins at {3 * SEGMENT_SIZE}"
        )
        nursery.cancel_scope.cancel()


async def test_323_fall_behind_is_never_negative() -> None:
    """apache/rocketmq#323: "slave fall behind master, how much, -8245006252570743168 bytes"."""
    master = MemoryLog(CONTENT)
    service = HAService(master, HAOptions())
    async with trio.open_nursery() as nursery:
        for number, offset in enumerate((0, 1, 4096, len(CONTENT), 1 << 62)):
            slave = SlaveSide(service, f"10.0.0.{number}:40000")
            slave.start(nursery)
            await slave.report(offset)
        silent = SlaveSide(service, "10.0.1.1:40000")
        silent.start(nursery)
        await trio.sleep(1)
        lags = [slave.lag_bytes for slave in service.statistics().slaves]
        assert len(lags) == 5  # the fifth is gone
        assert all(0 <= lag <= len(CONTENT) for lag in lags)
        nursery.cancel_scope.cancel()

"""Disks that fill up while producers work, on either side, and a slave with a slow disk."""

import time
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.codes import ResponseCode
from tests.faults.checking import check_run
from tests.faults.producing import JournaledProducer, count_statuses
from tests.load.footprint import own_bytes
from tests.scenarios.brokers import Broker, eventually, slave_of, wait_caught_up, wait_in_sync
from tests.scenarios.test_full_disk import EVEN_WHEN_FULL, Ballast, small_disk

pytestmark = pytest.mark.processes

GROWTH_MAX = 24 << 20
"""Bytes of memory while a slave is far behind"""
SLOW_DISK_S = 0.8
SLAVE_TIMEOUT_S = 0.4


def codes_from(producer: JournaledProducer, mark: int) -> set[int]:
    return {each.answer.code for each in producer.answered[mark:]}


@pytest.mark.parametrize("where", ["master", "slave"])
def test_disk_fills_up_under_load_and_is_freed(tmp_path: Path, where: str) -> None:
    with small_disk(tmp_path / "disk") as disk:
        ballast = Ballast(disk)
        # The topic's files are sparse: only then does the disk fail in the middle of operations.
        settings: dict[str, Any] = {"slaveTimeout": 300, **EVEN_WHEN_FULL}
        roots = {where: disk / "store"}
        with (
            Broker(tmp_path / "master", "SYNC_MASTER", root=roots.get("master"), **settings).start() as master,
            slave_of(master, tmp_path / "slave", root=roots.get("slave"), **settings).start() as slave,
        ):
            wait_in_sync(master)
            producers = [
                # Slow producers: a slave's disk must still have room, once freed, for messages that arrived meanwhile.
                JournaledProducer(
                    number, lambda: master.addresses["remoting"], seed=number, window=4, body_sizes=(500, 4000)
                )
                for number in range(2)
            ]
            assert producers[0].wait_answers(20, 20.0)
            ballast.leave(0)
            refused = {
                "master": {ResponseCode.SYSTEM_ERROR},
                "slave": {ResponseCode.FLUSH_SLAVE_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE},
            }[where]
            eventually("producers get an error", lambda: codes_from(producers[0], -20) <= refused)
            marks = [len(producer.answered) for producer in producers]
            assert producers[0].wait_answers(50, 30.0)
            for producer, mark in zip(producers, marks, strict=True):
                assert codes_from(producer, mark) <= refused
            assert master.process.popen.poll() is None
            assert slave.process.popen.poll() is None
            remarks = {each.answer.remark for each in producers[0].answered if each.answer.code in refused}
            assert all(remarks)

            ballast.drop()
            eventually("puts are replicated again", lambda: codes_from(producers[0], -5) == {ResponseCode.SUCCESS})
            assert producers[0].wait_answers(20, 20.0)
            for producer in producers:
                producer.stop()
                assert producer.break_count == 0
            wait_in_sync(master)
            wait_caught_up(slave, master)
            slave.stop()
            master.stop()
            print(count_statuses([each.answer for producer in producers for each in producer.answered]))
            assert check_run([master, slave], producers, []).all == []


def test_slave_with_a_slow_disk(tmp_path: Path) -> None:
    """One of two slaves syncs slowly before it acknowledges: with the other slave puts are PUT_OK, without it they
    wait."""
    settings: dict[str, Any] = {"slaveTimeout": int(SLAVE_TIMEOUT_S * 1000)}
    with Broker(tmp_path / "master", "SYNC_MASTER", **settings).start() as master:
        slow = slave_of(master, tmp_path / "slow", brokerId=2, flushDiskType="SYNC_FLUSH", shutdownTimeout=30_000)
        slow.module = "tests.faults.slow_slave"
        slow.environment["SLOW_DISK_S"] = str(SLOW_DISK_S)
        with slow.start(), slave_of(master, tmp_path / "fast", brokerId=1).start() as fast:
            wait_in_sync(master, 2)
            producer = JournaledProducer(0, lambda: master.addresses["remoting"], seed=3, window=64, pause_s=0.02)
            assert producer.wait_answers(200, 20.0)
            memory = {broker: own_bytes(broker.pid) for broker in (master, slow)}
            mark, marked_s = len(producer.answered), time.monotonic()
            eventually("the slow one is seen behind", lambda: lag_of_last(master) > 0)
            assert producer.wait_answers(300, 30.0)
            assert codes_from(producer, mark) == {ResponseCode.SUCCESS}, "the other slave has it in time"

            fast.stop()
            since_s = time.monotonic()
            eventually(
                "the slow one makes puts wait", lambda: ResponseCode.FLUSH_SLAVE_TIMEOUT in late(producer, since_s)
            )
            assert producer.wait_answers(100, 30.0)
            # Each status was true: replicated in time, or stored here and not confirmed in time.
            sent_s = {each.sequence: each.time_s for each in producer.sent}
            for at_s, answer in producer.answered:
                if sent_s[answer.sequence] < since_s:
                    continue
                assert answer.code in (ResponseCode.SUCCESS, ResponseCode.FLUSH_SLAVE_TIMEOUT)
                if answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT:
                    assert at_s - sent_s[answer.sequence] >= SLAVE_TIMEOUT_S
            grown = {broker.directory.name: own_bytes(broker.pid) - size for broker, size in memory.items()}
            print(f"{grown} bytes grown in {time.monotonic() - marked_s:.1f} s, {len(producer.answered)} answers")
            assert max(grown.values()) < GROWTH_MAX
            producer.stop()
            fast.start()
            wait_in_sync(master, 2)
            for slave in (fast, slow):
                wait_caught_up(slave, master)
                slave.stop()
            master.stop()
            assert check_run([master, fast, slow], [producer], []).all == []


def lag_of_last(master: Broker) -> int:
    return max((int(slave["lag_bytes"]) for slave in master.status()["ha"]["slaves"]), default=0)


def late(producer: JournaledProducer, since_s: float) -> set[int]:
    return {each.answer.code for each in producer.answered if each.time_s > since_s}

"""Statuses of sends and their truth: real processes, with slaves missing, stopped, too few, and back."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.codes import ResponseCode
from tests.interop.stored_files import records
from tests.scenarios.brokers import Broker, assert_copy, eventually, slave_of, wait_caught_up, wait_in_sync
from tests.scenarios.producing import Client, assert_stored

pytestmark = pytest.mark.processes

SLAVE_TIMEOUT_S = 0.4


def test_statuses_of_a_sync_master(tmp_path: Path) -> None:
    with Broker(tmp_path / "m", "SYNC_MASTER", slaveTimeout=int(SLAVE_TIMEOUT_S * 1000)).start() as master:
        with Client(master.addresses["remoting"]) as client:
            alone = client.send(1)
            assert (alone.code, alone.remark) == (ResponseCode.SLAVE_NOT_AVAILABLE, "no slave is connected")
            with slave_of(master, tmp_path / "s").start() as slave:
                wait_in_sync(master)
                assert client.send(2).code == ResponseCode.SUCCESS
                with Client(slave.addresses["remoting"]) as at_slave:
                    refused = at_slave.send(3)
                assert refused.code == ResponseCode.SYSTEM_BUSY
                assert "this is a SLAVE of broker-a; send to its master" in refused.remark

                slave.pause()
                began = time.monotonic()
                late = client.send(4)
                assert time.monotonic() - began >= SLAVE_TIMEOUT_S
                assert late.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
                assert late.remark.startswith("stored, but not acknowledged by the slaves it needs after 0.4")
                began = time.monotonic()
                unwaiting = client.send(5, properties="WAIT\x01false\x02")
                assert unwaiting.code == ResponseCode.SUCCESS
                assert time.monotonic() - began < SLAVE_TIMEOUT_S
                slave.resume()
                wait_in_sync(master)
                again = client.send(6)
                assert (again.code, again.remark) == (ResponseCode.SUCCESS, "")

                assert_stored(slave.commitlog, [alone, late, unwaiting, again])
                slave.kill()
                eventually("the dead slave is noticed", lambda: client.send(7).code != ResponseCode.FLUSH_SLAVE_TIMEOUT)
                gone = client.send(7)
                assert gone.code == ResponseCode.SLAVE_NOT_AVAILABLE
                assert re.fullmatch(
                    r"no slave is connected; the last one, 127\.0\.0\.1:\d+, (closed|lost) its connection, \d s ago",
                    gone.remark,
                )
        master.stop()
        stored = [record.sequence for record in records(master.commitlog)]
        assert [each for each in stored if each != 7] == [1, 2, 4, 5, 6]


def test_min_in_sync_replicas_refuses_sends(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"inSyncReplicas": 2, "minInSyncReplicas": 2, "totalReplicas": 2}
    with (
        Broker(tmp_path / "m", "SYNC_MASTER", **settings).start() as master,
        Client(master.addresses["remoting"]) as client,
    ):
        refused = client.send_all(range(50))
        assert {answer.code for answer in refused} == {ResponseCode.SYSTEM_ERROR}
        assert refused[0].remark == (
            "in-sync replicas not enough: 1 in sync, minInSyncReplicas=2; no slave is connected"
        )
        assert master.end == 0
        with slave_of(master, tmp_path / "s").start() as slave:
            wait_in_sync(master)
            assert {answer.code for answer in client.send_all(range(50, 100))} == {ResponseCode.SUCCESS}
            slave.stop()
            eventually("the slave is gone", lambda: master.status()["ha"]["in_sync"] == 0)
            end = master.end
            assert {answer.code for answer in client.send_all(range(100, 150))} == {ResponseCode.SYSTEM_ERROR}
            assert master.end == end
            master.stop()
            assert [record.sequence for record in records(slave.commitlog)] == list(range(50, 100))
            assert_copy(slave, master)


def test_sync_flush_on_both_sides(tmp_path: Path) -> None:
    with (
        Broker(tmp_path / "m", "SYNC_MASTER", flushDiskType="SYNC_FLUSH").start() as master,
        slave_of(master, tmp_path / "s", flushDiskType="SYNC_FLUSH").start() as slave,
    ):
        wait_in_sync(master)
        with Client(master.addresses["remoting"]) as client:
            answers = client.send_all(range(300), size=2000)
            assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
            for broker in (master, slave):
                commitlog = broker.status()["commitlog"]
                assert commitlog["flushed_offset"] == commitlog["max_offset"] > 300 * 2000
        wait_caught_up(slave, master)
        slave.stop()
        master.stop()
        assert_stored(slave.commitlog, answers)
        assert_copy(slave, master)

"""Several slaves, and a master that restarts while one follows. Stops under load: tests/load/test_stopping.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.codes import ResponseCode
from tests.interop.stored_files import log_range
from tests.node.processes import Process
from tests.scenarios.brokers import Broker, assert_copy, eventually, slave_of, wait_caught_up, wait_in_sync
from tests.scenarios.producing import Client, Load, assert_stored

pytestmark = pytest.mark.processes


def test_one_of_two_slaves_dies(tmp_path: Path) -> None:
    """With inSyncReplicas=3 a put needs both; without the key one is enough, and which one makes no difference."""
    settings: dict[str, Any] = {"inSyncReplicas": 3, "totalReplicas": 3, "slaveTimeout": 30_000}
    with (
        Broker(tmp_path / "m", "SYNC_MASTER", **settings).start() as master,
        slave_of(master, tmp_path / "s1", brokerId=1).start() as first,
        slave_of(master, tmp_path / "s2", brokerId=2).start() as second,
        Client(master.addresses["remoting"]) as client,
    ):
        wait_in_sync(master, 2)
        both = client.send_all(range(200))
        assert {answer.code for answer in both} == {ResponseCode.SUCCESS}
        for slave in (first, second):
            assert_stored(slave.commitlog, both)  # both have it by the time of the answer

        second.pause()
        load = Load(master.addresses["remoting"], 200, random.Random(1), window=8)
        eventually("puts wait", lambda: master.status()["ha"]["waiting_request_count"] > 0)
        second.kill()
        load.wait_answers(1)  # at once, not after slaveTimeout: no slave is left that could acknowledge
        last = load.stop()
        assert {answer.code for answer in last} <= {ResponseCode.FLUSH_SLAVE_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE}
        wait_caught_up(first, master)
        assert_stored(first.commitlog, last)

        second.start()
        wait_in_sync(master, 2)
        again = client.send(10_000_000)
        assert again.code == ResponseCode.SUCCESS
        for broker in (second, first, master):
            broker.stop()
        for slave in (first, second):
            assert assert_copy(slave, master) == log_range(master.commitlog)
            assert_stored(slave.commitlog, [*both, *last, again])


def test_a_slave_follows_its_master_through_restarts(tmp_path: Path) -> None:
    """Found through the name server, as the master returns on other ports; stopped once, killed once."""
    with Process("ha.namesrv", "--set", "listenPort=0", directory=tmp_path) as names:
        name_server = names.wait_ready()["remoting"]
        with (
            Broker(tmp_path / "m", "SYNC_MASTER", namesrvAddr=name_server, haListenPort=0).start() as master,
            Broker(tmp_path / "s", "SLAVE", namesrvAddr=name_server, registerNameServerPeriod=10_000) as slave,
        ):
            slave.start()
            wait_in_sync(master)
            answers = []
            for number, end in enumerate((master.stop, master.kill)):
                with Client(master.addresses["remoting"]) as client:
                    answers += client.send_all(range(number * 1000, number * 1000 + 500), size=700)
                end()
                assert slave.status()["is_ready"] is False
                master.start()
                wait_in_sync(master)
            with Client(master.addresses["remoting"]) as client:
                answers.append(client.send(5000))
            assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
            wait_caught_up(slave, master)
            with Client(slave.addresses["remoting"]) as at_slave:
                assert len(at_slave.pull(0, 3)) > 0
            assert slave.status()["ha_client"]["connection_count"] >= 3  # one may reach a port that is closing
            slave.stop()
            master.stop()
            assert assert_copy(slave, master) == log_range(master.commitlog)
            assert_stored(slave.commitlog, answers)

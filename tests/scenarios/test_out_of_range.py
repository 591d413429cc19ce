"""A slave that returns too late, and slaves that start when the master's log no longer starts at 0."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.codes import ResponseCode
from tests.interop.stored_files import compare_commitlogs, log_range, records, segments
from tests.scenarios.brokers import (
    REPOSITORY,
    SEGMENT_SIZE,
    Broker,
    assert_copy,
    eventually,
    slave_of,
    wait_caught_up,
    wait_in_sync,
)
from tests.scenarios.producing import Answer, Client, assert_stored, sequence_of

pytestmark = pytest.mark.processes

RETENTION: dict[str, Any] = {
    "fileReservedTime": 1,
    "deleteWhen": ";".join(f"{hour:02}" for hour in range(24)),
    "cleanResourceInterval": 100,
    "haRetainMaxBytes": 0,
}
OLD_S = 2 * 3600
COMPARED_BYTES_MAX = 64 << 10
"""Bytes before its end that a slave compares with the master's."""


@contextmanager
def forgetful_master(directory: Path, **settings: Any) -> Iterator[Broker]:
    module = "tests.scenarios.impatient_master"
    with Broker(directory, "SYNC_MASTER", module=module, **{**RETENTION, **settings}) as master:
        yield master.start()


def roll(client: Client, first: int, segment_count: int) -> list[Answer]:
    """Send 10 KiB messages that fill `count` segments."""
    return client.send_all(range(first, first + segment_count * SEGMENT_SIZE // 10_000), size=10_000)


def make_old(master: Broker, keep: int) -> list[Path]:
    """Make all segments but the last `keep` look two hours old; those that are kept."""
    found = segments(master.commitlog)
    then = time.time() - OLD_S
    for path in found[:-keep]:
        os.utime(path, (then, then))
    return found[-keep:]


def expire(master: Broker, keep: int) -> int:
    """Make all segments but the last `keep` old, and wait until they are gone; the first offset left."""
    first = int(make_old(master, keep)[0].name)
    eventually("old segments are deleted", lambda: master.status()["commitlog"]["min_offset"] == first)
    return first


def log_bytes(commitlog: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in segments(commitlog)}


def test_a_slave_that_returns_too_late(tmp_path: Path) -> None:
    with (
        forgetful_master(tmp_path / "m") as master,
        slave_of(master, tmp_path / "s") as slave,
        Client(master.addresses["remoting"]) as client,
    ):
        slave.start()
        wait_in_sync(master)
        assert {answer.code for answer in roll(client, 0, 2)} == {ResponseCode.SUCCESS}
        wait_caught_up(slave, master)
        own = slave.end
        slave.stop()
        old = log_bytes(slave.commitlog)
        roll(client, 1000, 5)
        first = expire(master, keep=3)
        assert first > own

        # haOutOfRange=wait, the default, as RocketMQ: it stays as it is, and the master says why.
        slave.start(haOutOfRange="wait")
        [seen] = eventually("the slave is there", lambda: master.status()["ha"]["slaves"])
        asked = seen["transfer_offset"]
        assert own - COMPARED_BYTES_MAX <= asked <= own
        assert (seen["state"], seen["is_in_sync"]) == ("out_of_range", False)
        why = f"asks for offset {asked}, the log begins at {first}"
        answer = client.send(2000)
        assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
        assert why in answer.remark
        wait_for_heartbeats(master)
        # It reconnects once, to ask whether its position was deleted or not written yet, and stays connected.
        line = f"position={asked} first_offset={first} missing_bytes={first - asked}"
        asked = own
        why = f"asks for offset {own}, the log begins at {first}"
        eventually("it has asked", lambda: why in master.status()["ha"]["explanation"])
        wait_for_heartbeats(master)
        ha = master.status()["ha"]
        assert why in ha["explanation"]
        assert [each["state"] for each in ha["slaves"]] == ["out_of_range"]
        assert f"it requests offset {asked}, but the log contains [{first}, " in ha["slaves"][0]["why_not_in_sync"]
        assert (ha["in_sync"], ha["slave_count"], ha["push2_slave_max_offset"]) == (0, 0, own)
        assert sum("ha.slave_out_of_range" in each and line in each for each in master.log().splitlines()) == 1
        shown = ha_status(master)
        assert "out_of_range" in shown
        assert f"it requests offset {asked}" in shown
        status = slave.status()
        assert (status["ha_client"]["condition"], status["is_ready"]) == ("out_of_range", False)
        assert "out of its master's range" in status["not_ready_reason"]
        assert slave.end == own
        slave.stop()
        assert log_bytes(slave.commitlog) == old

        # haOutOfRange=resync: its old files are moved aside, and it starts where the master's log starts.
        slave.start(haOutOfRange="resync")
        wait_in_sync(master)
        wait_caught_up(slave, master)
        link = slave.status()["ha_client"]
        assert (link["resync_count"], link["skipped_bytes"]) == (1, first - own)
        assert f"ha.resync_started own_end={own} master_first_offset={first} skipped_bytes={first - own}" in slave.log()
        assert log_bytes(slave.root / "commitlog.aside-1") == old
        assert (slave.root / "consumequeue.aside-1" / "flights").exists()
        again = client.send(2001)
        assert (again.code, again.remark) == (ResponseCode.SUCCESS, "")
        with Client(slave.addresses["remoting"]) as at_slave:
            [record] = at_slave.pull(again.queue_id, again.queue_offset)
            assert sequence_of(record) == 2001
        slave.stop()
        master.stop()
        assert assert_copy(slave, master) == log_range(master.commitlog)
        assert log_range(slave.commitlog).start == first
        assert_stored(slave.commitlog, [answer, again])

        slave.settings["haOutOfRange"] = "wait"
        slave.start()  # and its store opens like any other
        assert slave.status()["commitlog"]["min_offset"] == first
        slave.stop()


def ha_status(broker: Broker) -> str:
    """Return what `ha status` prints about it."""
    command = [sys.executable, "-m", "ha.cli", "status", "--admin", broker.addresses["admin"]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=REPOSITORY)
    return " ".join(result.stdout.split())


def wait_for_heartbeats(master: Broker) -> None:
    """Wait until the slave has been connected for two heartbeats."""
    eventually("heartbeats", lambda: all(each["connected_s"] > 2.5 for each in master.status()["ha"]["slaves"]))


def test_old_segments_are_kept_for_a_disconnected_slave(tmp_path: Path) -> None:
    """Retention keeps, up to haRetainMaxBytes, what a disconnected slave needs, as long as it needs it."""
    with (
        forgetful_master(tmp_path / "m", haRetainMaxBytes=1 << 30) as master,
        slave_of(master, tmp_path / "s") as slave,
        Client(master.addresses["remoting"]) as client,
    ):
        slave.start()
        wait_in_sync(master)
        answers = roll(client, 0, 2)
        wait_caught_up(slave, master)
        own = slave.end
        slave.stop()
        answers += roll(client, 1000, 4)
        first = int(make_old(master, keep=2)[0].name)
        eventually("a segment is kept", lambda: f"needed_from={own}" in master.log())
        assert master.status()["commitlog"]["min_offset"] == own - own % SEGMENT_SIZE < first
        slave.start()
        wait_in_sync(master)
        wait_caught_up(slave, master)
        eventually("the rest is deleted", lambda: master.status()["commitlog"]["min_offset"] == first)
        slave.stop()
        master.stop()
        assert compare_commitlogs(slave.commitlog, master.commitlog) == log_range(master.commitlog)  # its own is longer
        assert_stored(slave.commitlog, answers)


@pytest.mark.parametrize("start_from", ["first", "last"])
def test_where_a_new_slave_starts(tmp_path: Path, start_from: str) -> None:
    """The whole log with haStartFrom=first, whether it starts at 0 or later; else the last file."""
    with forgetful_master(tmp_path / "m") as master, Client(master.addresses["remoting"]) as client:
        answers = roll(client, 0, 4)
        with slave_of(master, tmp_path / "s1", haStartFrom=start_from) as early:
            answers.append(attach(early, master, client, 1000))
            copied = assert_copy(early, master)  # nothing is being written
        first = expire(master, keep=3)
        assert first > 0
        with slave_of(master, tmp_path / "s2", haStartFrom=start_from) as late:
            answers.append(attach(late, master, client, 1001))
        master.stop()
        last = int(segments(master.commitlog)[-1].name)
        assert last > first
        assert copied.start == (0 if start_from == "first" else last)
        assert assert_copy(late, master) == (first if start_from == "first" else last, log_range(master.commitlog).end)
        assert answers[-2].code == answers[-1].code == ResponseCode.SUCCESS
        if start_from == "first":
            assert_stored(early.commitlog, answers[:-1])
            assert [record.sequence for record in records(early.commitlog)][:100] == list(range(100))


def attach(slave: Broker, master: Broker, client: Client, sequence: int) -> Answer:
    """Start the slave, send one message once it is in sync, and stop it when it has that too."""
    slave.start()
    wait_in_sync(master)
    answer = client.send(sequence)
    wait_caught_up(slave, master)
    slave.stop()
    return answer

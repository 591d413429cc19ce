"""A disk that fills up under a master or a slave: clear refusals, reads as before, and recovery once there is room.

Each store is on its own small tmpfs; a ballast file takes the rest and gives it back.
"""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.codes import ResponseCode
from tests.interop.stored_files import log_range
from tests.scenarios.brokers import (
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

DISK_SIZE = 8 << 20
MESSAGE_SIZE = 20_000
EVEN_WHEN_FULL: dict[str, Any] = {
    "preallocateCommitLog": "true",
    "diskSpaceWarningLevelRatio": 99,
    "diskSpaceCleanForciblyRatio": 99,
    "cleanFileForciblyEnable": "false",
    "cleanResourceInterval": 60_000,
}
"""Puts then go on to the very last segment that fits, instead of stopping at nine tenths; nobody looks at the disk."""


@contextmanager
def small_disk(directory: Path, size: int = DISK_SIZE) -> Iterator[Path]:
    """Mount a disk in memory of `size` bytes at `directory`, which must not exist, while the block runs."""
    directory.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "halog-test", str(directory)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        if os.environ.get("CI") and os.geteuid() == 0:
            pytest.fail(f"mounting a tmpfs failed: {made.stderr}")
        pytest.skip(f"mounting a tmpfs is not permitted here: {made.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


class Ballast:
    """Takes all but some bytes of a file system."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ballast"

    def leave(self, free_bytes: int) -> None:
        with self._path.open("ab", buffering=0) as file:
            try:
                while (room := self._free() - free_bytes) > 0:
                    file.write(bytes(min(room, 1 << 16)))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def _free(self) -> int:
        found = os.statvfs(self._path)
        return found.f_bavail * found.f_frsize

    def drop(self) -> None:
        self._path.unlink()


def test_a_full_disk_under_the_master(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        ballast = Ballast(disk)
        with Broker(tmp_path / "m", "ASYNC_MASTER", root=disk / "store", **EVEN_WHEN_FULL).start() as master:
            with Client(master.addresses["remoting"]) as client:
                stored = client.send_all(range(20), MESSAGE_SIZE)
                assert {answer.code for answer in stored} == {ResponseCode.SUCCESS}
                # A queue whose files are not made yet waits for room, too.
                eventually("all is dispatched", lambda: is_dispatched(master))
                ballast.leave(0)
                tried = client.send_all(range(20, 120), MESSAGE_SIZE)
                stored += [answer for answer in tried if answer.code == ResponseCode.SUCCESS]
                assert_refused([answer for answer in tried if answer.code != ResponseCode.SUCCESS])
                assert "commitlog.segment_create_failed" in master.log()
                refused = client.send(121, topic="more-flights")
                assert refused.code == ResponseCode.TOPIC_NOT_EXIST
                assert "no space left for" in refused.remark
                end = master.end
                for answer in stored[:20]:
                    assert sequence_of(client.pull(answer.queue_id, answer.queue_offset)[0]) == answer.sequence
            # Reads work even after a crash.
            master.kill()
            master.start(cleanResourceInterval=100)
            assert master.end == end
            with Client(master.addresses["remoting"]) as client:
                for answer in stored[:20]:
                    assert sequence_of(client.pull(answer.queue_id, answer.queue_offset)[0]) == answer.sequence
                refused = client.send(200)
                assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
                assert "puts are refused above 99%" in refused.remark

                ballast.drop()
                eventually("sends work again", lambda: client.send(1000, MESSAGE_SIZE).code == ResponseCode.SUCCESS)
                more = client.send_all(range(2000, 2050), MESSAGE_SIZE)
                more.append(client.send(2050, topic="more-flights"))
                assert {answer.code for answer in more} == {ResponseCode.SUCCESS}
                eventually("all is dispatched", lambda: is_dispatched(master))
                for answer in stored + more[:-1]:
                    assert sequence_of(client.pull(answer.queue_id, answer.queue_offset)[0]) == answer.sequence
            master.stop()
            assert_stored(master.commitlog, stored + more)
            master.start()
            assert master.status()["store"]["recovered_clean"] is True
            master.stop()


def test_a_full_disk_under_a_log_that_is_not_preallocated(tmp_path: Path) -> None:
    """The node stops with the reason, and has every acknowledged message once there is room."""
    with small_disk(tmp_path / "disk") as disk:
        ballast = Ballast(disk)
        settings = {**EVEN_WHEN_FULL, "preallocateCommitLog": "false"}
        with Broker(tmp_path / "m", "ASYNC_MASTER", root=disk / "store", **settings).start() as master:
            with Client(master.addresses["remoting"]) as client:
                stored = client.send_all(range(10), MESSAGE_SIZE)
                eventually("all is dispatched", lambda: is_dispatched(master))
                ballast.leave(4 * MESSAGE_SIZE)
                with suppress(OSError, AssertionError):  # the connection ends
                    for sequence in range(10, 40):
                        answer = client.send(sequence, MESSAGE_SIZE)
                        if answer.code == ResponseCode.SUCCESS:
                            stored.append(answer)
            assert master.process.wait_exit() == 74
            assert "No space left on device" in master.log()
            assert 10 <= len(stored) < 40
            ballast.drop()
            master.start()
            with Client(master.addresses["remoting"]) as client:
                assert client.send(1000, MESSAGE_SIZE).code == ResponseCode.SUCCESS
                for answer in stored:
                    assert sequence_of(client.pull(answer.queue_id, answer.queue_offset)[0]) == answer.sequence
            master.stop()


def assert_refused(answers: list[Answer]) -> None:
    assert len(answers) >= 50
    assert {answer.code for answer in answers} == {ResponseCode.SYSTEM_ERROR}
    for answer in answers:
        assert answer.remark.startswith("create mapped file failed")
        assert "no space left for" in answer.remark


def is_dispatched(broker: Broker) -> bool:
    commitlog = broker.status()["commitlog"]
    return bool(commitlog["dispatched_offset"] == commitlog["max_offset"])


def test_a_nearly_full_disk_refuses_sends(tmp_path: Path) -> None:
    """Above diskSpaceWarningLevelRatio sends are refused with the reason; below it they work again."""
    settings: dict[str, Any] = {"cleanResourceInterval": 100, "cleanFileForciblyEnable": "false"}
    with small_disk(tmp_path / "disk") as disk:
        ballast = Ballast(disk)
        with (
            Broker(tmp_path / "m", "ASYNC_MASTER", root=disk / "store", **settings).start() as master,
            Client(master.addresses["remoting"]) as client,
        ):
            stored = client.send(1)
            assert stored.code == ResponseCode.SUCCESS
            ballast.leave(DISK_SIZE // 20)
            eventually("puts are refused", lambda: not master.status()["store"]["is_writable"])
            refused = client.send(2)
            assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert "disk is 9" in refused.remark
            assert "puts are refused above 90%" in refused.remark
            status = master.status()
            assert not status["is_ready"]
            assert "puts are refused above 90%" in status["not_ready_reason"]
            assert [sequence_of(record) for record in client.pull(stored.queue_id)] == [1]
            ballast.drop()
            eventually("puts are taken", lambda: master.status()["is_ready"])
            assert client.send(3).code == ResponseCode.SUCCESS
            assert master.log().count("store.became_read_only") == master.log().count("store.became_writable") == 1
            master.stop()


def test_a_full_disk_under_the_slave(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        ballast = Ballast(disk)
        with (
            Broker(tmp_path / "m", "SYNC_MASTER", slaveTimeout=300).start() as master,
            slave_of(master, tmp_path / "s", root=disk / "store", **EVEN_WHEN_FULL) as slave,
            Client(master.addresses["remoting"]) as client,
        ):
            slave.start()
            wait_in_sync(master)
            assert client.send(0).code == ResponseCode.SUCCESS
            eventually("the slave has its queue's files", lambda: is_dispatched(slave))
            ballast.leave(0)
            answers = client.send_all(range(1, 100), MESSAGE_SIZE)
            assert answers[-1].code in (ResponseCode.FLUSH_SLAVE_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE)
            eventually("the slave says why", lambda: link_of(slave)["condition"] == "append_failed")
            link = link_of(slave)
            assert "no space left for" in link["detail"]
            assert "ha.client_append_failed" in slave.log()
            assert not slave.status()["is_ready"]
            held = slave.end
            assert 0 < held < master.end
            assert held % SEGMENT_SIZE == 0
            with Client(slave.addresses["remoting"]) as at_slave:
                assert sequence_of(at_slave.pull(0)[0]) == 0

            ballast.drop()
            wait_in_sync(master)
            wait_caught_up(slave, master)
            again = client.send(1000)
            assert again.code == ResponseCode.SUCCESS
            with Client(slave.addresses["remoting"]) as at_slave:
                [record] = at_slave.pull(again.queue_id, again.queue_offset)
                assert sequence_of(record) == 1000
            slave.stop()
            master.stop()
            assert assert_copy(slave, master) == log_range(master.commitlog)
            assert_stored(slave.commitlog, [*answers, again])


def link_of(slave: Broker) -> dict[str, Any]:
    found: dict[str, Any] = slave.status()["ha_client"]
    return found

"""A broker that runs out of file descriptors serves existing connections, logs it once, and recovers."""

import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ha.protocol.codes import ResponseCode
from tests.faults.checking import check_run
from tests.faults.producing import JournaledProducer
from tests.load.footprint import cpu_s
from tests.scenarios.brokers import Broker, eventually, slave_of, wait_caught_up, wait_in_sync
from tests.scenarios.producing import Client

pytestmark = pytest.mark.processes

FILES_MAX = 120
STRANGER_COUNT = 200
WATCHED_S = 2.0
CPU_SHARE_MAX = 0.4
LOG_LINES_MAX = 40
"""Maximum log lines in `WATCHED_S` without a descriptor, counting each line of a traceback"""


@contextmanager
def pair(directory: Path, files_max: int) -> Iterator[tuple[Broker, Broker, JournaledProducer]]:
    """A master with a descriptor limit, its slave, and a producer under load; at the end everything must be intact."""
    if shutil.which("prlimit") is None:
        pytest.skip("there is no prlimit (util-linux)")
    master = Broker(directory / "master", "SYNC_MASTER", mappedFileSizeCommitLog=65536)
    master.prefix = ["prlimit", f"--nofile={files_max}:{files_max}"]
    with master.start(), slave_of(master, directory / "slave", mappedFileSizeCommitLog=65536).start() as slave:
        wait_in_sync(master)
        # Pauses, so that the measured CPU time is not that of the load.
        producer = JournaledProducer(0, lambda: master.addresses["remoting"], seed=9, window=8, pause_s=0.1)
        assert producer.wait_answers(5, 20.0)
        yield master, slave, producer
        eventually("a newcomer is served", lambda: is_served(master))
        assert producer.wait_answers(5, 20.0)
        producer.stop()
        assert producer.break_count == 0
        wait_in_sync(master)
        wait_caught_up(slave, master)
        slave.stop()
        master.stop()
        assert check_run([master, slave], [producer], []).all == []


def test_faults_leak_no_file_descriptor(tmp_path: Path) -> None:
    with pair(tmp_path, 1024) as (master, _, producer):
        resource.prlimit(master.pid, resource.RLIMIT_NOFILE, (descriptor_count(master), 1024))
        with crowd(master.addresses["remoting"], 3):
            used_s, began, logged = cpu_s(master.pid), time.monotonic(), len(master.log().splitlines())
            marked = len(producer.answered)
            time.sleep(WATCHED_S)
            share = (cpu_s(master.pid) - used_s) / (time.monotonic() - began)
            log_lines = len(master.log().splitlines()) - logged
            codes = {each.answer.code for each in producer.answered[marked:]}
            print(f"CPU {share:.0%}, {log_lines} lines logged, {len(producer.answered) - marked} answers {codes}")
            assert master.process.popen.poll() is None, master.log()[-3000:]
            assert share < CPU_SHARE_MAX
            assert log_lines < LOG_LINES_MAX
            # Until the segment is full; then the failure to create another one is logged.
            assert ResponseCode.SUCCESS in codes
            assert codes <= {ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR}
        resource.prlimit(master.pid, resource.RLIMIT_NOFILE, (1024, 1024))


def test_unknown_clients_can_not_exhaust_file_descriptors(tmp_path: Path) -> None:
    with pair(tmp_path, FILES_MAX) as (master, _, producer):
        marked = len(producer.answered)
        with crowd(master.addresses["remoting"], STRANGER_COUNT), crowd(master.addresses["ha"], STRANGER_COUNT):
            assert producer.wait_answers(150, 60.0)  # over segments, queue files and checkpoints
            assert descriptor_count(master) < FILES_MAX
            assert {each.answer.code for each in producer.answered[marked:]} == {ResponseCode.SUCCESS}
            assert master.process.popen.poll() is None


@contextmanager
def crowd(address: str, count: int) -> Iterator[None]:
    """`count` silent connections, or attempts at them."""
    host, _, port = address.rpartition(":")
    strangers = []
    for _ in range(count):
        stranger = socket.socket()
        stranger.setblocking(False)
        with suppress(BlockingIOError):
            stranger.connect((host, int(port)))
        strangers.append(stranger)
    yield
    for stranger in strangers:
        stranger.close()


def descriptor_count(broker: Broker) -> int:
    return len(os.listdir(f"/proc/{broker.pid}/fd"))


def is_served(broker: Broker) -> bool:
    try:
        with Client(broker.addresses["remoting"], 2.0) as client:
            return client.send(4_000_000, topic="newcomers").code == ResponseCode.SUCCESS
    except (OSError, AssertionError):
        return False

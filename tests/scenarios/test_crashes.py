"""kill -9 at random moments under load: acknowledged messages stay, and the logs stay equal."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from ha.protocol.codes import ResponseCode
from tests.interop.stored_files import log_range, queue_entries, records
from tests.scenarios.brokers import SEGMENT_SIZE, Broker, assert_copy, eventually, slave_of, wait_caught_up
from tests.scenarios.producing import Answer, Load, assert_stored

pytestmark = pytest.mark.processes

SEED = 20_240_607
# A slave comes back to a restarted master after 5 s, so these are interleaved with crashes of both.
VICTIMS = ("slave", "both", "slave", "master", "slave", "both", "both", "slave", "both", "slave", "master", "slave")
ANSWERS_MAX = 1500


@pytest.mark.parametrize(("flush", "victims"), [("ASYNC_FLUSH", VICTIMS), ("SYNC_FLUSH", VICTIMS[:5])])
def test_crashes_lose_no_acknowledged_message(tmp_path: Path, flush: str, victims: Sequence[str]) -> None:
    chance = random.Random(SEED)
    answers: list[Answer] = []
    next_sequence = 0
    with (
        Broker(tmp_path / "m", "SYNC_MASTER", slaveTimeout=1000, flushDiskType=flush).start() as master,
        slave_of(master, tmp_path / "s", flushDiskType=flush).start() as slave,
    ):
        for number, victim in enumerate(victims):
            load = Load(master.addresses["remoting"], next_sequence, chance)
            load.wait_answers(chance.randrange(1, ANSWERS_MAX))
            if victim != "master":
                slave.kill()
            if victim != "slave":
                master.kill()
            else:
                load.wait_answers(len(load.answers) + chance.randrange(1, 200))
            answers += load.stop()
            next_sequence = load.next_sequence
            print(f"seed {SEED}, cycle {number}: {victim} killed, {len(answers)} answers")
            assert_true_at_rest(master if victim != "slave" else None, slave if victim != "master" else None, answers)
            for broker, others in ((master, "slave"), (slave, "master")):
                if victim != others:
                    broker.start()
        wait_caught_up_after_crashes(slave, master)
        slave.stop()
        master.stop()

        codes = {answer.code for answer in answers}
        assert codes <= {ResponseCode.SUCCESS, ResponseCode.SLAVE_NOT_AVAILABLE, ResponseCode.FLUSH_SLAVE_TIMEOUT}
        assert sum(answer.code == ResponseCode.SUCCESS for answer in answers) > 80 * len(victims)
        common = assert_copy(slave, master)
        assert (common, common.start) == (log_range(master.commitlog), 0)
        assert common.end > 2 * SEGMENT_SIZE
        for broker in (master, slave):
            assert_stored(broker.commitlog, answers)
            assert_whole(broker)


def assert_true_at_rest(master: Broker | None, slave: Broker | None, answers: list[Answer]) -> None:
    """Check the files of a killed process before recovery: everything acknowledged is there."""
    if master is not None:
        assert_stored(master.commitlog, answers)
    if slave is not None:
        assert_stored(slave.commitlog, [answer for answer in answers if answer.code == ResponseCode.SUCCESS])


def wait_caught_up_after_crashes(slave: Broker, master: Broker) -> None:
    eventually("the slave follows again", lambda: master.status()["ha"]["slave_count"] == 1)
    wait_caught_up(slave, master)


def assert_whole(broker: Broker) -> None:
    """No sequence twice, queue offsets dense, and each consume queue says exactly what the log says."""
    seen: set[int] = set()
    queues: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for record in records(broker.commitlog):
        assert record.sequence is not None
        assert record.sequence not in seen
        seen.add(record.sequence)
        queue = queues[record.topic, record.queue_id]
        assert record.queue_offset == len(queue)
        queue.append((record.physical_offset, record.size))
    entries = queue_entries(broker.root)
    assert {key: [entry[:2] for entry in queue] for key, queue in entries.items()} == queues

"""A SYNC_MASTER that ends in the middle of 200 requests, in order or killed, at a random moment.

What must hold: each request was answered once or its connection was closed; whatever was said to be stored is in the
master's files, at once and after its next start; whatever was SEND_OK is on its slave as well; nothing is there twice.
"""

import random
import signal
import time
from collections import Counter
from enum import Enum
from pathlib import Path

import msgspec

from ha.protocol.codes import ResponseCode
from tests.interop.stored_files import compare_commitlogs, records
from tests.scenarios.brokers import Broker, slave_of, wait_in_sync
from tests.scenarios.producing import STORED_CODES, Answer, Load, assert_stored

CONNECTION_COUNT = 4
WINDOW = 50
IN_FLIGHT = CONNECTION_COUNT * WINDOW
ANSWERS_MAX = 2000
"""Maximum number of answers before the end."""
SEQUENCES_EACH = 10_000_000


class Kind(Enum):
    """How the master ends."""

    STOP = "SIGTERM"
    KILL = "SIGKILL"


class StopTally(msgspec.Struct, frozen=True):
    """What became of all requests of some runs. `unanswered`: their connection was closed; `stored_unanswered`: of
    these, stored nevertheless, which a client has to expect."""

    runs: int = 0
    sent: int = 0
    statuses: Counter[str] = msgspec.field(default_factory=Counter)
    unanswered: int = 0
    stored_unanswered: int = 0


def stop_under_load(directory: Path, kind: Kind, *, seed: int, tally: StopTally) -> StopTally:
    """One master with one slave, loaded and ended. AssertionError with the first lie; else `tally` with this run."""
    directory.mkdir(parents=True)
    chance = random.Random(seed)
    flush = chance.choice(("ASYNC_FLUSH", "ASYNC_FLUSH", "SYNC_FLUSH"))
    is_slave_stuck = chance.random() < 0.5
    settings = {"flushDiskType": flush, "slaveTimeout": 20_000, "shutdownTimeout": 8_000}
    with (
        Broker(directory / "m", "SYNC_MASTER", **settings).start() as master,  # type: ignore[arg-type]
        slave_of(master, directory / "s", flushDiskType=flush).start() as slave,
    ):
        wait_in_sync(master)
        loads = [
            Load(master.addresses["remoting"], number * SEQUENCES_EACH, random.Random(chance.random()), window=WINDOW)
            for number in range(CONNECTION_COUNT)
        ]
        chance.choice(loads).wait_answers(chance.randrange(1, ANSWERS_MAX // CONNECTION_COUNT))
        if is_slave_stuck:  # then all that is in flight waits for it at the end
            slave.pause()
        time.sleep(chance.random() * 0.02)
        if kind is Kind.STOP:
            master.stop()
        else:
            master.process.signal(signal.SIGKILL)
            master.process.wait_exit()
        answers = [answer for load in loads for answer in load.stop()]
        with_slave = "slave stuck" if is_slave_stuck else "slave well"
        said = f"seed {seed}, {kind.value}, {flush}, {with_slave}: {Counter(answer.code for answer in answers)}"
        print(said)
        sent = sum(load.next_sequence - number * SEQUENCES_EACH for number, load in enumerate(loads))
        assert not any(isinstance(load.error, TimeoutError) for load in loads), f"{said}: neither answered nor closed"
        answered = {answer.sequence for answer in answers}
        assert len(answered) == len(answers), f"{said}: answered twice"
        assert 0 <= sent - len(answers) <= IN_FLIGHT, said

        assert_true(master, slave, answers)  # of a stuck slave what it has now, not what is still in its socket
        if is_slave_stuck:
            slave.resume()
        master.start()  # it recovers, and may cut what it finds torn: none of that was promised
        master.stop()
        slave.stop()
        assert_true(master, slave, answers)
        compare_commitlogs(slave.commitlog, master.commitlog)
        stored = Counter(record.sequence for record in records(master.commitlog))
        assert max(stored.values()) == 1, f"{said}: stored twice"
        not_stored = {answer.sequence for answer in answers if answer.code not in STORED_CODES}
        assert not not_stored & set(stored), f"{said}: stored, though it was said not to be"
    return StopTally(
        runs=tally.runs + 1,
        sent=tally.sent + sent,
        statuses=tally.statuses + Counter(ResponseCode(answer.code).name for answer in answers),
        unanswered=tally.unanswered + sent - len(answers),
        stored_unanswered=tally.stored_unanswered + len(set(stored) - answered),
    )


def assert_true(master: Broker, slave: Broker, answers: list[Answer]) -> None:
    """Hold the answers against both nodes' files."""
    assert_stored(master.commitlog, answers)
    assert_stored(slave.commitlog, [answer for answer in answers if answer.code == ResponseCode.SUCCESS])

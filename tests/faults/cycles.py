"""Crash cycles: under load a process is killed, paused or stopped at a random moment, checked, and restarted.

After each cycle the files of a dead node are checked against its answers; at the end of a run faults stop, the replicas
have to converge, and independent checkers read every node's files (checking.py).

All random choices come from the seed, but the timing is that of a real machine: a run can't be repeated exactly.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ha.client import ReadFrom
from ha.protocol.codes import ResponseCode
from tests.faults.checking import check_run
from tests.faults.cluster import Cluster, Victim, pick
from tests.faults.consuming import JournaledConsumer
from tests.faults.producing import JournaledProducer, count_statuses
from tests.scenarios.producing import Answer, assert_stored
from tests.scenarios.test_full_disk import EVEN_WHEN_FULL, Ballast, small_disk

PROGRESS_S = 180.0
PAUSE_S = (0.1, 2.5)
CYCLES_EACH = 50
"""Cycles of a run on one pair of stores; then a new configuration is drawn."""

KINDS = {
    "kill master": 3.0,
    "kill slave": 3.0,
    "kill master and slaves": 2.0,
    "kill everything": 1.0,
    "kill name server": 0.5,
    "pause master": 1.5,
    "pause slave": 2.0,
    "pause, then kill master": 1.0,
    "pause, then kill slave": 1.0,
    "stop master": 1.0,
    "stop slave": 1.0,
    "kill stopping master": 1.0,
    "kill stopping slave": 0.5,
    "kill starting master": 1.5,
    "kill starting slave": 1.0,
    "fill disks": 2.0,
}
"""Kinds of cycles and their weights"""
CAN_FILL_DISKS = os.geteuid() == 0
if not CAN_FILL_DISKS:
    del KINDS["fill disks"]
DISK_SIZE = 2 << 30
"""Size in bytes of the disk that a run's brokers share, so that it can be filled"""
FREE_BYTES = (0, 700, 5_000, 60_000)
"""Space left on a filled disk: the write that exceeds it is accepted in part"""


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


@dataclass
class Outcome:
    """The result of one or several runs."""

    cycles: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    acknowledged: int = 0
    """Answered with PUT_OK"""
    lost: int = 0
    """Acknowledged messages that are missing on a node that must have them"""
    consumed: int = 0
    checked_bytes: int = 0
    recoveries: int = 0
    """Starts that found the abort file of a crash"""
    violations: list[str] = field(default_factory=list)
    configurations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        self.cycles += other.cycles
        self.statuses += other.statuses
        self.sent += other.sent
        self.acknowledged += other.acknowledged
        self.lost += other.lost
        self.consumed += other.consumed
        self.checked_bytes += other.checked_bytes
        self.recoveries += other.recoveries
        self.violations += other.violations
        self.configurations += other.configurations
        self.seconds += other.seconds


@dataclass(frozen=True)
class Plan:
    """The configuration of one run."""

    seed: int
    cycle_count: int
    slave_count: int
    flush: str
    in_sync_replicas: int | None = None
    """Keys inSyncReplicas and minInSyncReplicas of 5.x; None: the rule of 4.9, one slave is enough"""
    learns_master: bool = False
    producer_count: int = 2
    has_consumers: bool = True
    answers_max: int = 400
    """Maximum number of answers that a cycle waits for before its fault"""
    pause_s: tuple[float, float] = PAUSE_S
    slave_module: str = "ha.slave"
    kinds: tuple[str, ...] | None = None
    """The kinds of the cycles in order, instead of drawn ones"""

    def __str__(self) -> str:
        rule = "one slave" if self.in_sync_replicas is None else f"{self.in_sync_replicas} replicas"
        found = "by name server" if self.learns_master else "by address"
        return (
            f"seed {self.seed}: {self.cycle_count} cycles, {self.slave_count} slaves ({found}), {self.flush}, "
            f"PUT_OK on {rule}"
        )

    @property
    def slaves_promised(self) -> int:
        """The number of slaves that must have a message answered with PUT_OK."""
        return 1 if self.in_sync_replicas is None else self.in_sync_replicas - 1


def draw_plan(seed: int, cycle_count: int) -> Plan:
    chance = random.Random(seed)
    slave_count = chance.choice([1, 2, 2])
    return Plan(
        seed=seed,
        cycle_count=cycle_count,
        slave_count=slave_count,
        flush=chance.choice(["ASYNC_FLUSH", "ASYNC_FLUSH", "SYNC_FLUSH"]),
        in_sync_replicas=chance.choice([None, None, *range(2, slave_count + 2)]),
        learns_master=chance.random() < 0.3,
    )


class Run:
    """One cluster under load, cycle after cycle."""

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.outcome = Outcome(configurations=[str(plan)])
        self._directory = directory
        self._say = say
        self._chance = random.Random(f"{plan.seed} cycles")
        self._marks: dict[tuple[str, int], int] = {}

    def run(self) -> Outcome:
        """Runs it; BrokenPromiseError with details if a promise was broken, which also keeps the stores."""
        plan, began = self.plan, time.monotonic()
        settings: dict[str, Any] = {"flushDiskType": plan.flush, **EVEN_WHEN_FULL}
        self._ballast = Ballast(self._directory)
        if plan.in_sync_replicas is not None:
            settings |= {"inSyncReplicas": plan.in_sync_replicas, "minInSyncReplicas": plan.in_sync_replicas}
            settings["totalReplicas"] = plan.slave_count + 1
        with (
            small_disk(self._directory, DISK_SIZE) if CAN_FILL_DISKS else nullcontext(),  # only root can mount one
            Cluster(
                self._directory,
                slave_count=plan.slave_count,
                learns_master=plan.learns_master,
                slave_module=plan.slave_module,
                **settings,
            ) as self.cluster,
        ):
            self.cluster.wait_converged()
            self._producers = [
                JournaledProducer(number, self.cluster.address, seed=plan.seed) for number in range(plan.producer_count)
            ]
            consumers: list[JournaledConsumer] = []
            try:
                self._wait_progress(1)  # creates the topic
                if plan.has_consumers:
                    names = self.cluster.name_server.address
                    consumers = [JournaledConsumer(names, each) for each in (ReadFrom.SUGGESTED, ReadFrom.SLAVE)]
                for number in range(plan.cycle_count):
                    kind = plan.kinds[number] if plan.kinds else pick(self._chance, KINDS)
                    self._cycle(number, kind)
                self._check_alive()
                for producer in self._producers:
                    producer.stop()
                self._finish(consumers)
            finally:
                for producer in self._producers:
                    producer.ask_to_stop()
                for consumer in consumers:
                    consumer.ask_to_stop()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # ---- one cycle

    def _cycle(self, number: int, kind: str) -> None:
        chance, cluster = self._chance, self.cluster
        self._wait_progress(chance.randint(1, self.plan.answers_max))
        if chance.random() < 0.6:
            cluster.wait_followed(self.plan.slaves_promised)
        time.sleep(chance.random() * 0.2)
        slave = chance.choice(cluster.slaves)
        self._say(f"cycle {number}: {kind}")
        dead = self._strike(kind, slave)
        time.sleep(chance.random() * 0.5)
        for broker in dead:
            self._check_at_rest(broker)
        chance.shuffle(dead)
        for broker in dead:
            broker.start()
        self._check_alive()
        self.outcome.cycles[kind] += 1

    def _strike(self, kind: str, slave: Victim) -> list[Victim]:
        """Injects the fault `kind`; returns the brokers that are dead afterwards."""
        chance, cluster = self._chance, self.cluster
        master = cluster.master
        victim = slave if kind.endswith("slave") else master
        match kind:
            case "kill master" | "kill slave":
                victim.kill()
                return [victim]
            case "kill master and slaves":
                order = list(cluster.brokers)
                chance.shuffle(order)
                for broker in order:
                    broker.kill()
                return order
            case "kill everything":
                cluster.name_server.kill()
                dead = self._strike("kill master and slaves", slave)
                cluster.name_server.start()
                return dead
            case "kill name server":
                cluster.name_server.kill()
                time.sleep(chance.random())
                cluster.name_server.start()
                return []
            case "fill disks":
                self._ballast.leave(chance.choice(FREE_BYTES))
                time.sleep(chance.uniform(*self.plan.pause_s))
                self._ballast.drop()
                return []
            case "pause master" | "pause slave":
                victim.pause()
                time.sleep(chance.uniform(*self.plan.pause_s))
                victim.resume()
                return []
            case "pause, then kill master" | "pause, then kill slave":
                victim.pause()
                time.sleep(chance.uniform(*self.plan.pause_s))
                victim.kill()
                return [victim]
            case "stop master" | "stop slave":
                victim.stop()
                return [victim]
            case "kill stopping master" | "kill stopping slave":
                victim.stop_and_kill(chance.random() * 0.4)
                return [victim]
            case "kill starting master" | "kill starting slave":
                victim.kill()
                for _ in range(chance.randint(1, 3)):
                    victim.start_and_kill(chance.uniform(0.1, 1.5))
                return [victim]
        raise AssertionError(kind)

    # ---- looking

    def _wait_progress(self, count: int) -> None:
        producer = self._chance.choice(self._producers)
        if not producer.wait_answers(count, PROGRESS_S):
            raise BrokenPromiseError(
                f"{self.plan}: no {count} answers within {PROGRESS_S} s; failure {producer.failure}"
            )

    def _check_alive(self) -> None:
        for broker in self.cluster.brokers:
            if not broker.is_running:
                raise BrokenPromiseError(
                    f"{self.plan}: {broker.directory.name} ended on its own\n{broker.log()[-3000:]}"
                )
        for producer in self._producers:
            if producer.failure is not None:
                raise producer.failure

    def _check_at_rest(self, broker: Victim) -> None:
        """Checks a dead node's files against the answers since the last check, before recovery."""
        if broker.is_slave and self.plan.slaves_promised < self.plan.slave_count:
            return  # any other slave may be the one that has it
        for producer in self._producers:
            answers = [each.answer for each in producer.answered]
            mark = self._marks.get((broker.directory.name, producer.number), 0)
            promised = [
                answer for answer in answers[mark:] if not broker.is_slave or answer.code == ResponseCode.SUCCESS
            ]
            try:
                assert_stored(broker.commitlog, promised)
            except Exception as error:
                raise BrokenPromiseError(
                    f"{self.plan}: {broker.directory.name} lacks what was promised: {error!r}"
                ) from error
            self._marks[broker.directory.name, producer.number] = len(answers)

    def _finish(self, consumers: list[JournaledConsumer]) -> None:
        cluster, outcome = self.cluster, self.outcome
        cluster.wait_converged()
        end = cluster.master.status()["commitlog"]["max_offset"]
        self.wait_consumed(consumers)
        for consumer in consumers:
            consumer.stop()
        for broker in cluster.brokers:
            outcome.recoveries += broker.log().count("clean=False")
            if "Traceback" in broker.log():
                outcome.violations.append(f"{broker.directory.name} logged a traceback")
        for broker in reversed(cluster.brokers):
            broker.stop()
        answers: list[Answer] = [each.answer for producer in self._producers for each in producer.answered]
        outcome.statuses = count_statuses(answers)
        outcome.sent = sum(len(producer.sent) for producer in self._producers)
        outcome.acknowledged = outcome.statuses["SUCCESS"]
        outcome.consumed = sum(len(queue) for consumer in consumers for queue in consumer.consumed.values())
        outcome.checked_bytes = end * len(cluster.brokers)
        found = check_run(
            cluster.brokers,
            self._producers,
            consumers,
            is_sync_flush=self.plan.flush == "SYNC_FLUSH",
            slaves_promised=self.plan.slaves_promised,
        )
        outcome.lost = len(found.lost)
        outcome.violations += found.all[:40]
        if outcome.violations:
            raise BrokenPromiseError(f"{self.plan}\n" + "\n".join(outcome.violations))

    def wait_consumed(self, consumers: Sequence[JournaledConsumer]) -> None:
        """After the replicas have converged, waits until each consumer has queried every queue again and reached its
        end.

        Consumers with equal message counts that receive nothing for a while may both be waiting for a route."""
        # The next round to end may have started earlier.
        enough = {consumer: consumer.at_end_count + 2 for consumer in consumers}
        give_up = time.monotonic() + PROGRESS_S
        for consumer, count in enough.items():
            while consumer.at_end_count < count and consumer.failure is None:
                if time.monotonic() > give_up:
                    trouble = f"{consumer.name} not at the end within {PROGRESS_S} s, {consumer.error_count} errors"
                    raise BrokenPromiseError(f"{self.plan}: {trouble}")
                time.sleep(0.1)


def run_cycles(
    seed: int, cycle_count: int, directory: Path, say: Callable[[str], None], *, cycles_each: int = CYCLES_EACH
) -> Outcome:
    """Runs at most `cycles_each` cycles at a time until `cycle_count` are done; deletes stores of passed runs."""
    total = Outcome()
    for number in itertools.count():
        left = cycle_count - sum(total.cycles.values())
        if left <= 0:
            return total
        plan = draw_plan(seed + number, min(left, cycles_each))
        say(str(plan))
        total.add(Run(plan, directory / f"run-{plan.seed}", say).run())
        say(f"so far {sum(total.cycles.values())} cycles, {total.acknowledged:,} acknowledged, {total.lost} lost")
        shutil.rmtree(directory / f"run-{plan.seed}")
    return total

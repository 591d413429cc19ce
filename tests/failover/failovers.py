"""Failovers in any number: the master of a group of real processes is killed, frozen, cut off, told to hand over,
stopped, or loses power, alone or with another member. Beside these: a second process with a member's broker id is
started, and etcd is restored from a state of the same term in which the sync-state set was larger.

Producers go on whatever happens, each with one message in flight, always to the same queue, and send a message again
until it is acknowledged. A consumer reads every queue meanwhile. What has to hold of them afterwards:

- Every acknowledged message is in the log, at the queue offset that its producer got, and no queue offset was given
  of two messages: not more than one master has acknowledged.
- To the consumer the messages of a producer come in order: none is left out, and one that comes late came before.
- Timer messages (timed.py) are delivered at or after their time, and each acknowledged one is.

With `languages`, RocketMQ 5's clients (grpc_clients.py) send and receive as well; checkers/grpc_clients.py says what
they rely on.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from ha.client import Message, MessageQueue, Producer, PullConsumer, PullStatus, SendStatus
from ha.errors import ClientError
from tests.failover.grpc_clients import SETTINGS, GrpcClients
from tests.failover.members import LOOPBACK, Members, Places, open_group, read_topic, until
from tests.failover.timed import TimedMessages
from tests.faults.switch import OWN, Switch

TOPIC = "Ordered"
IDS = (1, 2, 3)
HOSTS = tuple(f"m{id_}" for id_ in IDS)
CHANGES = ("kill", "freeze", "cut", "switch", "stop", "power", "power-two")
"""Kinds of faults after which another member is master"""
KINDS = (*CHANGES, "duplicate", "restored")
PROGRESS_S = 60.0
SWITCHES_MAX = 5
GRPC_ACKNOWLEDGED = 20
"""Messages that each gRPC client acknowledges in each group between two faults: all have found the new master"""
AGAIN_S = 0.02
"""A producer's pause after a send that failed"""


@dataclass
class Outcome:
    """The results of a run. Times in s."""

    gaps: dict[str, list[float]] = field(default_factory=dict)
    """Kind of failover -> for each, the longest time around it without an acknowledgement"""
    acknowledged: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Sends that were not acknowledged, by reason; each was sent again"""
    consumed: int = 0
    redelivered: int = 0
    """Messages that the consumer got again: the producer had resent them, or the consumer's offset was reset"""
    sent_back: int = 0
    """How often a queue ended before what the consumer had already read of it"""
    refused: Counter[str] = field(default_factory=Counter)
    """Planned switches that were not done, by reason; each was requested again"""
    timers: int = 0
    """Timer messages that were acknowledged"""
    timers_repeated: int = 0
    """Timer messages that were delivered again"""
    grpc: Counter[str] = field(default_factory=Counter)
    """What RocketMQ 5's clients did"""
    violations: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        for kind, gaps in other.gaps.items():
            self.gaps.setdefault(kind, []).extend(gaps)
        self.acknowledged += other.acknowledged
        self.failed += other.failed
        self.consumed += other.consumed
        self.redelivered += other.redelivered
        self.sent_back += other.sent_back
        self.refused += other.refused
        self.timers += other.timers
        self.timers_repeated += other.timers_repeated
        self.grpc += other.grpc
        self.violations += other.violations

    def lines(self) -> Iterator[tuple[str, str]]:
        """Return the results, for a table."""
        for kind, gaps in self.gaps.items():
            yield f"failovers: {kind}", f"{len(gaps)}"
            yield (
                "  nothing acknowledged, s",
                f"median {statistics.median(gaps):.2f}, from {min(gaps):.2f} to {max(gaps):.2f}",
            )
        yield "acknowledged", f"{self.acknowledged:,}"
        for reason, count in self.failed.most_common():
            yield f"sent again after {reason}", f"{count:,}"
        yield "given to the consumer", f"{self.consumed:,}, {self.redelivered:,} of them again"
        yield "the consumer was sent back", f"{self.sent_back:,} times"
        yield "timer messages", f"{self.timers:,}, {self.timers_repeated:,} of them delivered again"
        for reason, count in self.refused.items():
            yield f"planned switch not done: {reason}", f"{count:,}"
        for what, count in self.grpc.items():
            yield f"gRPC clients: {what}", f"{count:,}"
        yield "broken promises", f"{len(self.violations)}"


class Producers:
    """`count` senders, each with its own queue."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.told: dict[tuple[int, int], str] = {}
        """(queue id, queue offset) -> the message that was acknowledged with it"""
        self.acknowledged_at: list[float] = []
        self.failed: Counter[str] = Counter()
        self.violations: list[str] = []
        self._is_over = False
        self._ended = trio.Event()

    async def run(self, name_server: str, queues: Sequence[MessageQueue]) -> None:
        async with Producer(name_server, group="ordered") as producer, trio.open_nursery() as nursery:
            for sender in range(self._count):
                nursery.start_soon(self._send_on, producer, sender, queues[sender % len(queues)])
        self._ended.set()

    async def stop(self) -> None:
        """Stop sending; return after the last answer."""
        self._is_over = True
        with trio.fail_after(PROGRESS_S):
            await self._ended.wait()

    async def _send_on(self, producer: Producer, sender: int, queue: MessageQueue) -> None:
        number = 0
        while not self._is_over:
            body = f"{sender}/{number}"
            try:
                result = await producer.send(Message(TOPIC, body.encode()), queue=queue)
            except ClientError as error:
                self.failed[type(error).__name__] += 1
                await trio.sleep(AGAIN_S)
                continue
            if result.status is not SendStatus.SEND_OK:
                self.failed[result.status.name] += 1
                await trio.sleep(AGAIN_S)
                continue
            self.acknowledged_at.append(trio.current_time())
            place = queue.queue_id, result.queue_offset
            if self.told.setdefault(place, body) != body:
                self.violations.append(f"{place} was acknowledged for {self.told[place]} and for {body}")
            number += 1

    async def go_on(self, count: int) -> None:
        """Wait until `count` more are acknowledged."""
        wanted = len(self.acknowledged_at) + count
        await until(f"{count} acknowledgements", lambda: len(self.acknowledged_at) >= wanted, PROGRESS_S)

    def gap_since(self, number: int) -> float:
        """The longest time without an acknowledgement since the one of this number."""
        at = self.acknowledged_at[max(0, number - 1) :]
        return max(after - before for before, after in itertools.pairwise(at))


class OrderedConsumer:
    """Reads each queue from its start, from the present master."""

    def __init__(self) -> None:
        self.consumed = 0
        self.redelivered = 0
        self.sent_back = 0
        self.violations: list[str] = []
        self._next: dict[str, int] = {}
        self.offsets: dict[int, int] = {}

    async def run(self, name_server: str, queues: Sequence[MessageQueue]) -> None:
        async with PullConsumer(name_server, group="ordered") as consumer, trio.open_nursery() as nursery:
            for queue in queues:
                nursery.start_soon(self._read_on, consumer, queue)

    async def _read_on(self, consumer: PullConsumer, queue: MessageQueue) -> None:
        offset = self.offsets[queue.queue_id] = 0
        while True:
            try:
                result = await consumer.pull(queue, offset, wait_s=0.5, timeout_s=2.0)
            except ClientError:
                await trio.sleep(AGAIN_S)
                continue
            for message in result.messages:
                self._take(message.body.decode())
            if result.status is PullStatus.OFFSET_ILLEGAL:
                self.sent_back += result.next_offset < offset
            if result.status in (PullStatus.FOUND, PullStatus.OFFSET_ILLEGAL):
                offset = self.offsets[queue.queue_id] = result.next_offset

    def _take(self, body: str) -> None:
        sender, _, number = body.partition("/")
        due = self._next.get(sender, 0)
        self.consumed += 1
        if int(number) > due:
            self.violations.append(f"the consumer was given {body}, {sender}/{due} was due")
        elif int(number) < due:
            self.redelivered += 1
            return
        self._next[sender] = int(number) + 1


class Run:
    """One group under load, through repeated failovers."""

    def __init__(
        self, members: Members, producers: Producers, network: Switch | None, seed: int, say: Callable[[str], None]
    ) -> None:
        self._members = members
        self._producers = producers
        self._network = network
        self._chance = random.Random(seed)
        self._say = say
        self.refused: Counter[str] = Counter()

    async def one(self, kind: str) -> float:
        """Cause one fault and wait for recovery; return how long nothing was acknowledged."""
        members, producers = self._members, self._producers
        await producers.go_on(self._chance.randint(1, 50))
        await trio.sleep(self._chance.random() * 0.3)
        old, number = members.master_id, len(producers.acknowledged_at)
        assert old is not None
        if kind == "duplicate":
            await self._start_duplicate()
        elif kind == "restored":
            await self._restore_etcd(old)
        if kind not in CHANGES:
            await members.wait_set(*IDS)
            await producers.go_on(20)
            gap_s = producers.gap_since(number)
            self._say(f"{kind}: {members.master_id} is master, nothing acknowledged for {gap_s:.2f} s")
            return gap_s
        recover = await self._strike(kind, old)
        new = await members.wait_another(old)
        await producers.go_on(20)
        gap_s = producers.gap_since(number)
        await recover()
        await members.wait_set(*IDS)
        self._say(f"{kind} {old}: {new} is master, nothing acknowledged for {gap_s:.2f} s")
        return gap_s

    async def _start_duplicate(self) -> None:
        id_ = self._chance.choice(IDS)
        with_copy = self._chance.random() < 0.5
        await self._members.check_refused(self._members.start_duplicate_soon(id_, with_copy=with_copy), id_)

    async def _restore_etcd(self, master: int) -> None:
        """Restore etcd from before a slave left the set; the operator restores the master's record."""
        members = self._members
        backup = members.root(master).with_name(f"backup-{len(self._producers.acknowledged_at)}")
        await members.etcd.back_up(backup)
        gone = self._chance.choice([id_ for id_ in IDS if id_ != master])
        await members.processes[gone].kill()
        await members.wait_set(*(id_ for id_ in IDS if id_ != gone))
        await self._producers.go_on(20)
        await members.etcd.restore(backup)
        members.start_soon(gone)
        for id_ in IDS:
            what = f"member {id_}'s refusal"
            await until(what, lambda id_=id_: "restored from an older state" in members.why_not_master(id_))  # type: ignore[misc]
        await members.put_record_back(master)

    async def _strike(self, kind: str, old: int) -> Callable[[], Awaitable[None]]:
        members = self._members
        process = members.processes[old]

        async def start_again() -> None:
            members.start_soon(old)
            await members.wait_ready(old)

        async def thaw() -> None:
            process.send_signal(signal.SIGCONT)

        async def heal() -> None:
            self._join(old, is_open=True)

        async def nothing() -> None:
            pass

        match kind:
            case "kill":
                await process.kill()
                return start_again
            case "freeze":
                process.send_signal(signal.SIGSTOP)
                return thaw
            case "cut":
                self._join(old, is_open=False)
                return heal
            case "switch":
                to = self._chance.choice([id_ for id_ in IDS if id_ != old])
                for _ in range(SWITCHES_MAX):
                    outcome = await members.switch(to, asked=self._chance.choice(IDS))
                    if outcome["is_done"]:
                        return nothing
                    self.refused[outcome["why_not"]] += 1
                    self._say(f"switch {old} to {to} not done: {outcome}")
                raise AssertionError(f"{SWITCHES_MAX} planned switches in vain")
            case "stop":
                await process.stop()
                return start_again
            case "power":
                await members.lose_power(old, seed=self._chance.getrandbits(32))
                return start_again
            case "power-two":
                other = self._chance.choice([id_ for id_ in IDS if id_ != old])
                await members.lose_power(old, other, seed=self._chance.getrandbits(32))

                async def start_both() -> None:
                    members.start_soon(old, other)
                    await members.wait_ready(old, other)

                return start_both
        raise AssertionError(kind)

    def _join(self, id_: int, *, is_open: bool) -> None:
        assert self._network is not None, "a cut needs a network"
        for other in (OWN, *HOSTS):
            if other != f"m{id_}":
                for path in self._network.between(f"m{id_}", other):
                    path.is_open = is_open


@contextmanager
def placed(has_network: bool, seed: int) -> Iterator[tuple[Switch | None, Places]]:
    """Where members run: each in its own network namespace, or all on loopback."""
    if not has_network:
        yield None, LOOPBACK
        return
    with Switch(*HOSTS, seed=seed) as network:
        yield (
            network,
            Places(
                own=network.address(OWN),
                address=lambda id_: network.address(f"m{id_}"),
                prefix=lambda id_: network.prefix(f"m{id_}"),
            ),
        )


@asynccontextmanager
async def _load(
    members: Members, in_flight: int, seed: int
) -> AsyncIterator[tuple[Producers, OrderedConsumer, TimedMessages]]:
    producers, consumer, timed = Producers(in_flight), OrderedConsumer(), TimedMessages(seed)
    async with Producer(members.name_server, group="first") as first:
        while True:
            try:
                await first.send(Message(TOPIC, b"first/0"))
                break
            except ClientError:
                await trio.sleep(AGAIN_S)
        queues = await first.queues(TOPIC)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(consumer.run, members.name_server, queues)
        nursery.start_soon(producers.run, members.name_server, queues)
        nursery.start_soon(timed.run, members.name_server)
        yield producers, consumer, timed
        nursery.cancel_scope.cancel()


async def run_failovers(
    folder: Path,
    kinds: Sequence[str],
    in_flight: int,
    seed: int,
    say: Callable[[str], None],
    *,
    languages: Sequence[str] = (),
) -> Outcome:
    """One group of three, with failovers of each of `kinds` in turn and `in_flight` messages in flight.

    `languages`: of RocketMQ 5's clients that run meanwhile.
    """
    outcome = Outcome()
    keys = SETTINGS if languages else {}
    with placed("cut" in kinds, seed) as (network, places):
        async with (
            open_group(folder, *IDS, places=places, keys=keys, serves_grpc=bool(languages)) as members,
            _load(members, in_flight, seed) as (producers, consumer, timed),
        ):
            await members.wait_set(*IDS)
            clients = GrpcClients(members, languages) if languages else None
            if clients is not None:
                await clients.start()
            run = Run(members, producers, network, seed, say)
            for kind in kinds:
                if clients is not None:
                    await clients.go_on(GRPC_ACKNOWLEDGED)
                outcome.gaps.setdefault(kind, []).append(await run.one(kind))
            await producers.stop()
            if clients is not None:
                outcome.violations += await clients.violations()
                outcome.grpc = clients.figures()
                say(f"gRPC clients: {dict(outcome.grpc)}")
            with trio.fail_after(PROGRESS_S):
                await timed.stop()
                early_or_lost = await timed.violations(members.name_server)
                stored = await read_topic(members.name_server, TOPIC)
            ends = {message.queue.queue_id: message.queue_offset + 1 for message in stored}
            await until("a consumer at the end", lambda: all(consumer.offsets[id_] >= end for id_, end in ends.items()))
            await members.wait_equal(*IDS)
    outcome.acknowledged = len(producers.acknowledged_at)
    outcome.failed = producers.failed
    outcome.consumed, outcome.redelivered, outcome.sent_back = (
        consumer.consumed,
        consumer.redelivered,
        consumer.sent_back,
    )
    outcome.refused = run.refused
    outcome.timers, outcome.timers_repeated = timed.acknowledged, timed.repeated
    outcome.violations += [*producers.violations, *consumer.violations, *early_or_lost]
    bodies = {(message.queue.queue_id, message.queue_offset): message.body.decode() for message in stored}
    for (queue_id, offset), body in producers.told.items():
        there = bodies.get((queue_id, offset))
        if there != body:
            outcome.violations.append(f"{body} was acknowledged at {offset} of queue {queue_id}, where {there} is")
    return outcome

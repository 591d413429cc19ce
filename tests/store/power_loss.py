"""Workloads of a SYNC_FLUSH store on a recording disk, and checks of the states after every power loss.

`live_alone` and `live_replicated` run the real store (with the real put service, HAService and HAClient over streams in
memory) and return what happened; `check_moment` takes one moment of it, draws states that the disk may be in, recovers
each with the real recovery code, and hands the files that come of it to the outside checkers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import trio
import trio.testing
from trio._core import _run as _trio_run

from ha.broker.options import BrokerOptions, BrokerRole
from ha.broker.put import PutService
from ha.broker.put_request import PutRequest
from ha.errors import HalogError
from ha.protocol.record import Message
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.store.message_store import MessageStore, open_message_store
from tests.checkers import derived, durability, prefix, queue_offsets, soundness
from tests.checkers.history import Answered, Crashed, Event, History, Promise, Sent, make_body
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation
from tests.store.disks import run_inline
from tests.store.recording import Mark, PowerLoss, Recorder, RecordingDisk, runner_with_slow_syncs
from tests.store.stores import ROOT, SEGMENT, small_options

MASTER, SLAVE = "master", "slave"
EPOCH_MS = 1_700_000_000_000
OUTAGE_MS = 3_600_000
"""Time between the starts of two runs' clocks."""
INDEX_SLOT_COUNT = 50
KEEPS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Shares of the unsynced sectors that reached the disk; 1.0 is a kill of the process."""
LIFE_S = 6.0
QUEUES = (("flights", 0), ("flights", 1), ("trains", 0))
TOPICS_MAX_SIZE = 1500


@dataclass
class Recording:
    """A recorded workload: the operations of its disks, with the clients' events as marks."""

    seed: int
    recorder: Recorder
    disks: dict[str, RecordingDisk]
    promise: Promise
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def moments(self) -> int:
        """Number of moments at which the power can fail."""
        return len(self.recorder.operations) + 1

    def history(self, position: int) -> History:
        """Returns what clients had seen before operation number `position`, at which all nodes lose power."""
        history = History()
        history.add(self.promise)
        last_s = 0.0
        for operation in self.recorder.operations[:position]:
            if isinstance(operation, Mark):
                event: Event = operation.what
                history.add(event)
                last_s = getattr(event, "time_s", last_s)
        for node in self.disks:
            history.add(Crashed(last_s, node, "power"))
        return history


def wall_clock_ms(outages: int = 0) -> int:
    """A wall clock that follows the run's clock."""
    return EPOCH_MS + OUTAGE_MS * outages + int(trio.current_time() * 1000)


class Client:
    """Sends requests one after another in random chunks, and marks each send and each answer in the recording."""

    def __init__(self, name: str, recording: Recording, service: PutService, chance: Random, first_seq: int) -> None:
        self._name = name
        self._recording = recording
        self._service = service
        self._chance = chance
        self.next_seq = first_seq

    async def run(self, until_s: float) -> None:
        chance = self._chance
        while trio.current_time() < until_s:
            requests = [self._request() for _ in range(chance.choice([1, 1, 2, 3, 6]))]
            self._service.submit(requests)
            self._recording.recorder.observe()
            await trio.sleep(chance.choice([0.0, 0.01, 0.05, 0.3]))

    def _request(self) -> NumberedPut:
        seq = self.next_seq
        self.next_seq += 1
        chance = self._chance
        topic, queue_id = chance.choice(QUEUES)
        body_id = f"{self._name}-{seq}".encode()
        size = chance.choice([20, 100, 400, 900, TOPICS_MAX_SIZE])
        properties = b"UNIQ_KEY\x01U%b\x02KEYS\x01k%d q\x02TAGS\x01tag%d\x02" % (body_id, seq, seq % 3)
        message = Message(topic=topic, queue_id=queue_id, body=make_body(body_id, size), properties=properties)
        self._recording.recorder.mark(Sent(trio.current_time(), self._name, seq, topic, queue_id, body_id))
        return NumberedPut(messages=(message,), on_done=self._on_done, number=seq)

    def _on_done(self, requests: Sequence[NumberedPut]) -> None:
        for request in requests:
            self._recording.counts[request.status.name] += 1
            last = request.results[-1] if request.results and request.status.is_stored else None
            answered = Answered(
                trio.current_time(),
                self._name,
                request.number,
                request.status.name,
                queue_offset=last.queue_offset if last else -1,
                physical_offset=last.physical_offset if last else -1,
                node=MASTER,
            )
            self._recording.recorder.mark(answered)


class NumberedPut(PutRequest, kw_only=True):
    """A put with the number of its send."""

    number: int


def _run(call: Any, *arguments: Any) -> Any:
    # Trio's only randomness is the order in which it wakes tasks; a recording has to be the same for the same seed.
    _trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _trio_run._r.seed(0)
    return trio.run(call, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def _open(
    disk: RecordingDisk, run_blocking: Any = run_inline, *, outages: int = 0, **changes: Any
) -> AsyncIterator[MessageStore]:
    given = {"flush_mode": "SYNC_FLUSH", "derived_flush_interval_s": 0.7, "checkpoint_interval_s": 0.2, **changes}
    async with open_message_store(
        small_options(**given), disk=disk, run_blocking=run_blocking, wall_clock_ms=partial(wall_clock_ms, outages)
    ) as store:
        yield store


# ---- workloads


def live_alone(seed: int) -> Recording:
    """Three lives of one store, ended in order or by a kill, with segments rolled and old ones deleted."""
    recorder = Recorder()
    disk = RecordingDisk(recorder)
    recording = Recording(seed, recorder, {MASTER: disk}, Promise(MASTER, is_sync_flush=True, copies=1))
    _run(_live_alone, recording, disk, Random(seed))
    return recording


async def _live_alone(recording: Recording, disk: RecordingDisk, chance: Random) -> None:
    next_seq = 0
    for _ in range(3):
        is_killed = chance.random() < 0.5
        try:
            async with _open(disk, runner_with_slow_syncs(chance, 0.05)) as store:
                service = PutService(store, None, BrokerOptions(flush_sync=True))
                clients = [Client(f"p{n}", recording, service, chance, next_seq) for n in range(2)]
                until_s = trio.current_time() + LIFE_S * chance.random()
                async with service.serve():
                    async with trio.open_nursery() as nursery:
                        for client in clients:
                            nursery.start_soon(client.run, until_s)
                        nursery.start_soon(_clean_now_and_then, store, chance, until_s)
                    if not is_killed:
                        await service.acknowledgements.wait_all_answered()
                next_seq = max(client.next_seq for client in clients)
                disk.is_dead = is_killed
        except* (HalogError, OSError):
            assert is_killed
        disk.is_dead = False
        recording.counts["kills" if is_killed else "stops"] += 1
        await trio.sleep(chance.choice([0.1, 4.0]))


async def _clean_now_and_then(store: MessageStore, chance: Random, until_s: float) -> None:
    while trio.current_time() < until_s:
        await trio.sleep(chance.uniform(0.5, 3.0))
        if len(store.log.segments) > 6:
            # By force, as on a full disk: no clock has to leap for it.
            store.retention.disk_used_ratio = 0.86
            await store.retention.clean()


def live_replicated(seed: int) -> Recording:
    """One life of a SYNC_MASTER and its slave, both with SYNC_FLUSH: PUT_OK is flushed on two disks."""
    recorder = Recorder()
    disks = {MASTER: RecordingDisk(recorder), SLAVE: RecordingDisk(recorder)}
    promise = Promise(MASTER, is_sync_flush=True, copies=2, slaves_flush=True)
    recording = Recording(seed, recorder, disks, promise)
    _run(_live_replicated, recording, Random(seed))
    return recording


async def _live_replicated(recording: Recording, chance: Random) -> None:
    run_blocking = runner_with_slow_syncs(chance, 0.05)
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(_open(recording.disks[MASTER], run_blocking))
        slave = await stack.enter_async_context(_open(recording.disks[SLAVE], run_blocking, is_slave=True))
        nursery = await stack.enter_async_context(trio.open_nursery())
        ha = HAService(master.log, HAOptions(transfer_batch_size_bytes=1000))
        nursery.start_soon(ha.group_transfer.run)

        async def connect(_address: str) -> trio.abc.Stream:
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(ha.handle, theirs, "10.0.0.2:5555")
            return ours

        client = HAClient(slave.log, HAOptions(ack_flushed=True, start_from="first"), connect)
        client.set_master("10.0.0.1:10912")
        await nursery.start(client.run)
        await trio.sleep(1.0)
        options = BrokerOptions(role=BrokerRole.SYNC_MASTER, flush_sync=True)
        service = PutService(master, ha, options)
        await stack.enter_async_context(service.serve())
        until_s = trio.current_time() + LIFE_S
        async with trio.open_nursery() as clients:
            for number in range(2):
                clients.start_soon(Client(f"p{number}", recording, service, chance, 0).run, until_s)
        await service.acknowledgements.wait_all_answered()
        nursery.cancel_scope.cancel()


# ---- after the power came back


@dataclass
class Checked:
    """How much was checked."""

    moments: int = 0
    states: int = 0
    recoveries: int = 0
    second_crashes: int = 0
    acknowledged: int = 0
    doubtful: int = 0
    """Unsynced sectors, over all moments"""

    def add(self, other: Checked) -> None:
        for name in ("moments", "states", "recoveries", "second_crashes", "acknowledged", "doubtful"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Losses:
    """Checks the states that power losses at any moment of a recording leave."""

    def __init__(self, recording: Recording, chance: Random) -> None:
        self._recording = recording
        self._chance = chance
        self._losses = {name: PowerLoss(recording.recorder, disk) for name, disk in recording.disks.items()}
        self.checked = Checked()

    def check_moment(self, position: int, keeps: Sequence[float] = KEEPS) -> None:
        """Checks a power loss before operation number `position`. AssertionError, with how to reproduce it."""
        recording = self._recording
        history = recording.history(position)
        self.checked.moments += 1
        self.checked.acknowledged += sum(each.answered.status == "PUT_OK" for each in history.answers)
        for loss in self._losses.values():
            loss.advance(position)
            self.checked.doubtful += loss.doubtful_count
        for keep in keeps:
            self.checked.states += 1
            crashes_again = self._chance.random() < 0.2
            images = {}
            found: list[Violation] = []
            for name, loss in self._losses.items():
                written = image_of(loss.draw(self._chance, 1.0), name)
                try:
                    files = self._recover(loss.draw(self._chance, keep), name, crashes_again=crashes_again)
                except BaseException as error:
                    raise AssertionError(
                        f"{self._place(position, keep)}: {name} does not recover: {error!r}"
                    ) from error
                images[name] = image_of(files, name)
                found += check_recovered(written, images[name])
            found += durability.check(history, images)
            found += queue_offsets.check(history, images[MASTER], MASTER)
            found += prefix.check(history, images, MASTER)
            assert not found, f"{self._place(position, keep)}: " + "\n".join(map(str, found[:10]))

    def _place(self, position: int, keep: float) -> str:
        recording = self._recording
        operation = recording.recorder.operations[position] if position < recording.moments - 1 else "the end"
        return f"seed {recording.seed}, power lost before operation {position} ({str(operation)[:200]}), keep {keep}"

    def _recover(self, files: dict[Path, bytes], name: str, *, crashes_again: bool) -> dict[Path, bytes]:
        """Starts a store on these files, stops it cleanly, and returns the files."""
        if crashes_again:
            recorder = Recorder()
            disk = RecordingDisk(recorder, files)
            _run(self._open_and_close, disk, name, 1)
            loss = PowerLoss(recorder, disk)
            loss.advance(self._chance.randrange(len(recorder.operations) + 1))
            files = loss.draw(self._chance, self._chance.choice(KEEPS))
            self.checked.second_crashes += 1
        disk = RecordingDisk(Recorder(), files)
        _run(self._open_and_close, disk, name, 2)
        return disk.files()

    async def _open_and_close(self, disk: RecordingDisk, name: str, outages: int) -> None:
        self.checked.recoveries += 1
        async with _open(disk, outages=outages, is_slave=name == SLAVE) as store:
            assert not store.damage.open, "bytes that were never flushed are no damage"


def image_of(files: dict[Path, bytes], name: str) -> StoreImage:
    named = {path.relative_to(ROOT).as_posix(): content for path, content in files.items()}
    return StoreImage(named, SEGMENT, name=name)


def check_recovered(written: StoreImage, image: StoreImage) -> list[Violation]:
    """Checks that a recovered store is sound and complete, and has nothing that was not put."""
    begin, end = image.log_range()
    found = soundness.check(image)
    found += derived.check(image, is_complete=True, index_slot_count=INDEX_SLOT_COUNT)
    if image.segments and (at := prefix.first_difference(written, image, begin, end)) is not None:
        found.append(Violation("invented", f"{image.name} holds at {at} what was never written there"))
    return found

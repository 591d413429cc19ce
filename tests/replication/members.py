"""Members of a failover group controlled by the test: their logs, and the slave's side of the protocol with epochs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ha.protocol.auto_switch_frame import (
    EpochFrameHeader,
    EpochReport,
    MasterHandshake,
    MasterMessageParser,
    SlaveHandshake,
    SlaveMessageParser,
)
from ha.protocol.epoch_file import EpochEntry
from ha.protocol.ha_frame import TransferBody
from ha.replication.ha_service import HAService
from ha.replication.log import MemberStore
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason
from ha.replication.sync_state import SyncStateRules, SyncStateSet
from ha.store.commitlog import UNLIMITED
from ha.store.epochs import EpochHistory
from ha.store.watched_offset import WatchedOffset
from tests.replication.memory_log import MemoryLog
from tests.store.disks import MemoryDisk, run_inline

MASTER, SLAVE, OTHER = 1, 2, 3


class MemberLog(MemoryLog):
    """A log with a dispatch limit."""

    dispatch_limit: WatchedOffset

    def limit_dispatch(self, offset: int) -> None:
        if not self.dispatch_limit.raise_to(offset):
            self.dispatch_limit.reset(offset)

    def cut(self, offset: int) -> None:
        del self.content[offset - self.min_offset :]
        self.max_offset.reset(offset)
        self.flushed_offset.reset(min(self.flushed_offset.value, offset))


class Member:
    """A member's store: the log in memory, its history in a file in memory.

    `cuts`: where it was truncated; `record_size`: of each record.
    """

    def __init__(self, content: bytes = b"", *, segment_size: int = 4096, first_offset: int = -1) -> None:
        self.log = MemberLog(content, segment_size=segment_size, first_offset=first_offset)
        self.log.dispatch_limit = WatchedOffset(UNLIMITED)
        self.epochs = EpochHistory(MemoryDisk(), Path("/epochs"), run_blocking=run_inline)
        self.cuts: list[int] = []
        self.record_size = 1

    async def begin(self, *pairs: tuple[int, int]) -> Member:
        """Set the history."""
        for epoch, start in pairs:
            await self.epochs.append(epoch, start)
        return self

    async def record_end(self, offset: int) -> int | None:
        await trio.lowlevel.checkpoint()
        return offset + self.record_size if self.record_size else None

    async def truncate(self, offset: int) -> None:
        await trio.lowlevel.checkpoint()
        self.cuts.append(offset)
        self.log.cut(offset)
        await self.epochs.truncate_from(offset)

    @property
    def history(self) -> list[tuple[int, int]]:
        return [(entry.epoch, entry.start_offset) for entry in self.epochs.entries]


def _conforms(member: Member) -> MemberStore:
    return member


def leading(
    member: Member, *others: int, options: HAOptions | None = None, rules: SyncStateRules | None = None
) -> HAService:
    """The service of a master whose term is the last one of its history, with a set of itself and `others`."""
    service = HAService(member.log, options, member=member)
    lead(service, member, *others, rules=rules)
    return service


def lead(service: HAService, member: Member, *others: int, rules: SyncStateRules | None = None) -> SyncStateSet:
    """Start the term that is the last one of the history."""
    last = member.epochs.last
    assert last is not None
    assert service.leadership is not None
    state = SyncStateSet(
        MASTER,
        {MASTER, *others},
        epoch=last.epoch,
        epoch_start=last.start_offset,
        confirm_offset=min(member.log.dispatch_limit.value, member.log.max_offset.value),
        now=trio.current_time(),
        rules=rules,
    )
    service.leadership.lead(state)
    return state


class MemberSide:
    """One connection of a member to `service`. `frames`: (time since connecting, header, body) of each whole frame."""

    def __init__(self, service: HAService, broker_id: int = SLAVE, run_id: int = 0) -> None:
        self.stream, self._theirs = memory_stream_pair()
        self._service = service
        self.broker_id = broker_id
        self.run_id = run_id
        self.began = trio.current_time()
        self.answers: list[MasterHandshake] = []
        self.frames: list[tuple[float, EpochFrameHeader, bytes]] = []
        self.received = b""
        self.close_reason: CloseReason | None = None
        self.closed_at: float | None = None

    def start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._serve)
        nursery.start_soon(self._receive)

    async def _serve(self) -> None:
        self.close_reason = await self._service.handle(self._theirs, "10.0.0.2:40000")

    async def _receive(self) -> None:
        parser = MasterMessageParser()
        header = EpochFrameHeader(0, 0, 0, 0, 0)
        body = b""
        with suppress(trio.ClosedResourceError):
            async for chunk in self.stream:
                now = round(trio.current_time() - self.began, 6)
                self.received += chunk
                for event in parser.feed(chunk):
                    if isinstance(event, MasterHandshake):
                        self.answers.append(event)
                        continue
                    if isinstance(event, TransferBody):
                        body += event.chunk
                    else:
                        header, body = event, b""
                    if len(body) == header.body_size:
                        self.frames.append((now, header, body))
        self.closed_at = round(trio.current_time() - self.began, 6)

    async def greet(self, *, learner: bool = False, from_last: bool = False) -> None:
        await self.stream.send_all(SlaveHandshake(self.broker_id, from_last, learner, self.run_id).encode())

    async def report(self, offset: int) -> None:
        await self.stream.send_all(EpochReport(offset).encode())

    @property
    def heads(self) -> list[tuple[int, int, int, int, int]]:
        """(offset, body size, epoch, its start, confirm offset) of each frame."""
        return [
            (head.physical_offset, head.body_size, head.epoch, head.epoch_start_offset, head.confirm_offset)
            for _, head, _ in self.frames
        ]


class MasterOfMembers:
    """A master controlled by the test. `said`: (time since the start, message, connection) of what slaves said."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.began = trio.current_time()
        self.streams: list[trio.abc.Stream] = []
        self.said: list[tuple[float, SlaveHandshake | EpochReport, int]] = []
        self.received = b""
        self.closed_at: list[float] = []

    @property
    def now(self) -> float:
        return round(trio.current_time() - self.began, 6)

    async def connect(self, address: str) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_stream_pair()
        self.streams.append(ours)
        self._nursery.start_soon(self._receive, ours, len(self.streams) - 1)
        return theirs

    async def _receive(self, stream: trio.abc.Stream, number: int) -> None:
        parser = SlaveMessageParser()
        with suppress(trio.ClosedResourceError):
            while chunk := await stream.receive_some(4096):
                self.received += bytes(chunk)
                self.said += [(self.now, message, number) for message in parser.feed(chunk)]
            self.closed_at.append(self.now)

    async def answer(self, end: int, *pairs: tuple[int, int]) -> None:
        """Answer the newest slave's handshake."""
        history = tuple(EpochEntry(epoch, start) for epoch, start in pairs)
        await self.streams[-1].send_all(MasterHandshake(end, history).encode())
        await wait_all_tasks_blocked()

    async def frame(self, offset: int, body: bytes, epoch: int, start: int, confirm: int = 0) -> None:
        header = EpochFrameHeader(offset, len(body), epoch, start, confirm)
        await self.streams[-1].send_all(header.encode() + body)
        await wait_all_tasks_blocked()

    @property
    def reports(self) -> list[int]:
        return [message.slave_max_offset for _, message, _ in self.said if isinstance(message, EpochReport)]

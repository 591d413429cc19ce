"""One connection of a slave to its master: takes frames into the log, reports how far the log is.

Three tasks at most, in one nursery; whichever ends first ends all, and the connection with them:
- the reader appends body bytes as they arrive, so that a frame of any size costs no memory;
- the reporter sends the request, which is a little before the log's end (overlap.py), then one report per growth of the
  log that it sees, or for several while much is coming, and a heartbeat when nothing was written for more than
  heartbeat_interval. While it has nothing to do, a report is sent on its behalf by whoever makes the log grow: the
  reader, after all that it received at once, or with `ack_flushed` the flusher;
- the watch, only with haOutOfRange=resync against a master that does not answer the range question: after each idle
  heartbeat it asks the injected `master_min_offset`.

A member of a failover group speaks the dialect with epochs: what is different then is an `EpochFollower`. The slave
greets, and its request waits until it has cut off what the master doesn't have.

The task that runs these keeps the time. Reports are a running maximum: they never fall on one connection. The first one
goes out at once, as in RocketMQ 5.x; 4.9 waits five seconds. With `ack_flushed` they carry the flushed offset, and the
request waits until all that the log holds is flushed, as a request counts as an acknowledgement.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import trio

from ha.errors import DamagedBytes, DiskFull, RemoteProtocolError
from ha.protocol.auto_switch_frame import (
    NO_EPOCH,
    EpochFrameHeader,
    EpochReport,
    MasterHandshake,
    MasterMessageParser,
)
from ha.protocol.ha_frame import TransferBody, TransferHeader, TransferParser, encode_report
from ha.protocol.ha_handshake import CHALLENGE_BEGIN
from ha.replication import first_byte
from ha.replication.epoch_follower import EpochFollower
from ha.replication.flow_monitor import FlowMonitor
from ha.replication.handshake import recognise_master
from ha.replication.log import ReplicatedLog
from ha.replication.options import TICK_S, HAOptions
from ha.replication.overlap import Overlap, overlap_start
from ha.replication.range_question import RANGE_QUESTION
from ha.replication.session_plan import SessionEnd, SessionPlan
from ha.replication.statistics import Condition
from ha.transport import transport_for

RECEIVE_SIZE_FIRST = 64 << 10
"""Asked of the socket while little is coming; grows to receive_size_bytes while chunks come full."""

BULK_BYTES = 256 << 10
"""Who receives so much at once is behind, and mostly more is there already. Its report waits for BULK_TURNS of the
event loop whether that is so: each one costs both sides a system call, and the master a wake-up."""
BULK_TURNS = 2
"""In which the reader, whose next chunk is there, has a turn in any case, whatever their order"""

REPORT_STEP_BYTES = 4 << 20
"""When so much is unreported it waits no longer."""


class HASession:
    """Follows a master over `stream` until either side ends it; `run` owns all tasks and closes the stream."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        log: ReplicatedLog,
        options: HAOptions,
        plan: SessionPlan,
        *,
        on_condition: Callable[[Condition, str], None],
        follower: EpochFollower | None = None,
    ) -> None:
        """`on_condition` is called with CONNECTED once a frame fits, and with OUT_OF_RANGE while that is waited for."""
        self._stream = stream
        self._transport = transport_for(stream, RECEIVE_SIZE_FIRST)
        self._log = log
        self._options = options
        self._plan = plan
        self._on_condition = on_condition
        self._follower = follower
        self._greeting: MasterHandshake | None = None
        self._greeted = trio.Event()
        self._encode_report = encode_report if follower is None else _encode_epoch_report
        self._scope = trio.CancelScope()
        self._end: SessionEnd | None = None
        self._answer: list[int] = []
        self._answered = trio.Event()
        self._first_byte: first_byte.FirstByte | None = None
        self._overlap: Overlap | None = None
        self._idle = trio.Event()
        self._acknowledged = log.flushed_offset if options.ack_flushed else log.max_offset
        self._idle_reporter = trio.lowlevel.ParkingLot()
        self._bulk_count = 0
        """How often much was received at once"""
        self._unsent: bytes = b""
        """The end of a report of which the begin is sent"""
        now = trio.current_time()
        self.last_read_at = self.last_write_at = now
        self.flow = FlowMonitor(now)
        self.reported_offset = -1
        self.has_followed = False
        """Whether a frame came that fits."""

    async def run(self) -> SessionEnd:
        """Follow the master; return why it ended. Cancelling it closes the stream; what was appended stays."""
        try:
            with self._scope:
                if self._options.handshake is not None:
                    await self._run_part(self._authenticate)
                if self._end is None:
                    if self._options.ack_flushed:
                        self._acknowledged.subscribe(self._take_growth)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._run_part, self._receive)
                        nursery.start_soon(self._run_part, self._report)
                        if self._plan.watches_min_offset:
                            nursery.start_soon(self._run_part, self._watch_min_offset)
                        await self._keep_time()
        finally:
            self._acknowledged.unsubscribe(self._take_growth)
            await trio.aclose_forcefully(self._stream)
        return self._end or SessionEnd(Condition.STOPPED, "")

    @property
    def epoch(self) -> int:
        """The master's last term, -1 while it is not known or there are no terms."""
        return NO_EPOCH if self._follower is None else self._follower.epoch

    def close(self, end: SessionEnd) -> None:
        """Make `run` end with `end`, unless it is ending already."""
        if self._end is None:
            self._end = end
        self._scope.cancel()

    async def _authenticate(self) -> SessionEnd | None:
        """Prove to the master that this side knows the secret, and have it do the same; None if both did."""
        assert self._options.handshake is not None
        refused = await recognise_master(self._stream, self._options.handshake)
        self.last_read_at = self.last_write_at = trio.current_time()
        return SessionEnd(Condition.NOT_AUTHENTICATED, refused) if refused else None

    async def _run_part(self, part: Callable[[], Awaitable[SessionEnd | None]]) -> None:
        try:
            end = await part()
        except RemoteProtocolError as error:
            end = SessionEnd(Condition.MALFORMED_FRAME, str(error))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            end = self._lost(error)
        if end is not None:
            self.close(end)

    def _lost(self, error: Exception) -> SessionEnd:
        return SessionEnd(Condition.CONNECTION_LOST, f"{error.__cause__ or error}, {self._explain_close()}")

    async def _keep_time(self) -> None:
        """Wake the reporter for its heartbeats, and end the session once the master is silent for too long.

        One timer that looks at what happened since it was set, instead of two that are set at each chunk.
        """
        options = self._options
        silence_s = options.housekeeping_interval_s + TICK_S
        woken_until = -math.inf
        while True:
            silent_at = self.last_read_at + silence_s
            await trio.sleep_until(min(silent_at, max(self._heartbeat_due, woken_until)))
            now = trio.current_time()
            if now >= self.last_read_at + silence_s:
                detail = f"nothing read for {options.housekeeping_interval_s} s"
                self.close(SessionEnd(Condition.HOUSEKEEPING_TIMEOUT, detail))
            if now >= self._heartbeat_due:
                # Even a reporter that is busy sending will have sent something now or later.
                woken_until = now + options.heartbeat_interval_s + TICK_S
                self._idle_reporter.unpark_all()

    # The reader

    async def _receive(self) -> SessionEnd:
        size_max = self._log.segment_size
        parser: TransferParser | MasterMessageParser = TransferParser(body_size_max=size_max)
        if self._follower is not None:
            parser = MasterMessageParser(body_size_max=size_max)
        receive_into = self._transport.receive_into
        # The same memory again and again: what is fresh costs a page fault for each of its pages.
        buffer = memoryview(bytearray(RECEIVE_SIZE_FIRST))
        while size := await receive_into(buffer):
            received = buffer[:size]
            if self.reported_offset < 0 and bytes(received[: len(CHALLENGE_BEGIN)]) == CHALLENGE_BEGIN:
                detail = "the master demands haSharedSecret, and none is set here"
                return SessionEnd(Condition.NOT_AUTHENTICATED, detail)
            self.last_read_at = now = trio.current_time()
            self.flow.count(size, now)
            for event in parser.feed(received):
                if isinstance(event, TransferHeader):
                    end = await self._take_header(event.physical_offset, event.body_size)
                elif isinstance(event, TransferBody):
                    end = await self._take_body(event.physical_offset, event.chunk)
                else:
                    end = await self._take_epoch_message(event)
                if end is not None:
                    return end
            if self._follower is not None and self._overlap is None:
                self._follower.confirm()
                self._note_held()
            if size >= BULK_BYTES:
                self._bulk_count += 1
                self._idle_reporter.unpark_all()
            else:
                self._take_growth()
            if size == len(buffer) < self._options.receive_size_bytes:
                buffer = memoryview(bytearray(min(2 * size, self._options.receive_size_bytes)))
        return SessionEnd(Condition.MASTER_CLOSED, self._explain_close())

    async def _take_epoch_message(self, message: MasterHandshake | EpochFrameHeader) -> SessionEnd | None:
        assert self._follower is not None
        if isinstance(message, MasterHandshake):
            if self._greeting is not None:
                raise RemoteProtocolError("a second handshake")
            self._greeting = message
            end = self._follower.meet(message)
            if end is None:
                self._greeted.set()
            return end
        if self.reported_offset < 0:
            raise RemoteProtocolError(f"a frame of {message.body_size} bytes before any request")
        self._follower.note_frame(message)
        offset = message.physical_offset
        if offset < 0:  # it has sent nothing, and has nothing to send
            offset = self._log.max_offset.value if self._overlap is None else self._overlap.position
        return await self._take_header(offset, message.body_size)

    def _explain_close(self) -> str:
        where = f"at offset {self._log.max_offset.value}"
        if self.has_followed:
            return where
        return f"{where}, before anything usable came: is that its haListenPort? If it is, its log says why (ha_closed)"

    async def _take_header(self, offset: int, size: int) -> SessionEnd | None:
        """Check a frame's position before any of its bytes is taken; None if it fits."""
        log = self._log
        own, segment_size = log.max_offset.value, log.segment_size
        if self.reported_offset < 0:
            self._take_answer(offset, size)
            return None
        if offset % segment_size + size > segment_size:
            raise RemoteProtocolError(f"{size} bytes at {offset} span two segments of {segment_size}")
        if self._first_byte is not None:
            if offset != first_byte.REQUEST_OFFSET:
                return SessionEnd(Condition.OFFSET_MISMATCH, f"the master sends from {offset}, asked for offset 1")
            if not size and not self._first_byte.is_refused_by_heartbeat():
                return None
            if not size:
                detail = "the master has no byte 1: its log is empty, or begins later and can't be asked where"
                return SessionEnd(Condition.OUT_OF_RANGE, detail, has_refused_first_byte=True)
        elif self._overlap is not None and offset == self._overlap.position:
            return None if size else self._take_early_heartbeat(self._overlap)
        elif offset != own or self._overlap is not None:
            if log.min_offset >= 0:
                return self._take_strange_offset(offset, size, own)
            if offset % segment_size:
                return SessionEnd(
                    Condition.OFFSET_MISMATCH,
                    f"the master starts at {offset}, no begin of a segment of {segment_size}: "
                    "mappedFileSizeCommitLog differs",
                )
            if not size:
                # As RocketMQ: an empty slave takes the master's position over from a heartbeat, and reports it.
                end = await self._append(offset, memoryview(b""))
                if end is not None:
                    return end
        if not self.has_followed or not size:
            self._follow(offset)
        if not size:
            self._idle.set()
        return None

    def _take_early_heartbeat(self, overlap: Overlap) -> SessionEnd | None:
        """The master has nothing to send although our end is not compared yet."""
        at, own = overlap.position, overlap.end
        if at > overlap.start:
            return SessionEnd(Condition.MASTER_BEHIND, f"the log here ends at {own}, the master's at {at}")
        self._idle.set()
        overlap.early_heartbeat_count += 1
        if overlap.early_heartbeat_count == 1:
            return None  # it may have been overdue when the request came, and is then sent before the data
        detail = f"the master sends nothing from {at}, before the end here at {own}: deleted, or its log is shorter"
        if own % self._log.segment_size == 0 and self._plan.compares_overlap:
            return SessionEnd(Condition.OUT_OF_RANGE, detail, has_refused_overlap=True)
        if not self._plan.asks_range:
            return SessionEnd(Condition.OUT_OF_RANGE, detail)  # the next connection asks which of the two it is
        self._on_condition(Condition.OUT_OF_RANGE, detail)
        return None

    def _follow(self, offset: int) -> None:
        self.has_followed = True
        self._on_condition(Condition.CONNECTED, f"from offset {offset}")

    def _take_answer(self, offset: int, size: int) -> None:
        """Before the request only a halog master that was asked says anything: its first and its last offset."""
        if not self._plan.asks_range or size or len(self._answer) == 2:
            raise RemoteProtocolError(f"a frame of {size} bytes at {offset} before any request")
        self._answer.append(offset)
        if len(self._answer) == 2:
            if self._answer[0] > offset:
                raise RemoteProtocolError(f"the master claims to hold [{self._answer[0]}, {offset})")
            self._answered.set()

    def _take_strange_offset(self, offset: int, size: int, own: int) -> SessionEnd | None:
        if self._answered.is_set() and not size and offset > own:
            # Only a halog master that was asked says so: ours is gone, and here is its first.
            detail = f"the next byte here is {own}, the master's log begins at {offset}"
            if self._options.out_of_range == "resync":
                return SessionEnd(Condition.OUT_OF_RANGE, detail, first_offset=offset)
            self._on_condition(Condition.OUT_OF_RANGE, detail)
            return None
        expected = self._overlap.position if self._overlap is not None else own
        return SessionEnd(Condition.OFFSET_MISMATCH, f"the master sends from {offset}, expected {expected}")

    async def _take_body(self, offset: int, chunk: memoryview) -> SessionEnd | None:
        if self._first_byte is not None:
            restored = self._first_byte.feed(chunk)
            if restored is None:
                return None
            self._first_byte = None
            return await self._append(0, restored)
        if self._overlap is not None:
            overlap = self._overlap
            behind = overlap.feed(chunk)
            if behind is None:
                return SessionEnd(
                    Condition.DIVERGED,
                    f"the logs differ at {overlap.position}: the master lost its tail, or is another one; "
                    f"to take its log over, stop this slave and empty its store",
                )
            if not overlap.is_compared:
                return None
            self._overlap = None
            self._follow(overlap.end)
            if not behind:
                return None
            offset, chunk = overlap.end, behind
        return await self._append(offset, chunk)

    async def _append(self, offset: int, chunk: memoryview) -> SessionEnd | None:
        try:
            if self._follower is not None:
                await self._follower.adopt(offset + len(chunk))
            await self._log.append_raw(offset, chunk)
        except (DiskFull, OSError, trio.TooSlowError) as error:
            return SessionEnd(Condition.APPEND_FAILED, str(error) or "the next segment was not ready in time")
        return None

    # The reporter

    async def _report(self) -> SessionEnd:
        options = self._options
        if self._follower is not None:
            await self._transport.send_all(self._follower.greeting)
            await self._greeted.wait()
            assert self._greeting is not None
            end = await self._follower.settle(self._greeting)
            if end is not None:
                return end
        if self._plan.asks_range:
            await self._transport.send_all(RANGE_QUESTION)
            with trio.move_on_after(options.range_answer_timeout_s):
                await self._answered.wait()
        if self._plan.asks_only:
            return SessionEnd(Condition.MASTER_CLOSED, self._explain_close(), has_only_asked=True)
        request = await self._choose_request()
        if isinstance(request, SessionEnd):
            return request
        await self._send_report(request)
        bulk_count = 0
        while True:
            offset = self._reportable_offset
            # While it is open whether offset 1 exists there is nothing to confirm; RocketMQ 4.9 would hang up.
            is_due = trio.current_time() >= self._heartbeat_due and self._first_byte is None
            if bulk_count != self._bulk_count and 0 < offset - self.reported_offset < REPORT_STEP_BYTES and not is_due:
                bulk_count = self._bulk_count
                for _ in range(BULK_TURNS):
                    await trio.lowlevel.checkpoint()
                continue
            if offset > self.reported_offset or is_due:
                await self._send_report(offset)
                continue
            await self._idle_reporter.park()
            if self._unsent:
                await self._send_unsent()

    @property
    def _heartbeat_due(self) -> float:
        return self.last_write_at + self._options.heartbeat_interval_s + TICK_S

    @property
    def _reportable_offset(self) -> int:
        return max(self._acknowledged.value if self._overlap is None else 0, self.reported_offset)

    def _note_held(self) -> None:
        """Tell the follower how much of the master's log is here; with SYNC_FLUSH, as soon as it is flushed."""
        follower, greeting = self._follower, self._greeting
        if follower is not None and greeting is not None and self._overlap is None and self.has_followed:
            follower.note_held(self._acknowledged.value, greeting.max_offset)

    def _take_growth(self) -> None:
        """Have what is new in the log reported."""
        self._note_held()
        if not self._idle_reporter:
            return  # it looks before it is idle again, or is over
        offset = self._reportable_offset
        if offset <= self.reported_offset:
            return
        if self._transport.can_send_nowait:
            self.reported_offset = offset
            report = self._encode_report(offset)
            try:
                sent = self._transport.send_nowait(report)
            except trio.BrokenResourceError as error:
                self.close(self._lost(error))
                return
            if sent == len(report):
                self.last_write_at = trio.current_time()
                return
            self._unsent = report[sent:]
        self._idle_reporter.unpark_all()

    async def _choose_request(self) -> int | SessionEnd:
        log = self._log
        own, is_empty = log.max_offset.value, log.min_offset < 0
        first = log.min_offset
        if self._answered.is_set():
            first, last = self._answer
            if own > last:
                detail = (
                    f"the log here ends at {own}, the master's at {last}: it lost its tail, or it is another master; "
                    "to take its log over, stop this slave and empty its store"
                )
                return SessionEnd(Condition.MASTER_BEHIND, detail, first_offset=first)
        elif is_empty and self._plan.tries_first_byte:
            known = await self._plan.master_min_offset()
            if known is not None and known > 0:
                return known
            self._first_byte = first_byte.FirstByte()
            return first_byte.REQUEST_OFFSET
        if self._options.ack_flushed and own > 0:
            await log.flushed_offset.wait_beyond(own - 1)
        if is_empty:
            return own
        if not self._plan.compares_overlap and not self._answered.is_set():
            known = await self._plan.master_min_offset()
            if known is None or known >= own:
                return own  # deleted before our end, for all that can be known: nothing is left to compare
            first = known
        return await self._begin_overlap(first, own)

    async def _begin_overlap(self, first: int, own: int) -> int | SessionEnd:
        """Return the offset to request so that the log's end can be compared; `first` is the master's if known."""
        log = self._log
        start = overlap_start(max(first, log.min_offset), own, log.segment_size, self._options.overlap_bytes_max)
        held = b""
        while start + len(held) < own:
            try:
                held += await log.read(start + len(held), own - start - len(held))
            except DamagedBytes as damaged:
                with trio.move_on_after(self._options.reconnect_interval_s) as scope:
                    await log.wait_healed(damaged.begin, damaged.end)
                if not scope.cancelled_caught:
                    continue
                if damaged.end >= own:
                    return SessionEnd(Condition.DAMAGED, f"the end of the log here: {damaged}")
                start, held = damaged.end, b""
        if held:
            self._overlap = Overlap(start, held)
        return start

    async def _send_report(self, offset: int) -> None:
        if self._end is not None:
            await trio.sleep_forever()  # cancelled already: what is over acknowledges nothing more
        # Known as reported before it is sent: the answer may be read before this task runs again.
        self.reported_offset = offset
        await self._transport.send_all(self._encode_report(offset))
        self.last_write_at = trio.current_time()

    async def _send_unsent(self) -> None:
        rest, self._unsent = self._unsent, b""
        await self._transport.send_all(rest)
        self.last_write_at = trio.current_time()

    # The watch

    async def _watch_min_offset(self) -> SessionEnd:
        while True:
            await self._idle.wait()
            self._idle = trio.Event()
            if self._answered.is_set():
                await trio.sleep_forever()
            first = await self._plan.master_min_offset()
            own = self._log.max_offset.value
            if first is not None and own < first:
                detail = f"the next byte here is {own}, the master's log begins at {first}"
                return SessionEnd(Condition.OUT_OF_RANGE, detail, first_offset=first)


def _encode_epoch_report(offset: int) -> bytes:
    return EpochReport(offset).encode()

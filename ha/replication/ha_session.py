"""One connection of a slave to its master: appends the master's frames to the log, and reports the log's end.

At most three tasks in one nursery; the first one that ends closes the connection:
- the reader appends body bytes as they arrive, so that a frame of any size costs no memory. Complete frames that only
  have to be appended are received, appended and reported with one call (pump.py);
- the reporter sends the request, which is a little before the log's end (overlap.py), then a report when the log has
  grown (one for up to REPORT_STEP_BYTES while much data is coming), and a heartbeat when nothing was written for more
  than heartbeat_interval. While it is idle, the code that makes the log grow sends the report in its place: the reader
  after each receive, or with `ack_flushed` the flusher;
- the watch, only with haOutOfRange=resync and a master that does not answer the range question, calls the injected
  `master_min_offset` when heartbeats arrive.

slave_protocol.py decides what a frame means in each state of the connection. A member of a failover group uses the
protocol with epochs; `EpochFollower` implements the differences.

The task that calls `run` wakes the reporter for heartbeats, and ends the connection if the master is silent for too
long (keep_time.py). Reports never decrease on one connection. The first one, the request, is sent at once, as in
RocketMQ 5.x; 4.9 waits five seconds. With `ack_flushed`, reports carry the flushed offset, and the request waits until
everything in the log is flushed, as a request counts as an acknowledgement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from ha.errors import DamagedBytes, DiskFull, RemoteProtocolError
from ha.poller import Poller
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
from ha.replication.first_byte import FirstByte
from ha.replication.flow_monitor import FlowMonitor
from ha.replication.handshake import authenticate_to_master
from ha.replication.keep_time import keep_time
from ha.replication.log import ReplicatedLog
from ha.replication.options import TICK_S, HAOptions
from ha.replication.overlap import HEAD_SIZE, SEARCH_BYTES_MAX, Overlap, find_head, overlap_start
from ha.replication.pump import pump
from ha.replication.range_question import RANGE_QUESTION
from ha.replication.session_plan import Retry, SessionEnd, SessionPlan
from ha.replication.slave_protocol import Request, SessionState, SlaveProtocol
from ha.replication.statistics import Condition
from ha.transport import EagerWriter, read_into, transport_for

RECEIVE_SIZE_FIRST = 64 << 10
"""Initial size of the receive buffer in bytes; doubled, up to receive_size_bytes, whenever a receive fills it."""

BULK_BYTES = 256 << 10
"""Size in bytes from which on a receive means that the slave is behind, so that more data has probably arrived. The
report is then delayed by BULK_TURNS iterations of the event loop, to include that data: each report costs both sides a
system call, and the master a wake-up."""
BULK_TURNS = 2
"""Number of iterations of the event loop by which a report is delayed: enough for the reader to run once, whatever the
order of the tasks."""

REPORT_STEP_BYTES = 4 << 20
"""Number of unreported bytes from which on a report is not delayed."""


class HASession:
    """Follows a master over `stream` until either side ends the session. `run` owns all tasks and closes the stream."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        log: ReplicatedLog,
        options: HAOptions,
        plan: SessionPlan,
        *,
        on_condition: Callable[[Condition, str], None],
        follower: EpochFollower | None = None,
        poller: Poller | None = None,
    ) -> None:
        """`on_condition` gets a condition and its details. It is called with CONNECTED when the session begins to
        follow the master, and at each later heartbeat that fits the log; with OUT_OF_RANGE or NO_DATA_YET if the slave
        stays connected and waits.

        With a `poller` (ha/poller.py), the pump and the work that its frames cause, such as dispatch, run in the
        poller's turns.
        """
        self._poller = poller
        self._stream = stream
        self._transport = transport_for(stream, RECEIVE_SIZE_FIRST, poller)
        self._log = log
        self._options = options
        self._plan = plan
        self._follower = follower
        self._protocol = SlaveProtocol(log, options, plan, on_condition)
        self._greeting: MasterHandshake | None = None
        self._encode_report = encode_report if follower is None else _encode_epoch_report
        self._scope = trio.CancelScope()
        self._heartbeat_received = trio.Event()
        self._parser: TransferParser | MasterMessageParser = TransferParser(body_size_max=log.segment_size)
        if follower is not None:
            self._parser = MasterMessageParser(body_size_max=log.segment_size)
        self._pumps = follower is None and not options.ack_flushed
        """Whether the pump may take frames: no terms have to be recorded, and reports need not wait for a flush"""
        self._pumped_bytes = 0
        """Number of bytes that the pump has taken of the last receive"""
        self._acknowledged = log.flushed_offset if options.ack_flushed else log.max_offset
        self._reporter = EagerWriter(self._transport)
        self._bulk_count = 0
        """Number of receives of BULK_BYTES or more"""
        now = trio.current_time()
        self.last_read_at = self.last_write_at = now
        self.flow = FlowMonitor(now)
        self.reported_offset = -1

    async def run(self) -> SessionEnd:
        """Follows the master; returns why the session ended. Always closes the stream; what was appended stays. Errors
        of the store, such as DiskFailed, propagate in an exception group."""
        try:
            with self._scope:
                if self._options.handshake is not None:
                    await self._run_part(self._authenticate)
                if self._protocol.end is None:
                    self._protocol.become(self._first_state)
                    if self._options.ack_flushed:
                        self._acknowledged.subscribe(self._on_log_grew)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._run_part, self._receive)
                        nursery.start_soon(self._run_part, self._report)
                        if self._plan.watches_min_offset:
                            nursery.start_soon(self._run_part, self._watch_min_offset)
                        due, wake = self._heartbeat_due, self._reporter.wake
                        await keep_time(self._options, lambda: self.last_read_at, due, wake)
                        detail = f"nothing read for {self._options.housekeeping_interval_s} s"
                        self.close(SessionEnd(Condition.HOUSEKEEPING_TIMEOUT, detail))
        finally:
            self._acknowledged.unsubscribe(self._on_log_grew)
            await trio.aclose_forcefully(self._stream)
        return self._protocol.end or SessionEnd(Condition.STOPPED, "")

    @property
    def has_followed(self) -> bool:
        """Whether the master has sent a frame that fits the log, and passed the check of its first bytes, if any."""
        return self._protocol.has_followed

    @property
    def epoch(self) -> int:
        """The master's last term, -1 while it is not known or there are no terms."""
        return NO_EPOCH if self._follower is None else self._follower.epoch

    def close(self, end: SessionEnd) -> None:
        """Makes `run` end with `end`, unless it is ending already."""
        self._scope.cancel()  # first: tasks that wait for a state must not continue in CLOSED
        self._protocol.close(end)

    @property
    def _first_state(self) -> SessionState:
        if self._follower is not None:
            return SessionState.GREETING
        return SessionState.ASKING if self._plan.asks_range else SessionState.PREPARING

    async def _authenticate(self) -> SessionEnd | None:
        """Proves that this side knows the secret and checks that the master does; returns None if both do, else why the
        session ends."""
        assert self._options.handshake is not None
        refused = await authenticate_to_master(self._stream, self._options.handshake)
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

    # The reader

    async def _receive(self) -> SessionEnd:
        parser, receive_into, read = self._parser, self._transport.receive_into, self._read
        # One reused buffer: fresh memory costs a page fault for each of its pages.
        buffer = memoryview(bytearray(RECEIVE_SIZE_FIRST))
        while size := await receive_into(buffer, read):
            received = buffer[self._pumped_bytes : size]
            if self.reported_offset < 0 and bytes(received[: len(CHALLENGE_BEGIN)]) == CHALLENGE_BEGIN:
                detail = "the master demands haSharedSecret, and none is set here"
                return SessionEnd(Condition.NOT_AUTHENTICATED, detail)
            self.last_read_at = now = trio.current_time()
            self.flow.count(len(received), now)
            for event in parser.feed(received):
                if isinstance(event, TransferHeader):
                    end = await self._take_header(event.physical_offset, event.body_size)
                elif isinstance(event, TransferBody):
                    end = await self._take_body(event.physical_offset, event.chunk)
                else:
                    end = await self._take_epoch_message(event)
                if end is not None:
                    return end
            if self._follower is not None and self._protocol.state.value is SessionState.FOLLOWING:
                self._follower.confirm()
                self._note_held()
            if size >= BULK_BYTES:
                self._bulk_count += 1
                self._reporter.wake()
            else:
                self._on_log_grew()
            if size == len(buffer) < self._options.receive_size_bytes:
                buffer = memoryview(bytearray(min(2 * size, self._options.receive_size_bytes)))
        return SessionEnd(Condition.MASTER_CLOSED, self._explain_close())

    def _read(self, descriptor: int, buffer: memoryview) -> int | None:
        """Receives, and in the steady state appends and reports the complete frames. Returns None if no more has to be
        done, else the number of bytes received. Raises OSError if receiving fails."""
        self._pumped_bytes = 0
        is_steady = self._pumps and self._protocol.is_appending and self._parser.is_between_frames
        tail = self._log.tail() if is_steady and self._reporter.is_idle else None
        if tail is None:
            return read_into(descriptor, buffer)
        began, offset = trio.current_time(), self._log.max_offset.value
        received, taken, size, sent = pump(descriptor, buffer, offset, *tail, BULK_BYTES)
        if taken:
            self._pumped_bytes = taken
            self.last_read_at = began
            self.flow.count(taken, began)
            if taken < BULK_BYTES:
                self.reported_offset = offset + size
                self._reporter.leave_rest(self._encode_report(offset + size), sent)
                self.last_write_at = began
            publish = partial(self._log.note_appended, size, began)
            if self._poller is None:
                publish()
            else:
                self._poller.as_turn(publish)
        return None if 0 < taken == received < BULK_BYTES else received

    async def _take_epoch_message(self, message: MasterHandshake | EpochFrameHeader) -> SessionEnd | None:
        assert self._follower is not None
        if isinstance(message, MasterHandshake):
            if self._protocol.state.value is not SessionState.GREETING:
                raise RemoteProtocolError("a second handshake")
            self._greeting = message
            end = self._follower.meet(message)
            if end is None:
                self._protocol.become(SessionState.RECONCILING)
            return end
        self._follower.note_frame(message)
        # A negative offset: the master has sent nothing, and has nothing to send.
        offset = message.physical_offset if message.physical_offset >= 0 else self._protocol.expected_offset
        return await self._take_header(offset, message.body_size)

    def _explain_close(self) -> str:
        where = f"at offset {self._log.max_offset.value}"
        if self.has_followed:
            return where
        return (
            f"{where}, before anything usable came: is that its haListenPort? "
            "If it is, its log says why (ha.slave_disconnected)"
        )

    async def _take_header(self, offset: int, size: int) -> SessionEnd | None:
        if self._protocol.starts_empty_log(offset, size):
            end = await self._append(offset, memoryview(b""))
            if end is not None:
                return end
        end = self._protocol.take_header(offset, size)
        if end is None and not size:
            self._heartbeat_received.set()
        return end

    async def _take_body(self, offset: int, chunk: memoryview) -> SessionEnd | None:
        piece = self._protocol.take_body(offset, chunk)
        return await self._append(*piece) if isinstance(piece, tuple) else piece

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
        request = await self._negotiate()
        if isinstance(request, SessionEnd):
            return request
        await trio.lowlevel.checkpoint_if_cancelled()
        self._protocol.become_requested(request)
        await self._send_report(request.offset)
        bulk_count = 0
        while True:
            offset = self._reportable_offset
            # Before byte 0 is restored there is nothing to acknowledge. A RocketMQ 4.9 master whose log is empty would
            # close the connection at a report of 1.
            is_restoring = self._protocol.state.value is SessionState.RESTORING
            is_due = trio.current_time() >= self._heartbeat_due() and not is_restoring
            if bulk_count != self._bulk_count and 0 < offset - self.reported_offset < REPORT_STEP_BYTES and not is_due:
                bulk_count = self._bulk_count
                for _ in range(BULK_TURNS):
                    await trio.lowlevel.checkpoint()
                continue
            if offset > self.reported_offset or is_due:
                await self._send_report(offset)
                continue
            if rest := await self._reporter.wait_for_work():
                await self._send(rest)

    def _heartbeat_due(self) -> float:
        return self.last_write_at + self._options.heartbeat_interval_s + TICK_S

    @property
    def _reportable_offset(self) -> int:
        if self._protocol.state.value in ACKNOWLEDGING_STATES:
            return max(self._acknowledged.value, self.reported_offset)
        return self.reported_offset

    def _note_held(self) -> None:
        """Passes the end of the log here to the follower; with SYNC_FLUSH, the end of its flushed part."""
        follower, greeting = self._follower, self._greeting
        if follower is not None and greeting is not None and self._protocol.state.value is SessionState.FOLLOWING:
            follower.note_held(self._acknowledged.value, greeting.max_offset)

    def _on_log_grew(self) -> None:
        """Reports the new end of the log, or wakes the reporter to do that."""
        self._note_held()
        if not self._reporter.is_idle:
            return  # the reporter checks the log again before it becomes idle, or has ended
        offset = self._reportable_offset
        if offset <= self.reported_offset:
            return
        if self._transport.can_send_nowait:
            self.reported_offset = offset
            try:
                if self._reporter.try_send(self._encode_report(offset)):
                    self.last_write_at = trio.current_time()
            except trio.BrokenResourceError as error:
                self.close(self._lost(error))
        else:
            self._reporter.wake()

    async def _negotiate(self) -> Request | SessionEnd:
        """Exchanges handshakes or asks the range question, if necessary; returns what to request, or why the session
        ends."""
        protocol = self._protocol
        if self._follower is not None:
            await self._transport.send_all(self._follower.greeting)
            await protocol.state.wait_value(lambda now: now is not SessionState.GREETING)
            assert self._greeting is not None
            end = await self._follower.settle(self._greeting)
            if end is not None:
                return end
        elif self._plan.asks_range:
            await self._transport.send_all(RANGE_QUESTION)
            with trio.move_on_after(self._plan.answer_timeout_s):
                await protocol.state.wait_value(lambda now: now is not SessionState.ASKING)
        if self._plan.asks_only:
            return SessionEnd(Condition.MASTER_CLOSED, self._explain_close(), retry=Retry.WITHOUT_QUESTION)
        await trio.lowlevel.checkpoint_if_cancelled()
        if protocol.state.value is not SessionState.PREPARING:
            protocol.become(SessionState.PREPARING)
        return await self._choose_request()

    async def _choose_request(self) -> Request | SessionEnd:
        log, master_range = self._log, self._protocol.master_range
        own, is_empty, first = log.max_offset.value, log.min_offset < 0, log.min_offset
        if master_range is not None:
            first, last = master_range
            if own > last:
                detail = (
                    f"the log here ends at {own}, the master's at {last}: it lost its tail, or it is another master; "
                    "to replace this log by the master's, stop this slave and empty its store"
                )
                return SessionEnd(Condition.MASTER_BEHIND, detail, first_offset=first)
        elif is_empty and self._plan.tries_first_byte:
            known = await self._plan.master_min_offset()
            if known is not None and known > 0:
                return Request(known)
            return Request(first_byte.REQUEST_OFFSET, FirstByte())
        if self._options.ack_flushed and own > 0:
            await log.flushed_offset.wait_beyond(own - 1)
        if is_empty:
            return Request(own)
        if not self._plan.compares_overlap and master_range is None:
            known = await self._plan.master_min_offset()
            if known is None or known >= own:
                return Request(own)  # nothing before the end can be compared: the master has deleted it
            first = known
        overlap = await self._begin_overlap(first, own)
        if isinstance(overlap, SessionEnd):
            return overlap
        return Request(own if overlap is None else overlap.start, overlap)

    async def _begin_overlap(self, first: int, own: int) -> Overlap | SessionEnd | None:
        """Reads the end of the log here, back to the head of a record if one is found, to compare it with the master's.
        Returns None if there is nothing to compare, or why the session ends. `first`: the first physical offset of the
        master's log if it is known, otherwise of the log here."""
        log, size = self._log, self._options.overlap_bytes_max
        first = max(first, log.min_offset)
        earliest = overlap_start(first, own, log.segment_size, max(size, SEARCH_BYTES_MAX))
        searched_size = 0
        while True:
            start = max(earliest, overlap_start(first, own, log.segment_size, size))
            held = await self._read_end(start, own)
            if isinstance(held, SessionEnd):
                return held
            if not held:
                return None
            begin = own - len(held)  # later than `start` if damage was skipped
            unsearched = held[: len(held) - searched_size + HEAD_SIZE - 1]
            if begin > start or start == earliest or await find_head(unsearched, begin):
                return Overlap(begin, held)
            searched_size = len(held)
            size *= 2

    async def _read_end(self, start: int, own: int) -> bytes | SessionEnd:
        """Returns the bytes from `start` to the log's end. If some of them are damaged and not healed soon, returns
        only those after the damage. If there are none, or the disk can't read, returns why the session ends."""
        log = self._log
        held = b""
        while start + len(held) < own:
            try:
                held += await log.read(start + len(held), own - start - len(held))
            except OSError as error:
                return SessionEnd(Condition.DAMAGED, f"the end of the log here can't be read: {error}")
            except DamagedBytes as damaged:
                # Shorter than the master's housekeeping interval, as nothing is sent meanwhile: if the master closed
                # the connection, status pages would show that, and not the damage.
                wait_s = min(self._options.reconnect_interval_s, self._options.housekeeping_interval_s / 2)
                with trio.move_on_after(wait_s) as scope:
                    await log.wait_healed(damaged.begin, damaged.end)
                if not scope.cancelled_caught:
                    continue
                if damaged.end >= own:
                    return SessionEnd(Condition.DAMAGED, f"the end of the log here: {damaged}")
                start, held = damaged.end, b""
        return held

    async def _send_report(self, offset: int) -> None:
        # Set before it is sent: the answer may be read before this task runs again.
        self.reported_offset = offset
        await self._send(self._encode_report(offset))

    async def _send(self, data: bytes | memoryview) -> None:
        await self._transport.send_all(data)
        self.last_write_at = trio.current_time()

    # The watch

    async def _watch_min_offset(self) -> SessionEnd:
        while True:
            await self._heartbeat_received.wait()
            self._heartbeat_received = trio.Event()
            if self._protocol.master_range is not None:
                await trio.sleep_forever()
            first = await self._plan.master_min_offset()
            own = self._log.max_offset.value
            if first is not None and own < first:
                detail = f"the next byte here is {own}, the master's log begins at {first}"
                return SessionEnd(Condition.OUT_OF_RANGE, detail, first_offset=first)


ACKNOWLEDGING_STATES = frozenset({SessionState.REQUESTED, SessionState.FOLLOWING})
"""States in which the end of the log is reported: it is neither being compared nor lacks its first byte."""


def _encode_epoch_report(offset: int) -> bytes:
    return EpochReport(offset).encode()

"""One slave's connection on the master: RocketMQ's DefaultHAConnection as one nursery with a reader and a writer.

The reader takes reports, the writer sends frames. When either ends, both end and the connection is closed: a cancelled
send leaves an unknown part of a frame on the wire. The task that runs both wakes the writer for heartbeats, and ends
the connection of a slave that is silent for too long (keep_time.py).

Reports:
- The first valid report, the request, is the physical offset at which the transfer starts. 0 means the start of the
  log's last segment, or the log's first offset if the slave has asked the range question (range_question.py) or is a
  member whose handshake does not request the last segment.
- Later reports acknowledge. A report beyond the master's end, below the previous one or above what was sent closes the
  connection. RocketMQ 4.9 compares reports only with the master's end, and 5.x does not check them, so that a wrong
  report corrupts push2SlaveMaxOffset. Correct slaves see no difference.

Frames are sent whenever the log has grown, with everything up to transfer_batch_size and the segment's end, so n puts
between two wake-ups cost one frame. A heartbeat is sent when more than heartbeat_interval has passed since the last
byte was written (or since accept); as in RocketMQ, this is checked before each data frame.

A member of a failover group starts with a handshake (ha/protocol/auto_switch_frame.py); the rest is the same with other
headers, made by `EpochFrames`. A master of such a group serves any other slave as usual.

While the writer is idle and the slave has acknowledged all that was sent, the code that makes the log grow sends the
frame itself. So a single put is sent without waiting for the event loop, and puts that arrive while others are in
flight are sent together. (Nagle's algorithm, with acknowledgements of the log's bytes.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import trio

from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
from ha.poller import Poller
from ha.protocol.auto_switch_frame import (
    FRAME_HEADER_SIZE,
    EpochReport,
    SlaveHandshake,
    SlaveMessageParser,
    speaks_epochs,
)
from ha.protocol.ha_frame import REPORT_SIZE, TRANSFER_HEADER_SIZE, ReportParser, encode_transfer_header
from ha.replication.epoch_frames import EpochFrames
from ha.replication.handshake import authenticate_slave
from ha.replication.keep_time import keep_time
from ha.replication.log import ReplicatedLog
from ha.replication.options import TICK_S, HAOptions
from ha.replication.progress import CloseReason, SlaveProgress, SlaveState
from ha.replication.range_question import OpeningParser, encode_range_answer
from ha.transport import EagerWriter, transport_for

logger = logging.getLogger(__name__)

REPORT_BUFFER_BYTES = 8192
"""Maximum bytes of reports per receive: a thousand reports, of which only the last counts."""

JOINED_BYTES_MAX = 64 << 10
"""Maximum bytes of a body that are copied into one send with the header. So a small frame takes one send. The header
of a large one is not sent alone, because that would wake the slave once more. Copying this much costs a third of a
system call on loopback."""

OPENING_S_MAX = 0.5
"""Time in seconds to wait for more bytes if the first eight bytes of a slave can be a report or the first half of a
handshake. If no more follow, the eight bytes are a report."""


class HAConnection:
    """Serves one slave over `stream` until either side ends it. `run` owns both tasks and closes the stream."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        log: ReplicatedLog,
        options: HAOptions,
        progress: SlaveProgress,
        *,
        on_ack: Callable[[SlaveProgress], None],
        on_state: Callable[[SlaveProgress], None],
        on_handshake: Callable[[HAConnection, SlaveHandshake], EpochFrames | CloseReason] | None = None,
        poller: Poller | None = None,
    ) -> None:
        """`on_ack` is called after each accepted report, `on_state` after each change of `progress.state`.

        `on_handshake` returns the encoder for the messages to a member of a failover group, or the reason for refusing
        the member; None: this node is not in such a group. With a `poller` (ha/poller.py), its task receives the
        reports.
        """
        self.progress = progress
        self._stream = stream
        self._transport = transport_for(stream, REPORT_BUFFER_BYTES, poller)
        self._log = log
        self._options = options
        self._on_ack = on_ack
        self._on_state = on_state
        self._on_handshake = on_handshake
        self._handshake: SlaveHandshake | None = None
        self._frames: EpochFrames | None = None
        self._encode_header: Callable[[int, int], bytes] = encode_transfer_header
        self._header_size = TRANSFER_HEADER_SIZE
        self._scope = trio.CancelScope()
        self._close_reason: CloseReason | None = None
        self._spoken = trio.Event()
        """Set once the slave has sent its first message, of any kind"""
        self._requested = trio.Event()
        self._writer = EagerWriter(self._transport)

    def close(self, reason: CloseReason) -> None:
        """Makes `run` end for `reason`, unless it is ending already."""
        if self._close_reason is None:
            self._close_reason = reason
        self._scope.cancel()

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called, or the reader or writer has ended."""
        return self._close_reason is not None

    async def run(self) -> CloseReason:
        """Serves the slave until the connection ends, and returns the reason. Always closes the stream, also if
        cancelled."""
        try:
            with self._scope:
                if self._options.handshake is not None:
                    await self._run_half(self._authenticate)
                if not self.is_closing:
                    self._log.max_offset.subscribe(self._on_log_grew)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._run_half, self._read)
                        nursery.start_soon(self._run_half, self._write)
                        # Only a complete message is a sign of life. RocketMQ counts any byte, so that a peer that sends
                        # single bytes can stay connected for ever. Slaves send a report in one piece.
                        due, wake = self._heartbeat_due, self._writer.wake
                        await keep_time(self._options, lambda: self.progress.last_report_at, due, wake)
                        self.close(CloseReason.HOUSEKEEPING_TIMEOUT)
        finally:
            self._log.max_offset.unsubscribe(self._on_log_grew)
            reason = self._close_reason or CloseReason.SERVICE_STOPPED
            self.progress.become_shutdown(reason)
            self._on_state(self.progress)
            await trio.aclose_forcefully(self._stream)
        return reason

    async def _authenticate(self) -> CloseReason | None:
        """Checks that the slave knows the secret; returns None if it does, else why the connection is closed."""
        assert self._options.handshake is not None
        refused = await authenticate_slave(self._stream, self._options.handshake)
        if refused is None:
            self.progress.last_report_at = trio.current_time()
            return None
        reason, self.progress.close_detail = refused
        return reason

    async def _run_half(self, half: Callable[[], Awaitable[CloseReason | None]]) -> None:
        try:
            reason = await half()
        except RemoteProtocolError as error:
            logger.debug("ha.report_malformed peer=%s error=%r", self.progress.peer, str(error))
            reason = CloseReason.MALFORMED_REPORT
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            reason = CloseReason.CONNECTION_LOST
        if reason is not None:
            self.close(reason)

    # The reader

    async def _read(self) -> CloseReason:
        receive = self._transport.receive
        if self._on_handshake is None:
            return await self._read_reports(await receive())
        received, is_member = await receive(), None
        while received and is_member is None:
            is_member = speaks_epochs(received)
            if is_member is None:
                # A slave sends its first message in one piece: if nothing follows eight bytes, they are a report.
                wait_s = OPENING_S_MAX if len(received) == REPORT_SIZE else math.inf
                with trio.move_on_after(wait_s) as scope:
                    more = await receive()
                    received = received + more if more else b""
                if scope.cancelled_caught:
                    is_member = False
        return await (self._read_messages(received) if is_member else self._read_reports(received))

    async def _read_reports(self, chunk: bytes) -> CloseReason:
        """Reads the messages of a slave that is not a member, starting with `chunk`."""
        opening, parser, progress = OpeningParser(), ReportParser(), self.progress

        def take(chunk: bytes) -> CloseReason | None:
            reports = opening.feed(chunk)
            progress.is_reader = opening.is_reader
            if opening.is_question and not progress.has_asked:
                progress.has_asked = True
                self._spoken.set()
            offset = parser.feed(reports)
            return None if offset is None else self._take_report(offset)

        return await self._read_all(chunk, take)

    async def _read_messages(self, chunk: bytes) -> CloseReason:
        """Reads the messages of a member, starting with `chunk`."""
        parser = SlaveMessageParser()

        def take(chunk: bytes) -> CloseReason | None:
            for message in parser.feed(chunk):
                if isinstance(message, EpochReport):
                    reason = self._take_report(message.slave_max_offset)
                else:
                    reason = self._take_handshake(message)
                    self.progress.last_report_at = trio.current_time()
                if reason is not None:
                    return reason
            return None

        return await self._read_all(chunk, take)

    async def _read_all(self, chunk: bytes, take: Callable[[bytes], CloseReason | None]) -> CloseReason:
        """Passes `chunk` and all later bytes to `take`, until `take` returns a reason to close, or the stream ends.
        Returns that reason, or SLAVE_CLOSED."""
        reason = take(chunk) if chunk else CloseReason.SLAVE_CLOSED

        def goes_on(chunk: bytes) -> bool:
            nonlocal reason
            reason = take(chunk)
            return reason is None

        if reason is None:
            await self._transport.receive(goes_on)
        return reason or CloseReason.SLAVE_CLOSED

    def _take_handshake(self, handshake: SlaveHandshake) -> CloseReason | None:
        if self._handshake is not None:
            # RocketMQ repeats its handshake if the answer takes long, and expects one answer.
            return None if handshake == self._handshake else CloseReason.MALFORMED_REPORT
        assert self._on_handshake is not None
        frames = self._on_handshake(self, handshake)
        if isinstance(frames, CloseReason):
            return frames
        self._handshake, self._frames = handshake, frames
        self._encode_header, self._header_size = frames.header, FRAME_HEADER_SIZE
        self._spoken.set()
        return None

    def _take_report(self, offset: int) -> CloseReason | None:
        progress, end = self.progress, self._log.max_offset.value
        if offset > end:
            progress.close_detail = (
                f"it claims to hold offset {offset}, the log here ends at {end}: it follows another master's log, "
                "this one lost its tail, or it is no slave"
            )
            return CloseReason.REPORT_BEYOND_END
        if progress.state is SlaveState.CONNECTED:
            self._take_request(offset)
        elif progress.contradicts(offset):
            progress.close_detail = f"it reported {offset} after {progress.ack_offset}"
            return CloseReason.OFFSET_MISMATCH
        progress.take_report(offset, end, trio.current_time())
        self._on_ack(progress)
        return None

    def _take_request(self, offset: int) -> None:
        first, end = max(self._log.min_offset, 0), self._log.max_offset.value
        if offset:
            start = offset
        elif self.progress.has_asked or (self._handshake is not None and not self._handshake.syncs_from_last_file):
            start = first
        else:
            start = max(end - end % self._log.segment_size, first)
        if start < first:
            self._become_out_of_range(start)
        else:
            self.progress.become_transfer(offset, start, end)
            self._on_state(self.progress)
        self._requested.set()
        self._spoken.set()

    def _become_out_of_range(self, offset: int) -> None:
        self.progress.become_out_of_range(offset)
        self._on_state(self.progress)

    # The writer

    async def _write(self) -> CloseReason:
        progress, log = self.progress, self._log
        await self._spoken.wait()
        if self._frames is not None:
            await self._send(self._frames.answer())
        elif progress.has_asked and not self._requested.is_set():
            await self._send(encode_range_answer(max(log.min_offset, 0), log.max_offset.value))
        await self._requested.wait()
        if progress.state is SlaveState.OUT_OF_RANGE:
            return await self._serve_out_of_range()
        while True:
            if trio.current_time() >= self._heartbeat_due():
                await self._send(self._encode_header(progress.transfer_offset, 0))
            position, end = progress.transfer_offset, log.max_offset.value
            if position > end:
                return CloseReason.LOG_TRUNCATED
            if position == end:
                if rest := await self._writer.wait_for_work():
                    await self._send(rest)
                continue
            size_max = await self._frame_size_max()
            if self._frames is not None:
                size_max = self._frames.cut(position, size_max)
            try:
                if position < log.min_offset:
                    raise OffsetGone(position, log.min_offset, end)
                body = log.read_hot(position, size_max)
                if body is None:
                    body = memoryview(await log.read(position, size_max, "replication"))
            except DamagedBytes as damaged:
                if progress.is_reader:
                    progress.close_detail = f"it asked for what is damaged here: {damaged}"
                    return CloseReason.DAMAGED_HERE
                await self._wait_healed(position, damaged)
                continue
            except OffsetGone:
                if position > log.max_offset.value:
                    return CloseReason.LOG_TRUNCATED
                self._become_out_of_range(position)
                return await self._serve_out_of_range()
            except OSError as error:
                progress.close_detail = f"the log here can't be read at {position}: {error}"
                return CloseReason.DAMAGED_HERE
            if not body:
                continue  # the log was truncated to this position while it was read
            # Released as soon as it is sent, so that the store can unmap the segment.
            with body:
                await self._send_frame(position, body)
            if progress.transfer_offset != log.max_offset.value:
                await trio.lowlevel.checkpoint()  # a send that does not block is no checkpoint

    def _on_log_grew(self) -> None:
        """Sends the new bytes of the log, or wakes the writer to send them. Also called when the log is truncated:
        closes the connection if more was sent than the log now has."""
        progress = self.progress
        if self._log.max_offset.value < progress.transfer_offset:
            # Closed at once: a waiting writer would not notice if other bytes replaced those that it has sent.
            self.close(CloseReason.LOG_TRUNCATED)
            return
        now = trio.current_time()
        if progress.sample_offset < 0 and progress.is_counted:
            progress.sample_offset, progress.sample_started_at = self._log.max_offset.value, now
        if not self._writer.is_idle:
            return  # the writer checks the log again before it becomes idle
        if progress.ack_offset == progress.transfer_offset:
            progress.caught_up.at = now
            if self._frames is not None and progress.broker_id is not None and not self.is_closing:
                self._frames.sync_state.grow(progress.broker_id, now)
            try:
                if self._transport.can_send_nowait and self._try_send(now):
                    return
            except trio.BrokenResourceError:
                self.close(CloseReason.CONNECTION_LOST)
        self._writer.wake()

    def _try_send(self, now: float) -> bool:
        """Sends all new bytes as one frame without waiting; returns False if something is left for the writer."""
        progress, log = self.progress, self._log
        position = progress.transfer_offset
        size = log.max_offset.value - position
        if not 0 < size <= JOINED_BYTES_MAX or position < log.min_offset or now >= self._heartbeat_due():
            return False
        if progress.flow.budget(now) is not None:
            return False
        chunk = log.read_hot(position, size)
        if chunk is None:
            return False
        with chunk:
            if len(chunk) != size:  # it spans two segments
                return False
            frame = b"".join((self._encode_header(position, size), chunk))
        progress.transfer_offset = position + size
        sent = self._writer.try_send(frame)
        if sent:
            progress.note_sent(sent, now)
        return sent == len(frame)

    async def _wait_healed(self, position: int, damaged: DamagedBytes) -> None:
        """Sends only heartbeats until the bytes at `position` are healed."""
        progress = self.progress
        progress.waits_for = damaged
        logger.error("ha.transfer_paused peer=%s at=%d reason=%r", progress.peer, position, str(damaged))
        try:
            while True:
                with trio.move_on_at(self._heartbeat_due()) as scope:
                    await self._log.wait_healed(position, position + 1)
                if not scope.cancelled_caught:
                    break
                await self._send(self._encode_header(position, 0))
        finally:
            progress.waits_for = None
        logger.info("ha.transfer_resumed peer=%s at=%d", progress.peer, position)

    async def _serve_out_of_range(self) -> CloseReason:
        """Sends heartbeats to a slave that is out of range until it closes the connection or is silent for too long."""
        progress, log = self.progress, self._log
        if progress.has_asked:
            await self._send(self._encode_header(log.min_offset, 0))
        while True:
            await trio.sleep_until(self._heartbeat_due())
            await self._send(self._encode_header(log.min_offset if progress.has_asked else progress.transfer_offset, 0))

    async def _send_frame(self, position: int, body: memoryview) -> None:
        size = len(body)
        assert size, "a read before the end of the log returned nothing"
        # Set before the send: a slave may acknowledge the first bytes while the last ones are still being sent.
        self.progress.transfer_offset = position + size
        header = self._encode_header(position, size)
        await self._send(b"".join((header, body[:JOINED_BYTES_MAX])))
        if size > JOINED_BYTES_MAX:
            await self._send(body[JOINED_BYTES_MAX:])

    async def _send(self, payload: bytes | memoryview) -> None:
        await self._transport.send_all(payload)
        self.progress.note_sent(len(payload), trio.current_time())

    async def _frame_size_max(self) -> int:
        """Returns the maximum size in bytes of the next body; waits first if the rate limit's budget is used up."""
        size_max = self._options.transfer_batch_size_bytes
        while True:
            now = trio.current_time()
            budget = self.progress.flow.budget(now)
            if budget is None:
                return size_max
            if budget > self._header_size:
                return min(size_max, budget - self._header_size)
            await trio.sleep_until(self.progress.flow.next_budget(now))

    def _heartbeat_due(self) -> float:
        return self.progress.last_write_at + self._options.heartbeat_interval_s + TICK_S

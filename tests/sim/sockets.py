"""Simulated TCP connections: their two ends, the pipes between them, and the sockets of a host. See network.py."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from random import Random

    from tests.sim.network import Network

EPHEMERAL_PORT_FIRST = 40_000
RETRANSMISSION_S = 0.2
SHORT_SEND_CHANCE = 0.1

_FIN = None


class Link:
    """The link from one host to another. Only `Network` and the faults change it."""

    __slots__ = ("base_s", "clog_s", "is_cut", "jitter_s", "loss", "stalled")

    def __init__(self, base_s: float, jitter_s: float) -> None:
        self.base_s = base_s
        self.jitter_s = jitter_s
        self.clog_s = 0.0
        self.loss = 0.0
        self.is_cut = False
        self.stalled: dict[Pipe, None] = {}

    def delay_s(self, chance: Random) -> float:
        """Draws the delay of one segment."""
        delay = self.base_s + self.clog_s + chance.random() * self.jitter_s
        if self.loss and chance.random() < self.loss:
            delay += RETRANSMISSION_S * chance.choice((1, 1, 3))
        return delay


class Host:
    """A machine in the network. `is_up`: it has power."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.is_up = True
        self.ports_taken: dict[int, SimPort | SimListener] = {}
        """By port: bound, or listened on"""
        self.streams: dict[SimStream, None] = {}
        self.ports = itertools.count(EPHEMERAL_PORT_FIRST)


class Pipe:
    """One direction of a connection: from `sender`'s kernel to `receiver`'s."""

    __slots__ = ("back", "cut_after", "link", "network", "queue", "receiver", "sender", "unread", "unread_hidden")

    def __init__(self, network: Network, sender: SimStream, receiver: SimStream, link: Link, back: Link) -> None:
        self.network = network
        self.sender = sender
        self.receiver = receiver
        self.link = link
        self.back = back
        self.queue: deque[tuple[float, bytes | None]] = deque()
        self.unread = 0
        """Bytes taken from the sender and, as far as its kernel knows, not read yet"""
        self.unread_hidden = 0
        """Bytes that were read, of which the sender can't learn while the return link is cut"""
        self.cut_after: int | None = None
        """The connection is reset after this many more bytes have arrived"""

    def put(self, piece: bytes | None) -> None:
        """Takes a piece (None: the end) from the sender and sends it, in one or more segments."""
        network, queue = self.network, self.queue
        chance = network.chance
        last = queue[-1][0] if queue else 0.0
        at = 0
        if piece is not None:
            self.unread += len(piece)
            while len(piece) - at > 1 and chance.random() < network.split_chance:
                end = at + 1 + int((len(piece) - at - 1) * chance.random())
                last = self._schedule(piece[at:end], last)
                at = end
        self._schedule(piece if piece is None or at == 0 else piece[at:], last)

    def _schedule(self, segment: bytes | None, last: float) -> float:
        network = self.network
        due = max(last, trio.current_time() + self.link.delay_s(network.chance))
        due = network.world.timers.call_at(due, self.pump)
        self.queue.append((due, segment))
        return due

    def pump(self) -> None:
        """Delivers what is due, as far as links and hosts allow."""
        now, queue, receiver = trio.current_time(), self.queue, self.receiver
        while queue and queue[0][0] <= now:
            if self.link.is_cut or not receiver.host.is_up or self.sender.is_blackholed:
                self.link.stalled[self] = None
                return
            if receiver.is_gone or (receiver.is_closed and queue[0][1] is not None):
                queue.clear()
                self._refuse()
                return
            segment = queue.popleft()[1]
            if segment is None:
                receiver.take_end()
                continue
            if self.cut_after is not None:
                if len(segment) >= self.cut_after:
                    receiver.take(segment[: self.cut_after])
                    self.network.reset(self.sender, "cut")
                    return
                self.cut_after -= len(segment)
            receiver.take(segment)

    def _refuse(self) -> None:
        """Sends a reset back, as a kernel does for an unknown connection. It is lost if the return link is cut."""
        if self.back.is_cut:
            self.link.stalled[self] = None
            self.queue.append((trio.current_time(), b""))  # retransmitted, and rejected, once the link heals
            return
        delay = self.back.delay_s(self.network.chance)
        self.network.world.timers.call_in(delay, self.sender.fail, "connection reset by peer")

    def read(self, size: int) -> None:
        """The receiver's application read bytes: there is room for as many."""
        if self.back.is_cut:
            self.unread_hidden += size
            self.back.stalled[self] = None
            return
        self.unread -= size
        self.sender.wake_sender()

    def heal(self) -> None:
        """Tries again after a link may have healed."""
        if self.unread_hidden and not self.back.is_cut:
            self.unread -= self.unread_hidden
            self.unread_hidden = 0
            self.sender.wake_sender()
        if self.queue:
            self.pump()

    def drop(self) -> None:
        """Drops everything in flight."""
        self.queue.clear()


class SimStream(trio.abc.Stream):
    """One end of a connection. `out` and `into` are set when it is created."""

    out: Pipe
    into: Pipe

    def __init__(self, network: Network, host: Host, peer: tuple[str, int]) -> None:
        self.network = network
        self.host = host
        self.peer_address = peer
        self.is_closed = False
        self.is_gone = False
        """Its kernel has forgotten it"""
        self.is_blackholed = False
        self._failure = ""
        self._ended = False
        self._inbox: deque[bytes] = deque()
        self._arrival = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._is_sending = self._is_receiving = False
        self.tap: Callable[[bytes], None] | None = None
        """Called with all sent bytes, when they are handed to the network"""
        host.streams[self] = None

    # what the owner calls

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending")
        self._is_sending = True
        try:
            await trio.lowlevel.checkpoint()
            raw = bytes(data)
            at = 0
            while True:
                self._check()
                room = self.network.window - self.out.unread
                if room > 0:
                    piece = raw[at : at + room]
                    at += len(piece)
                    if piece:
                        self._give(piece)
                    if at >= len(raw):
                        return
                await self._room.park()
        finally:
            self._is_sending = False

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Sends as much as the kernel accepts at once: usually everything that fits, sometimes less or nothing."""
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending")
        try:
            self._check()
        except trio.ClosedResourceError as error:
            raise trio.BrokenResourceError(str(error)) from error
        chance = self.network.chance
        size = min(len(data), max(0, self.network.window - self.out.unread))
        if chance.random() < SHORT_SEND_CHANCE:
            size = int(size * chance.random())
        if size:
            self._give(bytes(data[:size]))
        return size

    def _give(self, piece: bytes) -> None:
        if self.tap is not None:
            self.tap(piece)
        self.out.put(piece)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
        while self.out.unread >= self.network.window:
            self._check()
            await self._room.park()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._is_receiving:
            raise trio.BusyResourceError("another task is receiving")
        self._is_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while True:
                if self.is_closed:
                    raise trio.ClosedResourceError("closed here")
                if self._inbox:
                    return self._take(max_bytes or 65_536)
                if self._failure:
                    raise trio.BrokenResourceError(self._failure)
                if self._ended:
                    return b""
                await self._arrival.park()
        finally:
            self._is_receiving = False

    def _take(self, size_max: int) -> bytes:
        inbox = self._inbox
        if len(inbox) == 1 and len(inbox[0]) <= size_max:
            taken = inbox.popleft()
        else:
            whole = b"".join(inbox)
            inbox.clear()
            taken = whole[:size_max]
            if len(whole) > size_max:
                inbox.append(whole[size_max:])
        self.into.read(len(taken))
        return taken

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Closes it as close(2) does: accepted bytes are still sent; a reset if received bytes were left unread."""
        if self.is_closed:
            return
        self.is_closed = True
        self._wake_all()
        if self._failure or self.is_gone:
            self._forget()
        elif self._inbox:
            self.out.drop()
            self._forget()
            delay = self.out.link.delay_s(self.network.chance)
            self.network.world.timers.call_in(delay, self.network.deliver_reset, self.out)
        else:
            self.out.put(_FIN)
            if self._ended:
                self.host.streams.pop(self, None)

    # what the kernel does

    def _check(self) -> None:
        if self.is_closed:
            raise trio.ClosedResourceError("closed here")
        if self._failure:
            raise trio.BrokenResourceError(self._failure)

    def take(self, segment: bytes) -> None:
        """Bytes arrive."""
        if segment:
            self._inbox.append(segment)
            self._arrival.unpark_all()

    def take_end(self) -> None:
        """The peer's end arrives."""
        self._ended = True
        self._arrival.unpark_all()
        if self.is_closed:
            self.host.streams.pop(self, None)

    def fail(self, reason: str) -> None:
        """A reset arrives: both directions fail."""
        if not self._failure and not self.is_gone:
            self._failure = reason
            self._forget()
            self._wake_all()

    def vanish(self) -> None:
        """Its machine lost power: nothing is sent."""
        self.is_closed = True
        self._forget()
        self._wake_all()

    def wake_sender(self) -> None:
        """There is room again."""
        self._room.unpark_all()

    def _forget(self) -> None:
        self.is_gone = True
        self.out.drop()
        self.host.streams.pop(self, None)

    def _wake_all(self) -> None:
        self._arrival.unpark_all()
        self._room.unpark_all()

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended it."""
        return not (self.is_closed or self.is_gone or self._ended or self._failure)


class SimListener(trio.abc.Listener[SimStream]):
    """A listening socket; connections wait in a bounded backlog."""

    def __init__(self, host: Host, port: int) -> None:
        self.host = host
        self.port = port
        self.backlog: deque[SimStream] = deque()
        self.is_closed = False
        self._arrival = trio.lowlevel.ParkingLot()

    async def accept(self) -> SimStream:
        await trio.lowlevel.checkpoint()
        while not self.backlog:
            if self.is_closed:
                raise trio.ClosedResourceError("closed here")
            await self._arrival.park()
        return self.backlog.popleft()

    def offer(self, stream: SimStream) -> None:
        """A connection was established."""
        self.backlog.append(stream)
        self._arrival.unpark()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Stops listening; connections not accepted yet are reset."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.host.ports_taken.get(self.port) is self:
            del self.host.ports_taken[self.port]
        while self.backlog:
            stream = self.backlog.popleft()
            stream.network.reset(stream, "not accepted")
        self._arrival.unpark_all()


class SimPort:
    """Implements `ha.node.platform.Port`."""

    def __init__(self, host: Host, asked_host: str, port: int) -> None:
        self.host = asked_host
        self.port = port
        self._host = host

    def listen(self) -> list[SimListener]:
        listener = SimListener(self._host, self.port)
        if self._host.ports_taken.get(self.port) is self:
            self._host.ports_taken[self.port] = listener
        else:
            listener.is_closed = True  # its process died meanwhile
        return [listener]

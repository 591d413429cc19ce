"""A simulated network of TCP connections between hosts, each host with one address.

What holds, as of real TCP: bytes of one direction arrive in order, whole or not at all. What is drawn: where they are
split into segments, and how long each takes. A sender waits while `window` of its bytes are not read by the other
side.

Faults, each told apart by what either side can notice:
- a cut link (one way of a pair of hosts): nothing passes. Data waits and is sent again after the link heals, as TCP
  retransmits; new connections wait; a reset on its way is lost, so the other side keeps a half-open connection. What
  the receiver reads is not acknowledged over a cut way back.
- a clogged link: everything takes longer. A lossy one: single segments take a retransmission longer, all behind wait.
- a reset connection: both sides fail, with or without what was under way; `after_bytes`: in the middle of a frame.
- a half-open one: it stays, and nothing ever passes again (a middlebox forgot it).
- a process that dies: its kernel closes its connections. A machine that loses power says nothing; when it is back, it
  answers what comes on old connections with a reset.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from ha.errors import AddressInUse

if TYPE_CHECKING:
    from random import Random

    from tests.sim.world import World

EPHEMERAL_PORT_FIRST = 40_000
BACKLOG = 128
SYN_RETRY_S = 1.0
RETRANSMISSION_S = 0.2
WAIT_AFTER_HEAL_S = 1.5
"""Retransmissions back off: after a link heals, what waits goes out within so long."""

_FIN = None


class Link:
    """The way from one host to another. Only `Network` and the faults change it."""

    __slots__ = ("base_s", "clog_s", "is_cut", "jitter_s", "loss", "stalled")

    def __init__(self, base_s: float, jitter_s: float) -> None:
        self.base_s = base_s
        self.jitter_s = jitter_s
        self.clog_s = 0.0
        self.loss = 0.0
        self.is_cut = False
        self.stalled: dict[Pipe, None] = {}

    def delay_s(self, chance: Random) -> float:
        """Draw how long one segment takes."""
        delay = self.base_s + self.clog_s + chance.random() * self.jitter_s
        if self.loss and chance.random() < self.loss:
            delay += RETRANSMISSION_S * chance.choice((1, 1, 3))
        return delay


class Host:
    """A machine's place in the network. `is_up`: it has power."""

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
        """Bytes that were read, which the sender can't be told while the way back is cut"""
        self.cut_after: int | None = None
        """The connection is reset after so many bytes more have arrived"""

    def put(self, piece: bytes | None) -> None:
        """Take a piece (None: the end) from the sender and put it on its way, in one or more segments."""
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
        """Deliver what is due, as far as the world lets it."""
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
        """Send a reset back, as a kernel does that knows no such connection. It is lost if the way back is cut."""
        if self.back.is_cut:
            self.link.stalled[self] = None
            self.queue.append((trio.current_time(), b""))  # sent again, and refused, once the link heals
            return
        delay = self.back.delay_s(self.network.chance)
        self.network.world.timers.call_in(delay, self.sender.fail, "connection reset by peer")

    def read(self, size: int) -> None:
        """The receiver's application took bytes: there is room for as many."""
        if self.back.is_cut:
            self.unread_hidden += size
            self.back.stalled[self] = None
            return
        self.unread -= size
        self.sender.wake_sender()

    def heal(self) -> None:
        """Whatever kept bytes or their acknowledgements may be over: try again."""
        if self.unread_hidden and not self.back.is_cut:
            self.unread -= self.unread_hidden
            self.unread_hidden = 0
            self.sender.wake_sender()
        if self.queue:
            self.pump()

    def drop(self) -> None:
        """Forget what is under way."""
        self.queue.clear()


class SimStream(trio.abc.Stream):
    """One end of a connection. `out` and `into` are set when it is made."""

    out: Pipe
    into: Pipe

    def __init__(
        self, network: Network, host: Host, local: tuple[str, int], peer: tuple[str, int], number: int
    ) -> None:
        self.network = network
        self.host = host
        self.local_address = local
        self.peer_address = peer
        self.number = number
        self.is_closed = False
        self.is_gone = False
        """Its kernel knows it no longer"""
        self.is_blackholed = False
        self._failure = ""
        self._ended = False
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._arrival = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._is_sending = self._is_receiving = False
        self.tap: Callable[[bytes], None] | None = None
        """Called with all that is sent, when it is handed to the network"""
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
                        if self.tap is not None:
                            self.tap(piece)
                        self.out.put(piece)
                    if at >= len(raw):
                        return
                await self._room.park()
        finally:
            self._is_sending = False

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
        self._inbox_bytes -= len(taken)
        self.into.read(len(taken))
        return taken

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close it as close(2) does: what was taken is still sent; a reset if bytes of the peer were left unread."""
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
            self._inbox_bytes += len(segment)
            self._arrival.unpark_all()

    def take_end(self) -> None:
        """The peer's end arrives."""
        self._ended = True
        self._arrival.unpark_all()
        if self.is_closed:
            self.host.streams.pop(self, None)

    def fail(self, reason: str) -> None:
        """A reset arrives: neither direction works any more."""
        if not self._failure and not self.is_gone:
            self._failure = reason
            self._forget()
            self._wake_all()

    def vanish(self) -> None:
        """Its machine lost power: nobody is told."""
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
        """Neither side has ended it."""
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
        """A connection was made."""
        self.backlog.append(stream)
        self._arrival.unpark()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Listen no more; whoever was not accepted is reset."""
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


class Network:
    """Every host, link and connection. `window` in bytes; `split_chance`: of a segment to be split once more."""

    def __init__(self, world: World, *, base_s: float, jitter_s: float, window: int, split_chance: float) -> None:
        self.world = world
        self.chance = world.chance("network")
        self.window = window
        self.split_chance = split_chance
        self._base_s = base_s
        self._jitter_s = jitter_s
        self.hosts: dict[str, Host] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._numbers = itertools.count(1)
        self.taps: dict[int, Callable[[SimStream, SimStream], None]] = {}
        """By port: called with both ends of each new connection, the client's first, to set their `tap`"""

    def add_host(self, name: str, address: str) -> Host:
        """Add a machine."""
        host = self.hosts[address] = Host(name, address)
        return host

    def link(self, source: Host, target: Host) -> Link:
        """Return the way from one host to another."""
        key = (source.address, target.address)
        found = self._links.get(key)
        if found is None:
            local = source is target
            found = self._links[key] = Link(0.00002 if local else self._base_s, 0.0 if local else self._jitter_s)
        return found

    # what processes call

    @contextmanager
    def bind(self, host: Host, key: str, address: str, port: int) -> Iterator[SimPort]:
        """Take a port of `host`; see Platform."""
        if port == 0:
            port = next(host.ports)
        if port in host.ports_taken:
            raise AddressInUse(key, address, port, "Address already in use")
        bound = host.ports_taken[port] = SimPort(host, address, port)
        try:
            yield bound
        finally:
            if host.ports_taken.get(port) is bound:
                del host.ports_taken[port]

    async def connect(self, host: Host, address: str) -> SimStream:
        """Connect from `host` to "ip:port": OSError if refused; waits for as long as nobody answers."""
        ip, _, port_text = address.rpartition(":")
        port = int(port_text)
        target = host if ip.startswith("127.") else self.hosts.get(ip)
        if target is None:
            raise OSError(f"no route to {address}")
        there, back = self.link(host, target), self.link(target, host)
        while True:
            await trio.sleep(there.delay_s(self.chance))
            if there.is_cut or not target.is_up:
                await trio.sleep(SYN_RETRY_S)
                continue
            listener = target.ports_taken.get(port)
            if isinstance(listener, SimListener) and len(listener.backlog) >= BACKLOG:
                await trio.sleep(SYN_RETRY_S)
                continue
            stream = self._make(host, target, listener) if isinstance(listener, SimListener) else None
            try:
                await trio.sleep(back.delay_s(self.chance))
                while back.is_cut:  # noqa: ASYNC110  # for an answer that is sent again and again
                    await trio.sleep(SYN_RETRY_S)
            except trio.Cancelled:
                if stream is not None:
                    stream.close()
                raise
            if stream is None:
                raise ConnectionRefusedError(111, "Connection refused")
            return stream

    def _make(self, source: Host, target: Host, listener: SimListener) -> SimStream:
        number = next(self._numbers)
        local, remote = (source.address, next(source.ports)), (target.address, listener.port)
        client = SimStream(self, source, local, remote, number)
        server = SimStream(self, target, remote, local, number)
        there, back = self.link(source, target), self.link(target, source)
        client.out = server.into = Pipe(self, client, server, there, back)
        server.out = client.into = Pipe(self, server, client, back, there)
        if listener.port in self.taps:
            self.taps[listener.port](client, server)
        listener.offer(server)
        return client

    # what happens to them

    def connections(self, one: Host, other: Host) -> list[SimStream]:
        """Return one end (that at `one`) of each open connection between two hosts, oldest first."""
        return [s for s in one.streams if s.peer_address[0] == other.address and s.is_open]

    def reset(self, stream: SimStream, reason: str) -> None:
        """Both ends of a connection fail now."""
        peer = stream.out.receiver
        for end in (stream, peer):
            end.out.drop()
            end.fail(f"connection reset ({reason})")

    def deliver_reset(self, pipe: Pipe) -> None:
        """A reset that the sender of `pipe` sent arrives, unless it can't."""
        if not pipe.link.is_cut and pipe.receiver.host.is_up and not pipe.sender.is_blackholed:
            pipe.receiver.fail("connection reset by peer")

    def forget(self, stream: SimStream) -> None:
        """Make a connection half-open for good: it stays, nothing passes."""
        stream.is_blackholed = stream.out.receiver.is_blackholed = True

    def cut(self, source: Host, target: Host) -> None:
        """Nothing passes from one host to the other, until `heal`."""
        self.link(source, target).is_cut = True

    def heal(self, source: Host, target: Host) -> None:
        """Undo `cut`, clog and loss of one way; what waits goes out within WAIT_AFTER_HEAL_S."""
        link = self.link(source, target)
        link.is_cut = False
        link.clog_s = link.loss = 0.0
        self._retry(link)

    def _retry(self, link: Link) -> None:
        stalled, link.stalled = link.stalled, {}
        for pipe in stalled:
            self.world.timers.call_in(self.chance.random() * WAIT_AFTER_HEAL_S, pipe.heal)

    def close_all(self, host: Host) -> None:
        """A process died: its kernel closes what it had open."""
        for taken in list(host.ports_taken.values()):
            if isinstance(taken, SimListener):
                taken.close()
        host.ports_taken.clear()
        for stream in list(host.streams):
            stream.close()

    def power_off(self, host: Host) -> None:
        """A machine goes dark."""
        host.is_up = False
        for taken in list(host.ports_taken.values()):
            if isinstance(taken, SimListener):
                taken.is_closed = True
                taken.backlog.clear()
        host.ports_taken.clear()
        for stream in list(host.streams):
            stream.vanish()

    def power_on(self, host: Host) -> None:
        """It is back; what others sent meanwhile is sent again, and refused."""
        host.is_up = True
        for (_, target), link in self._links.items():
            if target == host.address:
                self._retry(link)

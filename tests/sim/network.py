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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from ha.errors import AddressInUse
from tests.sim.sockets import Host, Link, Pipe, SimListener, SimPort, SimStream

if TYPE_CHECKING:
    from tests.sim.world import World

BACKLOG = 128
SYN_RETRY_S = 1.0
WAIT_AFTER_HEAL_S = 1.5
"""Retransmissions back off: after a link heals, what waits goes out within so long."""


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
        local, remote = (source.address, next(source.ports)), (target.address, listener.port)
        client = SimStream(self, source, remote)
        server = SimStream(self, target, local)
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

    def spare_all(self) -> None:
        """Let connections that were to be cut once enough has passed live on."""
        for host in self.hosts.values():
            for stream in host.streams:
                stream.out.cut_after = None

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

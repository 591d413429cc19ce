"""A simulated network of TCP connections between hosts, each host with one address.

As in TCP, bytes of one direction arrive in order, completely or not at all. Segmentation and delays are drawn. A sender
waits while the other side has not read `window` of its bytes.

Faults:
- cut link (one direction of a pair of hosts): nothing passes. Data is retransmitted after the link heals; new
  connections wait; a reset in flight is lost, so the other side keeps a half-open connection. Reads are not
  acknowledged over a cut return link.
- clogged link: everything takes longer. Lossy link: single segments take a retransmission longer, and all behind them
  wait.
- reset connection: both sides fail, with or without the bytes in flight; `after_bytes`: in the middle of a frame.
- half-open connection: it stays, and nothing passes (a middlebox dropped it).
- dead process: its kernel closes its connections. A machine without power is silent; when it is back, it answers
  packets on old connections with a reset.
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
"""Maximum delay, by the back-off of retransmissions, until waiting data passes after a link heals."""


class Network:
    """Every host, link and connection. `window` in bytes; `split_chance`: that a segment is split once more."""

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
        """Returns the link from one host to another."""
        key = (source.address, target.address)
        found = self._links.get(key)
        if found is None:
            local = source is target
            found = self._links[key] = Link(0.00002 if local else self._base_s, 0.0 if local else self._jitter_s)
        return found

    # what processes call

    @contextmanager
    def bind(self, host: Host, key: str, address: str, port: int) -> Iterator[SimPort]:
        """Takes a port of `host`; see Platform."""
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
        """Connects from `host` to "ip:port": OSError if rejected; waits as long as nothing answers."""
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
                while back.is_cut:  # noqa: ASYNC110  # for a retransmitted answer
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
        """Returns one end (that at `one`) of each open connection between two hosts, oldest first."""
        return [s for s in one.streams if s.peer_address[0] == other.address and s.is_open]

    def reset(self, stream: SimStream, reason: str) -> None:
        """Fails both ends of a connection."""
        peer = stream.out.receiver
        for end in (stream, peer):
            end.out.drop()
            end.fail(f"connection reset ({reason})")

    def deliver_reset(self, pipe: Pipe) -> None:
        """Delivers a reset sent by the sender of `pipe`, if possible."""
        if not pipe.link.is_cut and pipe.receiver.host.is_up and not pipe.sender.is_blackholed:
            pipe.receiver.fail("connection reset by peer")

    def forget(self, stream: SimStream) -> None:
        """Makes a connection half-open permanently: it stays, nothing passes."""
        stream.is_blackholed = stream.out.receiver.is_blackholed = True

    def is_half_open(self, port: int) -> bool:
        """Whether one end is left of a connection to `port`, and does not know: the other end's machine forgot it."""
        return any(
            stream.is_open
            and (stream.is_blackholed or stream.out.receiver.is_gone)
            and port in (stream.peer_address[1], stream.out.receiver.peer_address[1])
            for host in self.hosts.values()
            for stream in host.streams
        )

    def spare_all(self) -> None:
        """Cancels pending cuts of connections."""
        for host in self.hosts.values():
            for stream in host.streams:
                stream.out.cut_after = None

    def cut(self, source: Host, target: Host) -> None:
        """Cuts the link from one host to the other, until `heal`."""
        self.link(source, target).is_cut = True

    def heal(self, source: Host, target: Host) -> None:
        """Undoes the faults of one link; waiting data passes within WAIT_AFTER_HEAL_S."""
        link = self.link(source, target)
        link.is_cut = False
        link.clog_s = link.loss = 0.0
        self._retry(link)

    def _retry(self, link: Link) -> None:
        stalled, link.stalled = link.stalled, {}
        for pipe in stalled:
            self.world.timers.call_in(self.chance.random() * WAIT_AFTER_HEAL_S, pipe.heal)

    def close_all(self, host: Host) -> None:
        """A process died: its kernel closes its sockets."""
        for taken in list(host.ports_taken.values()):
            if isinstance(taken, SimListener):
                taken.close()
        host.ports_taken.clear()
        for stream in list(host.streams):
            stream.close()

    def power_off(self, host: Host) -> None:
        """A machine loses power."""
        host.is_up = False
        for taken in list(host.ports_taken.values()):
            if isinstance(taken, SimListener):
                taken.is_closed = True
                taken.backlog.clear()
        host.ports_taken.clear()
        for stream in list(host.streams):
            stream.vanish()

    def power_on(self, host: Host) -> None:
        """A machine's power is back; packets sent meanwhile are retransmitted, and rejected."""
        host.is_up = True
        for (_, target), link in self._links.items():
            if target == host.address:
                self._retry(link)

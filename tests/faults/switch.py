"""Network namespaces connected by a packet switch of our own: TCP of real kernels over unreliable packets.

Each host is a network namespace with one TUN device; this process holds the other ends and forwards IP packets late,
slowly, or not at all. Unlike `tc netem` it needs no kernel module but TUN, and every pair of hosts and direction has
its own faults. The test's own namespace is a host too.

Needs root, /dev/net/tun and iproute2. `why_not` returns what is missing.
"""

import fcntl
import heapq
import itertools
import math
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
MTU = 9000
QUEUE_BYTES_MAX = 1 << 20
"""Maximum backlog of a slow direction; further packets are dropped, as by a router"""
NETWORK = "10.77.0"
OWN = "client"
NO_IPROUTE2 = "there is no iproute2"


def why_not() -> str:
    """What prevents namespaces from being created here, or ""."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return NO_IPROUTE2
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    made = _ip("netns", "add", f"halog-probe-{os.getpid()}", check=False)
    if made.returncode:
        return f"making a network namespace is not permitted: {made.stderr.strip()}"
    _ip("netns", "delete", f"halog-probe-{os.getpid()}")
    try:
        os.close(_open_tun(f"hp{os.getpid()}"))
    except OSError as error:
        return f"a TUN device can't be made: {error}"
    return ""


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def _open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@dataclass
class Path:
    """One direction between two hosts."""

    is_open: bool = True
    delay_s: float = 0.0
    loss: float = 0.0
    """Share of lost packets"""
    bytes_per_s: float = math.inf
    busy_until: float = 0.0
    carried: int = 0
    dropped: int = 0

    def clear(self) -> None:
        """Removes all faults."""
        self.is_open, self.delay_s, self.loss, self.bytes_per_s = True, 0.0, 0.0, math.inf


class Switch:
    """Hosts `names` and the test itself (`OWN`), connected while the block runs."""

    def __init__(self, *names: str, seed: int) -> None:
        self._tag = f"h{os.getpid() % 100_000}"
        self._names = (OWN, *names)
        self._chance = random.Random(seed)
        self._stack = ExitStack()
        self._tuns: dict[str, int] = {}
        self._is_running = True
        self._numbers = itertools.count()
        self.paths = {(one, other): Path() for one, other in itertools.permutations(self._names, 2)}

    def address(self, name: str) -> str:
        """A host's IP address."""
        return f"{NETWORK}.{self._names.index(name) + 1}"

    def prefix(self, name: str) -> list[str]:
        """The prefix that runs a command on a host."""
        return ["ip", "netns", "exec", f"{self._tag}-{name}"]

    def between(self, one: str, other: str) -> tuple[Path, Path]:
        """Both directions."""
        return self.paths[one, other], self.paths[other, one]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in self._names:
                self._connect(name, stack)
            wake, self._wake = os.pipe()
            stack.callback(os.close, wake)
            stack.callback(os.close, self._wake)
            thread = threading.Thread(target=self._carry, args=(wake,), daemon=True, name="switch")
            thread.start()
            stack.callback(thread.join)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_running = False
        os.write(self._wake, b"x")
        self._stack.close()

    def _connect(self, name: str, stack: ExitStack) -> None:
        device = f"{self._tag}{name[:6]}"
        self._tuns[name] = _open_tun(device)
        stack.callback(os.close, self._tuns[name])
        inside: list[str] = []
        if name != OWN:
            namespace = f"{self._tag}-{name}"
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "delete", namespace)
            _ip("link", "set", device, "netns", namespace)
            inside = ["-n", namespace]
            _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "address", "add", f"{self.address(name)}/24", "dev", device)
        _ip(*inside, "link", "set", device, "mtu", str(MTU), "up")

    def _carry(self, wake: int) -> None:
        """The switch itself, a thread."""
        by_address = {socket.inet_aton(self.address(name)): name for name in self._names}
        sources = {descriptor: name for name, descriptor in self._tuns.items()}
        waiting: list[tuple[float, int, str, bytes]] = []
        while self._is_running:
            now = time.monotonic()
            timeout_s = max(0.0, waiting[0][0] - now) if waiting else None
            ready, _, _ = select.select([*sources, wake], [], [], timeout_s)
            for descriptor in ready:
                if descriptor in sources:
                    self._take(descriptor, sources[descriptor], by_address, waiting)
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, target, packet = heapq.heappop(waiting)
                try:
                    os.write(self._tuns[target], packet)
                except OSError:
                    pass  # the device's queue is full, or it is going down: a lost packet

    def _take(
        self, descriptor: int, source: str, by_address: dict[bytes, str], waiting: list[tuple[float, int, str, bytes]]
    ) -> None:
        for _ in range(64):
            try:
                packet = os.read(descriptor, MTU + 64)
            except BlockingIOError:
                return
            target = by_address.get(packet[16:20]) if packet and packet[0] >> 4 == 4 else None
            if target is None or target == source:
                continue
            path = self.paths[source, target]
            now = time.monotonic()
            starts = max(now, path.busy_until)
            is_full = (starts - now) * path.bytes_per_s > QUEUE_BYTES_MAX if path.bytes_per_s < math.inf else False
            if not path.is_open or is_full or (path.loss and self._chance.random() < path.loss):
                path.dropped += 1
                continue
            path.busy_until = starts + len(packet) / path.bytes_per_s
            path.carried += 1
            heapq.heappush(waiting, (path.busy_until + path.delay_s, next(self._numbers), target, packet))

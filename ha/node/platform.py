"""What a node needs of the world around it, in one place: disk, threads, clocks, network, chance.

`Platform()` is the operating system. A simulation passes its own, and then everything that a node does and learns goes
through it; trio's clock, which is the run's, is the one thing that is not in here.
"""

from __future__ import annotations

import os
import random
import resource
import secrets
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio

from ha.config import Config, SecretStr
from ha.failover.agreement import Agreement
from ha.remoting import connect_tcp
from ha.store.files import Disk, OsDisk, is_open_to_others
from ha.store.mapped_file import RunBlocking, run_in_thread
from ha.store.message_store import wall_clock_ms
from ha.tls.ports import FILE_CHECK_INTERVAL_S

from .etcd import open_etcd
from .options import OPEN_FILES_UNLIMITED
from .ports import BoundPort, own_address, resolve

OpenAgreement = Callable[
    [Config, SecretStr | None, Callable[[], ssl.SSLContext] | None], AbstractAsyncContextManager[Agreement]
]
Listeners = Sequence[trio.abc.Listener[trio.abc.Stream]]


class Port(Protocol):
    """`host:port`, taken but not listened on. See `BoundPort`."""

    @property
    def host(self) -> str:
        """As it was asked for."""

    @property
    def port(self) -> int:
        """The number, chosen by the system if 0 was asked for."""

    def listen(self) -> Listeners:
        """Accept from now on; once only. AddressInUse."""


def open_files_max() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft > 0 else OPEN_FILES_UNLIMITED


BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Return what names the running kernel since it booted; None where there is no such thing."""
    try:
        return BOOT_ID_FILE.read_text().strip() or None
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True)
class Platform:
    """`bind(key, host, port)` takes a port (AddressInUse), `connect("host:port")` opens a stream (OSError).

    `own_address` is this machine's towards others, `resolve` makes a numeric address of a name (OSError); both block.
    `open_files_max`: how many descriptors this process may have, of which connections get their share.
    `process_id` and `process_hash` (31 bits) go into unique message ids, `random_bytes` into handshakes.
    `jitter` returns numbers in [0, 1), by which the waits between attempts differ.
    `open_agreement` reaches what the members of a failover group agree on.
    `boot_id` names the running kernel (None if it can't be told): what its page cache holds outlives a process, not
    the kernel. It blocks.
    `is_open_to_others` tells of a file with a secret whether too many may read it (OSError); it blocks.
    `file_check_interval_s`: how often the files of certificates and access control are checked for changes.
    """

    disk: Disk = field(default_factory=OsDisk)
    run_blocking: RunBlocking = run_in_thread
    wall_clock_ms: Callable[[], int] = wall_clock_ms
    bind: Callable[[str, str, int], AbstractContextManager[Port]] = BoundPort
    connect: Callable[[str], Awaitable[trio.abc.Stream]] = connect_tcp
    own_address: Callable[[], str] = own_address
    resolve: Callable[[str], str] = resolve
    open_files_max: int = field(default_factory=open_files_max)
    process_id: int = field(default_factory=os.getpid)
    process_hash: int = field(default_factory=lambda: secrets.randbelow(1 << 31))
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    jitter: Callable[[], float] = random.random
    open_agreement: OpenAgreement = open_etcd
    boot_id: Callable[[], str | None] = boot_id
    file_check_interval_s: float = FILE_CHECK_INTERVAL_S
    is_open_to_others: Callable[[Path], bool] = is_open_to_others

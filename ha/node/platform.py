"""A node's environment: disk, threads, clocks, network and randomness.

`Platform()` is the operating system. A simulation passes its own `Platform`; the node then has no other access to the
outside, except for Trio's clock, which is the one given to `trio.run`, and, if they are configured, the files of TLS
certificates and the exporter to OpenTelemetry.
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
from ha.remoting import BoundPort, connect_tcp
from ha.store.files import Disk, OsDisk, boot_id, is_open_to_others
from ha.store.mapped_file import RunBlocking, run_in_thread
from ha.store.message_store import wall_clock_ms
from ha.tls.ports import FILE_CHECK_INTERVAL_S

from .etcd import open_etcd
from .options import OPEN_FILES_UNLIMITED
from .ports import own_address, resolve

OpenAgreement = Callable[
    [Config, SecretStr | None, Callable[[], ssl.SSLContext] | None], AbstractAsyncContextManager[Agreement]
]
Listeners = Sequence[trio.abc.Listener[trio.abc.Stream]]


class Port(Protocol):
    """A port that is bound but does not listen yet. See `BoundPort`."""

    @property
    def host(self) -> str:
        """Host, as requested."""

    @property
    def port(self) -> int:
        """Port number; chosen by the system if 0 was requested."""

    def listen(self) -> Listeners:
        """Starts listening. May be called only once. Raises AddressInUse if another process listens on the port."""


def open_files_max() -> int:
    """Returns this process's limit of open files; OPEN_FILES_UNLIMITED if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft > 0 else OPEN_FILES_UNLIMITED


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Everything that a node needs from outside; simulations replace it. `bind(key, host, port)` binds a port (raises
    AddressInUse); `connect("host:port")` opens a stream (raises OSError).

    `own_address` returns the address of this machine to report for ports that listen on a wildcard ("0.0.0.0" or "::");
    `resolve` returns a numeric address of a host name (raises OSError). Both block.
    `open_files_max`: limit of open files, of which connections get a share.
    `process_id` and `process_hash` (31 bits) are parts of unique message IDs; handshakes use `random_bytes`.
    `jitter` returns numbers in [0, 1) that vary the time between attempts.
    `open_agreement` connects to the etcd of a failover group.
    `boot_id` returns an ID of the machine's current boot, or None if unknown; it blocks. If the ID has changed, data
    that was only in the page cache is lost.
    `is_open_to_others` returns whether other users can read a file with a secret (raises OSError); it blocks.
    `file_check_interval_s`: how often the files of certificates and access control are checked for changes.
    """

    disk: Disk = field(default_factory=OsDisk)
    run_blocking: RunBlocking = run_in_thread
    wall_clock_ms: Callable[[], int] = wall_clock_ms
    bind: Callable[[str, str, int], AbstractContextManager[Port]] = BoundPort
    connect: Callable[[str], Awaitable[trio.abc.Stream]] = connect_tcp
    own_address: Callable[[str], str] = own_address
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

"""What the SDK may be told, in one frozen struct; shared by producers and consumers."""

from __future__ import annotations

import os
import socket
import ssl
import time

import msgspec

from ha.client.tls import ClientTls, Connect
from ha.protocol.acl import AclCredentials
from ha.protocol.compression import BODY_SIZE_MAX, Compression


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in bytes. The defaults are RocketMQ's clients' own but for `send_timeout_s`."""

    connect_timeout_s: float = 3.0
    request_timeout_s: float = 5.0
    """Route look-ups, offset queries and everything else without a time of its own."""
    send_timeout_s: float = 10.0
    """A send with all its retries. RocketMQ's clients give 3 s, which runs out together with the broker's own
    slaveTimeout, so that they see a timeout where the broker is about to answer FLUSH_SLAVE_TIMEOUT; 10 s outlasts
    putMessageTimeout (8 s)."""
    send_retries: int = 2
    """Further attempts, each on another queue and if there is one on another broker."""
    route_refresh_interval_s: float = 30.0
    heartbeat_interval_s: float = 30.0
    """Brokers forget a client after 120 s."""
    default_topic_queue_nums: int = 4
    """Queues asked for when a send creates its topic."""
    compression: Compression = Compression.ZLIB
    """How producers compress bodies, unless that makes them longer. Batches are never compressed."""
    compress_from_bytes: int = 4096
    """Shorter bodies are sent as they are."""
    batching: bool = False
    """Sends that come while a request is in flight leave together as the next one; see `ha.client.batching`. A burst
    lands in few queues then, so it is for who asks."""
    message_size_max: int = BODY_SIZE_MAX
    """Longest body: what is sent, and what a compressed one may inflate to when it is received. Set it to the brokers'
    maxMessageSize if that is raised."""
    frame_size_max: int = 16_777_216
    outbox_size_max: int = 4 * 1024 * 1024
    """Bytes waiting to be written to one connection; a sender beyond that waits."""
    credentials: AclCredentials | None = None
    """What every request is signed with; see `ha.client.credentials` for where they come from if this is None."""
    tls: ssl.SSLContext | ClientTls | None = None
    """Encrypt every connection; see `ha.client.tls` for what the environment may say if this is None."""
    connect: Connect | None = None
    """Opens the streams, encrypted or not; None: TCP."""


def name_server_addresses(name_servers: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    """The addresses in `name_servers`: a list, or one text with ';' between; None: NAMESRV_ADDR of the environment.

    Raises ValueError if there is none or one isn't host:port."""
    if name_servers is None:
        name_servers = os.environ.get("NAMESRV_ADDR", "")
    if isinstance(name_servers, str):
        name_servers = [part.strip() for part in name_servers.replace(",", ";").split(";")]
    addresses = tuple(address for address in name_servers if address)
    if not addresses:
        raise ValueError("no name server given: pass name_servers or set NAMESRV_ADDR to host:port[;host:port…]")
    for address in addresses:
        split_address(address)
    return addresses


def split_address(address: str) -> tuple[str, int]:
    """`host:port` (IPv6 hosts may stand in brackets) as a pair. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def own_address() -> bytes:
    """This machine's address towards the outside, 4 bytes, for unique ids; loopback's if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which way packets would go
            return socket.inet_aton(probe.getsockname()[0])
        except OSError:
            return socket.inet_aton("127.0.0.1")


def month_ms(wall_clock_ms: int) -> tuple[int, int]:
    """When the local month of that time began and when the next one does, all in ms since 1970; for unique ids."""
    now = time.localtime(wall_clock_ms / 1000)
    start, end = (
        int(time.mktime((now.tm_year, month, 1, 0, 0, 0, 0, 0, -1)) * 1000) for month in (now.tm_mon, now.tm_mon + 1)
    )
    return start, end

"""Options of the SDK, shared by producers and consumers."""

from __future__ import annotations

import os
import socket
import ssl
import time

import msgspec

from ha.client.tls import ClientTls, Connect
from ha.protocol.acl import AclCredentials
from ha.protocol.addresses import split_address
from ha.protocol.compression import BODY_SIZE_MAX, Compression, check_installed

_MAY_BE_ZERO = frozenset({"send_retries", "default_topic_queue_nums", "compress_from_bytes", "outbox_size_max"})


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a client. Times are in seconds, sizes in bytes. The defaults are those of RocketMQ's clients, except
    the request and send timeouts."""

    connect_timeout_s: float = 3.0
    """Timeout for opening a connection, including TLS."""
    request_timeout_s: float = 5.0
    """Timeout of route lookups, offset queries and all other requests without their own timeout."""
    send_timeout_s: float = 10.0
    """Timeout of a send including its retries. RocketMQ's clients use 3 s, the same as the broker's slaveTimeout, and
    so time out just as the broker is about to answer FLUSH_SLAVE_TIMEOUT; 10 s is longer than putMessageTimeout (8
    s)."""
    send_retries: int = 2
    """Maximum retries of a send after a rejection that is due to the broker's state, or after a connection was lost
    (the message may be stored). While no name server or master can be reached, a send is retried until
    `send_timeout_s`, except after a NoMaster without `is_temporary`; see docs/errors.md."""
    retry_unreachable: bool = True
    """Whether to retry, until the timeout, while no name server or master can be reached. False: raise at once. A
    NoMaster without `is_temporary` is raised at once in either case."""
    route_refresh_interval_s: float = 30.0
    """Interval at which known routes are looked up again."""
    heartbeat_interval_s: float = 30.0
    """Interval between heartbeats. Brokers expire a client that is silent for 120 s."""
    default_topic_queue_nums: int = 4
    """Number of queues per broker of a topic that a send creates; at most that of the template topic, TBW102."""
    compression: Compression = Compression.ZLIB
    """Compression of bodies that it makes shorter. `send_batch` does not compress."""
    compress_from_bytes: int = 4096
    """Minimum size of bodies that are compressed."""
    batching: bool = False
    """Whether messages that are sent while a request is in flight share the next request; see docs/sdk.md. Off by
    default because it spreads a burst over fewer queues."""
    message_size_max: int = BODY_SIZE_MAX
    """Maximum uncompressed size in bytes of a sent or received body. Set it to the brokers' maxMessageSize if that is
    raised."""
    frame_size_max: int = 16_777_216
    """Maximum size in bytes of a response. Once the decompressed bodies add up to this size, the result of a pull ends
    before the next compressed message, that of a receive before the next message of any kind."""
    outbox_size_max: int = 4 * 1024 * 1024
    """Number of buffered bytes per connection above which sends wait."""
    credentials: AclCredentials | None = None
    """Credentials for signing requests; None: those of the environment (HALOG_ACCESS_KEY, HALOG_SECRET_KEY or
    HALOG_SECRET_KEY_FILE), if any."""
    tls: ssl.SSLContext | ClientTls | None = None
    """Encryption of connections; None: as set in the environment (HALOG_TLS and the other variables of docs/tls.md)."""
    connect: Connect | None = None
    """Function that opens the streams of connections; TLS, if configured, is added on top. None: TCP."""

    def __post_init__(self) -> None:
        """Raises ValueError for a negative value, for 0 where the client could not work with it, and if `compression`
        needs a package that is not installed."""
        check_numbers(self, _MAY_BE_ZERO)
        check_installed(self.compression)


def check_numbers(options: msgspec.Struct, may_be_zero: frozenset[str]) -> None:
    """Raises ValueError if a number in `options` is negative, or is 0 and its field is not in `may_be_zero`."""
    for name in options.__struct_fields__:
        value = getattr(options, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not (value > 0 or (value == 0 and name in may_be_zero)):
            raise ValueError(f"{name}={value}; accepted: {'0 or more' if name in may_be_zero else 'more than 0'}")


def name_server_addresses(name_servers: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the addresses in `name_servers`: a list, or a string with addresses separated by ';' or ','. None: uses
    the environment variable NAMESRV_ADDR.

    Raises ValueError if there is no address, or one isn't host:port."""
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


def own_address() -> bytes:
    """Returns this machine's external IPv4 address, 4 bytes, for unique ids and client ids; 127.0.0.1 if it has
    none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends no packet; only selects the local address
            return socket.inet_aton(probe.getsockname()[0])
        except OSError:
            return socket.inet_aton("127.0.0.1")


def month_ms(wall_clock_ms: int) -> tuple[int, int]:
    """Returns the start of the local month and of the next one, in ms since 1970; for unique ids."""
    now = time.localtime(wall_clock_ms / 1000)
    start, end = (
        int(time.mktime((now.tm_year, month, 1, 0, 0, 0, 0, 0, -1)) * 1000) for month in (now.tm_mon, now.tm_mon + 1)
    )
    return start, end

"""Fetches /status and other pages from the admin ports of several nodes concurrently, with a timeout."""

from __future__ import annotations

import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import HTTPException, responses
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from ha.cli.exits import UsageError
from ha.cli.flags import check_timeout
from ha.cli.unreachable import NOT_REACHABLE, reason_of_os
from ha.client.credentials import read_secret_key
from ha.protocol.addresses import split_address
from ha.protocol.headers import Int64
from ha.tls.files import reason_of

DEFAULT_ADMINS = ("127.0.0.1:10913", "127.0.0.1:10923")
BODY_SIZE_MAX = 16 * 1024 * 1024
TIMEOUT_S = 3.0
WRONG_TOKEN = "wrong adminToken"
TOKEN_REQUIRED = "requires an adminToken: use --token-file or HALOG_ADMIN_TOKEN"


class Slave(msgspec.Struct, frozen=True):
    """A slave's connection as its master sees it. `ack_offset` is physical, in bytes; -1 before the first report."""

    identity: str = ""
    state: str = ""
    ack_offset: Int64 = -1
    lag_bytes: Int64 = 0
    is_in_sync: bool = False
    transferred_bytes_per_s: Int64 = 0
    last_report_age_s: float | None = None
    why_not_in_sync: str = ""


class MasterSide(msgspec.Struct, frozen=True):
    """The slaves of a node. `explanation`: why some of them are not in sync, or why there are none; otherwise ""."""

    slaves: list[Slave] = []
    waiting_request_count: Int64 = 0
    explanation: str = ""


class SlaveSide(msgspec.Struct, frozen=True):
    """A slave's link to its master."""

    state: str = ""
    condition: str = ""
    detail: str = ""
    master_address: str | None = None
    received_bytes_per_s: Int64 = 0
    last_read_age_s: float | None = None


class Commitlog(msgspec.Struct, frozen=True):
    """Physical offsets, in bytes; None: unknown. `min_offset` is -1 while the log is empty."""

    min_offset: Int64 = -1
    max_offset: Int64 = 0
    flushed_offset: Int64 | None = 0
    dispatched_offset: Int64 | None = 0


class DamagedRange(msgspec.Struct, frozen=True):
    """A damaged byte range [begin, end) of the log, in `file`."""

    begin: Int64 = 0
    end: Int64 = 0
    file: str = ""
    reason: str = ""
    found_by: str = ""
    heal_trouble: str = ""


class LogDamage(msgspec.Struct, frozen=True):
    """Damage of the log: what was found and healed since the node's start, and what is damaged now (`open…`)."""

    found_count: Int64 = 0
    healed_count: Int64 = 0
    open_count: Int64 = 0
    open_bytes: Int64 = 0
    open: list[DamagedRange] = []


class Scrub(msgspec.Struct, frozen=True):
    """Numbers of repairs in files that are derived from the log."""

    queue_entries_mended_count: Int64 = 0
    index_rebuilt_count: Int64 = 0


class Damage(msgspec.Struct, frozen=True):
    """Damage of a node's files."""

    log: LogDamage = LogDamage()
    checksum_rebuilt_count: Int64 = 0
    scrub: Scrub = Scrub()


class Timers(msgspec.Struct, frozen=True):
    """Pending timer messages. `next_due_ms`: ms since 1970. `due_counts`: number of messages by time until due, such as
    "24h" or "later"."""

    pending_count: Int64 = 0
    next_due_ms: Int64 | None = None
    due_counts: dict[str, Int64] = {}


class Event(msgspec.Struct, frozen=True):
    """One of the node's recent log lines."""

    level: str = ""
    text: str = ""


class Certificate(msgspec.Struct, frozen=True):
    """A certificate of the node."""

    certificate: str = ""
    expires_at_ms: Int64 | None = None
    is_expiring: bool = False
    error: str = ""


class Tls(msgspec.Struct, frozen=True):
    """A node's certificates by purpose."""

    credentials: dict[str, Certificate] = {}


class NameServer(msgspec.Struct, frozen=True):
    """A name server as the node sees it."""

    address: str = ""
    is_registered: bool = False
    error: str | None = None
    other_address: str = ""
    """Address of another broker registered under the node's name and ID"""


class Membership(msgspec.Struct, frozen=True):
    """State of a failover group member, and its view of the group."""

    state: str = ""
    epoch: Int64 = 0
    master_id: Int64 | None = None
    reason: str = ""
    state_age_s: float = 0.0
    lease_remaining_s: float | None = None
    lease_ttl_s: float | None = None
    agreement_fault: str = ""
    id_taken_by: str | None = None
    """Address of another process that uses the member's ID"""
    sync_state_set: list[Int64] | None = None
    members: list[Int64] = []


class NodeStatus(msgspec.Struct, frozen=True):
    """The parts of a node's /status that commands use."""

    role: str
    broker_name: str
    broker_id: Int64
    is_ready: bool | None
    """Whether the node is ready; None if only its remoting port was read, which does not report it"""
    cluster_name: str = ""
    version: str = ""
    pid: Int64 = 0
    uptime_s: float = 0.0
    not_ready_reason: str = ""
    """Why the node is not ready, or why its readiness is unknown"""
    degraded_reason: str | None = None
    """Why sends fail, or reach fewer nodes than configured; "" if they don't. None if unknown: the node's version does
    not report it, or the node is a master of which only the remoting port was read"""
    addresses: dict[str, str | None] = {}
    commitlog: Commitlog = Commitlog()
    damage: Damage = Damage()
    timers: Timers = Timers()
    ha: MasterSide = MasterSide()
    ha_client: SlaveSide | None = None
    member: Membership | None = None
    name_servers: list[NameServer] = []
    tls: Tls = Tls()
    events: list[Event] = []

    @property
    def name(self) -> str:
        """Broker name and ID."""
        return f"{self.broker_name}:{self.broker_id}"

    @property
    def duplicates(self) -> list[str]:
        """Addresses of other brokers with the same name and ID."""
        found = [server.other_address for server in self.name_servers]
        if self.member is not None:
            found.append(self.member.id_taken_by or "")
        return list(dict.fromkeys(filter(None, found)))

    @property
    def link(self) -> SlaveSide | None:
        """A slave's link to its master; None for a master. A failover group's master reports a link that is unused."""
        return None if self.member is not None and self.role != "SLAVE" else self.ha_client


@dataclass(frozen=True)
class Answer:
    """Response of an admin port. `code`: HTTP status; `clock_ahead_s`: see `Page`."""

    code: int
    body: bytes
    clock_ahead_s: float | None


@dataclass(frozen=True)
class Page:
    """Status page of a node."""

    raw: bytes
    node: NodeStatus
    clock_ahead_s: float | None
    """Seconds by which the node's clock is ahead of this machine's; negative if it is behind, None if unknown"""


@Parameter(name="*")
@dataclass(frozen=True)
class AdminFlags:
    """Admin ports and their token."""

    admin: Annotated[
        tuple[str, ...],
        Parameter(
            help="Admin port of a node, as host:port. Can be repeated. Default: those of the nodes it finds.",
            negative=(),
        ),
    ] = ()
    token_file: Annotated[
        str | None,
        Parameter(
            env_var="HALOG_ADMIN_TOKEN_FILE", help="File with the adminToken. Alternatively set HALOG_ADMIN_TOKEN."
        ),
    ] = None
    timeout: Annotated[float, Parameter(help="Timeout of each request, in seconds.")] = TIMEOUT_S

    def checked(self) -> tuple[str, ...]:
        """Returns the admin ports, by default those of this machine. Raises UsageError for an invalid address or
        timeout."""
        for address in self.admin:
            try:
                split_address(address)
            except ValueError as error:
                raise UsageError(f"--admin: {error}") from None
        check_timeout(self.timeout)
        return self.admin or DEFAULT_ADMINS

    def token(self) -> str:
        """Returns the token, "" for none. Raises UsageError if the token's file can't be read or is not one line."""
        try:
            return read_secret_key(self.token_file) if self.token_file else os.environ.get("HALOG_ADMIN_TOKEN", "")
        except ValueError as error:
            raise UsageError(f"--token-file: {error}") from None


LOCAL_ADMINS = AdminFlags()


def fetch_pages(
    addresses: Sequence[str], token: str = "", tls: ssl.SSLContext | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Page | str]:
    """Returns each address's page, or why there is none, within about `timeout_s`."""
    answers = ask_admins(addresses, "/status", token, tls, timeout_s)
    return {address: answer if isinstance(answer, str) else _page(answer) for address, answer in answers.items()}


def _page(answer: Answer) -> Page | str:
    if answer.code != HTTPStatus.OK:
        return f"HTTP error: {phrase_of(answer.code)}"
    try:
        return Page(answer.body, msgspec.json.decode(answer.body, type=NodeStatus), answer.clock_ahead_s)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return f"invalid status page: {error}"


def phrase_of(code: int) -> str:
    """Returns the standard phrase of an HTTP status code, or the code itself if there is none."""
    return responses.get(code, str(code))


def ask_admins(
    addresses: Sequence[str],
    path: str,
    token: str = "",
    tls: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    method: str = "GET",
) -> dict[str, Answer | str]:
    """Returns each address's response, or why there is none, within about `timeout_s`.

    A response with an HTTP error is an Answer, except for 401, which becomes WRONG_TOKEN or TOKEN_REQUIRED.
    """
    found: dict[str, Answer | str] = {}

    def ask(address: str) -> None:
        found[address] = _ask(f"{'http' if tls is None else 'https'}://{address}{path}", method, token, tls, timeout_s)

    # Daemon threads: urllib's timeout applies to each read, so a slow peer could block a thread forever.
    threads = [threading.Thread(target=ask, args=(address,), daemon=True) for address in addresses]
    end = time.monotonic() + timeout_s + 0.1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {address: found.get(address, f"no response within {timeout_s:g} s") for address in addresses}


def _ask(url: str, method: str, token: str, tls: ssl.SSLContext | None, timeout_s: float) -> Answer | str:
    # The token is only for this address: urllib would send an ordinary header to the target of a redirect.
    request = urllib.request.Request(url, method=method)
    if token:
        # urllib encodes headers as Latin-1, and a node expects its token in UTF-8.
        request.add_unredirected_header("Authorization", f"Bearer {token}".encode().decode("latin-1"))
    try:
        asked_s = time.time()
        try:
            response = open_directly(request, timeout_s, tls)
        except urllib.error.HTTPError as error:
            response = error  # a response, too
        with response:
            if response.status == HTTPStatus.UNAUTHORIZED:
                return WRONG_TOKEN if token else TOKEN_REQUIRED
            clock_ahead_s = _clock_ahead_s(response.headers.get("Date"), asked_s, time.time())
            return Answer(response.status, response.read(BODY_SIZE_MAX), clock_ahead_s)
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return f"TLS error: {reason_of(reason)}"
        if isinstance(reason, TimeoutError):
            return f"no response within {timeout_s:g} s"
        return f"{NOT_REACHABLE}{reason_of_os(reason) if isinstance(reason, OSError) else reason}"
    except (HTTPException, ValueError) as error:
        return f"not an admin port: {error!r}"


def open_directly(request: urllib.request.Request | str, timeout_s: float, tls: ssl.SSLContext | None = None) -> Any:
    """Returns the response to a request, sent without the proxy of `http_proxy`.

    A proxy does not reach nodes on loopback, and would see the token. Raises OSError if the request fails (HTTPError
    for an HTTP error), HTTPException for a response that is not HTTP.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)


def _clock_ahead_s(date: str | None, asked_s: float, answered_s: float) -> float | None:
    """Returns by how many seconds a node's clock is ahead of ours, from the header Date; None if that is missing or
    invalid.

    Negative if it is behind; 0 if the header's resolution of one second and the duration of the request can explain the
    difference.
    """
    if date is None:
        return None
    try:
        told_s = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
    return difference(told_s, told_s + 1, asked_s, answered_s)


def difference(low: float, high: float, asked: float, answered: float) -> float:
    """Returns by how many seconds the interval [low, high] of another clock is ahead of [asked, answered] of our clock.

    Negative if it is behind; 0 if the intervals overlap.
    """
    if low > answered:
        return low - answered
    return min(0.0, high - asked)

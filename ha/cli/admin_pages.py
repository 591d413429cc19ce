"""What nodes say of themselves on their admin ports: /status, asked of several at once, none waited for too long."""

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
from http.client import HTTPException
from typing import Annotated

import msgspec
from cyclopts import Parameter

from ha.cli.exits import UsageError
from ha.client.credentials import read_secret_key
from ha.client.options import split_address
from ha.tls.files import reason_of

DEFAULT_ADMINS = ("127.0.0.1:10913", "127.0.0.1:10923")
BODY_SIZE_MAX = 16 * 1024 * 1024
TIMEOUT_S = 3.0


class Slave(msgspec.Struct, frozen=True):
    """A slave's connection as its master sees it. Offsets are physical, in bytes."""

    identity: str = ""
    state: str = ""
    ack_offset: int = -1
    lag_bytes: int = 0
    is_in_sync: bool = False
    transferred_bytes_per_s: int = 0
    last_report_age_s: float | None = None
    why_not_in_sync: str = ""


class MasterSide(msgspec.Struct, frozen=True):
    """What a node knows of its slaves."""

    slaves: list[Slave] = []
    waiting_request_count: int = 0
    explanation: str = ""


class SlaveSide(msgspec.Struct, frozen=True):
    """A slave's link to its master."""

    state: str = ""
    condition: str = ""
    detail: str = ""
    master_address: str | None = None
    received_bytes_per_s: int = 0
    last_read_age_s: float | None = None


class Commitlog(msgspec.Struct, frozen=True):
    """Physical offsets, in bytes."""

    min_offset: int = -1
    max_offset: int = 0
    flushed_offset: int = 0
    dispatched_offset: int = 0


class DamagedRange(msgspec.Struct, frozen=True):
    """Bytes [begin, end) of the log, in `file`, that are not what was written."""

    begin: int = 0
    end: int = 0
    file: str = ""
    reason: str = ""
    found_by: str = ""
    heal_trouble: str = ""


class LogDamage(msgspec.Struct, frozen=True):
    """What is damaged in the log, and what was since the node's start."""

    found_count: int = 0
    healed_count: int = 0
    open_count: int = 0
    open_bytes: int = 0
    open: list[DamagedRange] = []


class Scrub(msgspec.Struct, frozen=True):
    """What the scrub and readers mended in files that are derived from the log."""

    queue_entries_mended_count: int = 0
    index_rebuilt_count: int = 0


class Damage(msgspec.Struct, frozen=True):
    """All that was found damaged."""

    log: LogDamage = LogDamage()
    checksum_rebuilt_count: int = 0
    scrub: Scrub = Scrub()


class Event(msgspec.Struct, frozen=True):
    """A line of the node's log."""

    level: str = ""
    text: str = ""


class Certificate(msgspec.Struct, frozen=True):
    """One of the node's certificates."""

    certificate: str = ""
    expires_at_ms: int | None = None
    is_expiring: bool = False
    error: str = ""


class Tls(msgspec.Struct, frozen=True):
    """A node's certificates, by what they are for."""

    credentials: dict[str, Certificate] = {}


class NameServer(msgspec.Struct, frozen=True):
    """A name server as the node sees it."""

    address: str = ""
    is_registered: bool = False
    error: str | None = None
    other_address: str = ""
    """Of another broker that it had under the node's name and id"""


class Membership(msgspec.Struct, frozen=True):
    """Where a member of a failover group stands, and what it knows of its group."""

    state: str = ""
    epoch: int = 0
    master_id: int | None = None
    reason: str = ""
    state_age_s: float = 0.0
    lease_remaining_s: float | None = None
    lease_ttl_s: float | None = None
    agreement_fault: str = ""
    id_taken_by: str | None = None
    """Address of another process that has the member's id"""
    sync_state_set: list[int] | None = None
    members: list[int] = []


class NodeStatus(msgspec.Struct, frozen=True):
    """What commands read of a node's /status; more may be there."""

    role: str
    broker_name: str
    broker_id: int
    is_ready: bool
    cluster_name: str = ""
    version: str = ""
    pid: int = 0
    uptime_s: float = 0.0
    not_ready_reason: str = ""
    addresses: dict[str, str | None] = {}
    commitlog: Commitlog = Commitlog()
    damage: Damage = Damage()
    ha: MasterSide = MasterSide()
    ha_client: SlaveSide | None = None
    member: Membership | None = None
    name_servers: list[NameServer] = []
    tls: Tls = Tls()
    events: list[Event] = []

    @property
    def name(self) -> str:
        """Broker name and id."""
        return f"{self.broker_name}:{self.broker_id}"

    @property
    def duplicates(self) -> list[str]:
        """Addresses of other brokers with this one's name and id."""
        found = [server.other_address for server in self.name_servers]
        if self.member is not None:
            found.append(self.member.id_taken_by or "")
        return list(dict.fromkeys(filter(None, found)))

    @property
    def link(self) -> SlaveSide | None:
        """A slave's link to its master. None: a master, which a member has a link without a use for."""
        return None if self.member is not None and self.role != "SLAVE" else self.ha_client


@dataclass(frozen=True)
class Answer:
    """What an admin port said."""

    code: int
    body: bytes
    clock_ahead_s: float | None


@dataclass(frozen=True)
class Page:
    """One node's answer."""

    raw: bytes
    node: NodeStatus
    clock_ahead_s: float | None
    """How far its clock is ahead of ours, to a second; None if it did not say its time"""


@Parameter(name="*")
@dataclass(frozen=True)
class AdminFlags:
    """Which admin ports, and what they want to see."""

    admin: Annotated[
        tuple[str, ...],
        Parameter(
            help="Admin port of a node, host:port; may be repeated. Default: those on this machine.", negative=()
        ),
    ] = ()
    token_file: Annotated[
        str | None,
        Parameter(env_var="HALOG_ADMIN_TOKEN_FILE", help="A file with adminToken; or the token in HALOG_ADMIN_TOKEN."),
    ] = None
    timeout: Annotated[float, Parameter(help="Seconds to wait for an answer.")] = TIMEOUT_S

    def checked(self) -> tuple[str, ...]:
        """Return the admin ports to ask. UsageError."""
        for address in self.admin:
            try:
                split_address(address)
            except ValueError as error:
                raise UsageError(f"--admin: {error}") from None
        if not 0 < self.timeout <= 3600:
            raise UsageError("--timeout is more than 0 s, and 3600 s at most")
        return self.admin or DEFAULT_ADMINS

    def token(self) -> str:
        """Return the token to show, "" for none. UsageError."""
        try:
            return read_secret_key(self.token_file) if self.token_file else os.environ.get("HALOG_ADMIN_TOKEN", "")
        except ValueError as error:
            raise UsageError(f"--token-file: {error}") from None


LOCAL_ADMINS = AdminFlags()


def fetch_pages(
    addresses: Sequence[str], token: str = "", tls: ssl.SSLContext | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Page | str]:
    """Return each address's page, or why there is none. Takes `timeout_s` and hardly longer, whatever is there."""
    answers = ask_admins(addresses, "/status", token, tls, timeout_s)
    return {address: answer if isinstance(answer, str) else _page(answer) for address, answer in answers.items()}


def _page(answer: Answer) -> Page | str:
    if answer.code != HTTPStatus.OK:
        return f"no answer: {HTTPStatus(answer.code).phrase}"
    try:
        return Page(answer.body, msgspec.json.decode(answer.body, type=NodeStatus), answer.clock_ahead_s)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return f"not a halog node's status: {error}"


def ask_admins(
    addresses: Sequence[str],
    path: str,
    token: str = "",
    tls: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    method: str = "GET",
) -> dict[str, Answer | str]:
    """Return each address's answer, or why there is none. Takes `timeout_s` and hardly longer, whatever is there."""
    found: dict[str, Answer | str] = {}

    def ask(address: str) -> None:
        found[address] = _ask(f"{'http' if tls is None else 'https'}://{address}{path}", method, token, tls, timeout_s)

    # Daemons: urllib's timeout is one of each read, so a peer that dribbles could keep a thread for ever.
    threads = [threading.Thread(target=ask, args=(address,), daemon=True) for address in addresses]
    end = time.monotonic() + timeout_s + 0.1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {address: found.get(address, f"no answer within {timeout_s:g} s") for address in addresses}


def _ask(url: str, method: str, token: str, tls: ssl.SSLContext | None, timeout_s: float) -> Answer | str:
    # The token is for this address alone: urllib would hand an ordinary header on to wherever a redirection leads.
    request = urllib.request.Request(url, method=method)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        asked_s = time.time()
        with urllib.request.urlopen(request, timeout=timeout_s, context=tls) as response:
            clock_ahead_s = _clock_ahead_s(response.headers.get("Date"), asked_s, time.time())
            return Answer(response.status, response.read(BODY_SIZE_MAX), clock_ahead_s)
    except urllib.error.HTTPError as error:
        with error:
            if error.code != HTTPStatus.UNAUTHORIZED:
                return Answer(error.code, error.read(BODY_SIZE_MAX), None)
            return "it wants its adminToken: --token-file, or HALOG_ADMIN_TOKEN" if not token else "another adminToken"
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return f"no answer: TLS: {reason_of(reason)}"
        if isinstance(reason, TimeoutError):
            return f"no answer within {timeout_s:g} s"
        return f"no answer: {getattr(reason, 'strerror', None) or reason}"
    except (HTTPException, ValueError) as error:
        return f"not an admin port: {error!r}"


def _clock_ahead_s(date: str | None, asked_s: float, answered_s: float) -> float | None:
    """0 where the difference is within what the second that HTTP tells, and the time that the answer took, explain."""
    if date is None:
        return None
    try:
        told_s = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    return difference(told_s, told_s + 1, asked_s, answered_s)


def difference(low: float, high: float, asked: float, answered: float) -> float:
    """By how much a moment in [low, high] of another clock lies beyond what ours said when it was asked; 0: within."""
    if low > answered:
        return low - answered
    return min(0.0, high - asked)

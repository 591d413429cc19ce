"""`ha status`: a cluster at a glance, from the admin ports of its nodes."""

from __future__ import annotations

import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from ha.cli.exits import EXIT_DONE, EXIT_NOT_READY, EXIT_UNREACHABLE, UsageError
from ha.cli.flags import PLAIN, TlsFlags
from ha.client.credentials import read_secret_key
from ha.client.options import split_address
from ha.tls.files import reason_of

DEFAULT_ADMINS = ("127.0.0.1:10913", "127.0.0.1:10923")
TIMEOUT_S = 3.0
BODY_SIZE_MAX = 16 * 1024 * 1024
WIDTH = 160
"""Characters of a line where there is no terminal to ask."""


class Slave(msgspec.Struct, frozen=True):
    """A slave's connection as its master sees it. Offsets are physical, in bytes."""

    identity: str = ""
    state: str = ""
    ack_offset: int = -1
    lag_bytes: int = 0
    is_in_sync: bool = False
    transferred_bytes_per_s: int = 0
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


class NodeStatus(msgspec.Struct, frozen=True):
    """What this command reads of a node's /status; more may be there."""

    role: str
    broker_name: str
    broker_id: int
    is_ready: bool
    version: str = ""
    uptime_s: float = 0.0
    not_ready_reason: str = ""
    addresses: dict[str, str | None] = {}
    commitlog: Commitlog = Commitlog()
    damage: Damage = Damage()
    ha: MasterSide = MasterSide()
    ha_client: SlaveSide | None = None
    tls: Tls = Tls()
    events: list[Event] = []


def status(
    *,
    admin: Annotated[
        tuple[str, ...],
        Parameter(
            help="Admin port of a node, host:port; may be repeated. Default: those on this machine.", negative=()
        ),
    ] = (),
    events: Annotated[int, Parameter(help="Show so many of each node's last warnings and notices.")] = 0,
    token_file: Annotated[
        str | None,
        Parameter(env_var="HALOG_ADMIN_TOKEN_FILE", help="A file with adminToken; or the token in HALOG_ADMIN_TOKEN."),
    ] = None,
    json: Annotated[bool, Parameter(negative=(), help="Print what the nodes say, as JSON, by admin address.")] = False,
    tls: TlsFlags = PLAIN,
) -> int:
    """Show nodes, their logs, and how far the slaves are.

    Exit codes: 0 every node answered and is ready; 2 usage; 4 a node is not ready; 69 a node that was named, or
    without names every node of this machine, can't be reached.
    """
    for address in admin:
        try:
            split_address(address)
        except ValueError as error:
            raise UsageError(f"--admin: {error}") from None
    asked = admin or DEFAULT_ADMINS
    try:
        token = read_secret_key(token_file) if token_file else os.environ.get("HALOG_ADMIN_TOKEN", "")
    except ValueError as error:
        raise UsageError(f"--token-file: {error}") from None
    files = tls.checked()
    context = None if files is None else files.context()
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = dict(zip(asked, threads.map(partial(_fetch, token=token, tls=context), asked), strict=True))
    errors = {address: answer for address, answer in answers.items() if isinstance(answer, str)}
    nodes = {address: answer for address, answer in answers.items() if not isinstance(answer, str)}
    if json:
        shown: dict[str, Any] = {address: msgspec.Raw(raw) for address, (raw, _) in nodes.items()}
        shown |= {address: {"error": error} for address, error in errors.items() if admin}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(shown), indent=2) + b"\n")
        sys.stdout.buffer.flush()
    else:
        _show([node for _, node in nodes.values()], events)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for address, reason in errors.items():
        if admin or not nodes:
            console.print(f"ha: {address}: {reason}", markup=False)
    if not nodes or (admin and errors):
        return EXIT_UNREACHABLE
    return EXIT_DONE if all(node.is_ready for _, node in nodes.values()) else EXIT_NOT_READY


def _fetch(address: str, token: str = "", tls: ssl.SSLContext | None = None) -> tuple[bytes, NodeStatus] | str:
    """The answer as it came and decoded, or why there is none."""
    # The token is for this address alone: urllib would hand an ordinary header on to wherever a redirection leads.
    request = urllib.request.Request(f"{'http' if tls is None else 'https'}://{address}/status")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=tls) as response:
            raw: bytes = response.read(BODY_SIZE_MAX)
        return raw, msgspec.json.decode(raw, type=NodeStatus)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == HTTPStatus.UNAUTHORIZED:
                return (
                    "it wants its adminToken: --token-file, or HALOG_ADMIN_TOKEN" if not token else "another adminToken"
                )
            return f"no answer: {error.reason}"
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return f"no answer: TLS: {reason_of(reason)}"
        return f"no answer: {getattr(reason, 'strerror', None) or reason}"
    except (msgspec.DecodeError, ValueError) as error:
        return f"not a halog node's status: {error}"


def _show(nodes: list[NodeStatus], event_count: int) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table("node", "role", "remoting", "ready", "log from", "to", "unflushed", "undispatched", "up", box=None)
    for node in nodes:
        log = node.commitlog
        table.add_row(
            f"{node.broker_name}:{node.broker_id}",
            node.role,
            node.addresses.get("remoting") or "",
            "yes" if node.is_ready else "NO",
            *(f"{offset:,}" for offset in (log.min_offset, log.max_offset)),
            *(f"{log.max_offset - offset:,}" for offset in (log.flushed_offset, log.dispatched_offset)),
            _duration(node.uptime_s),
        )
    if nodes:
        console.print(table)
    for node in nodes:
        name = f"{node.broker_name}:{node.broker_id}"
        if node.not_ready_reason:
            console.print(f"{name} is not ready: {node.not_ready_reason}", markup=False)
        _show_damage(console, name, node.damage)
        if node.ha_client is not None:
            link = node.ha_client
            rate = f", {link.received_bytes_per_s / 1e6:,.1f} MB/s" if link.received_bytes_per_s else ""
            console.print(
                f"{name} ← {link.master_address or 'no master'}: {link.state} ({link.detail or link.condition}){rate}",
                markup=False,
            )
        elif node.ha.slaves:
            slaves = Table("slave of " + name, "state", "acknowledged", "behind", "MB/s", "counts", box=None)
            for slave in node.ha.slaves:
                slaves.add_row(
                    slave.identity,
                    slave.state,
                    f"{slave.ack_offset:,}",
                    f"{slave.lag_bytes:,}",
                    f"{slave.transferred_bytes_per_s / 1e6:,.1f}",
                    "yes" if slave.is_in_sync else f"no: {slave.why_not_in_sync}",
                )
            console.print(slaves)
            if node.ha.waiting_request_count:
                console.print(f"{node.ha.waiting_request_count:,} sends wait for a slave", markup=False)
        else:
            console.print(f"{name}: {node.ha.explanation or 'no slave is connected'}", markup=False)
        for role, held in node.tls.credentials.items():
            if held.is_expiring and held.expires_at_ms is not None:
                end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(held.expires_at_ms / 1000))
                console.print(f"{name}: {role} certificate {held.certificate} ends {end}", markup=False)
            if held.error:
                console.print(f"{name}: {role} certificate not renewed: {held.error}", markup=False)
        for event in node.events[:event_count]:
            console.print(f"  {event.level} {event.text}", markup=False)


def _show_damage(console: Console, name: str, damage: Damage) -> None:
    log = damage.log
    for each in log.open:
        trouble = f"; not healed: {each.heal_trouble}" if each.heal_trouble else ""
        console.print(
            f"{name} DAMAGED: commitlog {each.file}, offsets {each.begin:,} to {each.end:,} "
            f"(found by {each.found_by}: {each.reason}){trouble}",
            markup=False,
        )
    if log.open_count > len(log.open):
        console.print(f"{name} DAMAGED: {log.open_count:,} ranges, {log.open_bytes:,} bytes in all", markup=False)
    mended = [
        f"{count:,} {what}"
        for count, what in (
            (log.healed_count, "ranges of the log healed"),
            (damage.scrub.queue_entries_mended_count, "queue entries mended"),
            (damage.scrub.index_rebuilt_count, "times the index rebuilt"),
            (damage.checksum_rebuilt_count, "checksum files made anew"),
        )
        if count
    ]
    if mended:
        console.print(f"{name} was damaged: {', '.join(mended)}", markup=False)


def _duration(seconds: float) -> str:
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"

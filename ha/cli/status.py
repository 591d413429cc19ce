"""`ha status`: shows the state of a cluster's nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Column, Table

from ha.cli.admin_pages import LOCAL_ADMINS, AdminFlags, Damage, Membership, NodeStatus, Page, Timers
from ha.cli.exits import EXIT_DONE, EXIT_NOT_READY, EXIT_REFUSED, EXIT_UNREACHABLE, UsageError
from ha.cli.flags import LOCAL, PLAIN, ClusterFlags, TlsFlags
from ha.cli.flow import Flow, NodeFlow
from ha.cli.node_pages import NodePages, fetch_node_pages
from ha.cli.showing import duration, notices, output, print_json, safe
from ha.cli.unreachable import explain_no_node


def status(
    *,
    events: Annotated[int, Parameter(help="Number of recent events to show per node.")] = 0,
    sample: Annotated[
        float, Parameter(help="Sampling interval in seconds for rates of slaves that are behind (0 disables).")
    ] = 1.0,
    check: Annotated[
        bool, Parameter(negative=(), help="Exit with 1 if sends are degraded, or if that is unknown, for monitoring.")
    ] = False,
    json: Annotated[bool, Parameter(negative=(), help="Print the nodes' status pages as JSON, by address.")] = False,
    cluster: ClusterFlags = LOCAL,
    admins: AdminFlags = LOCAL_ADMINS,
    tls: TlsFlags = PLAIN,
) -> int:
    """Show nodes, their logs, and the lag of slaves.

    Finds the nodes through the name servers, and on this machine, unless --admin names them. Facts that only an
    admin port reports, such as readiness, are unknown for nodes whose admin port can't be read from here, and for
    RocketMQ's brokers.

    With --check, sends are degraded if a master can't store messages, or if fewer nodes are in sync than the sends of a
    SYNC_MASTER need.

    Exit codes: 0 every node is reachable, and none reports that it is not ready; 1 with --check, sends are degraded, or
    a node does not report whether they are or whether it is ready; 2 usage; 4 a node is not ready; 69 a registered
    node, a node given by --admin or a name server given by --servers can't be reached, slaves are registered without a
    master, or there is no node.
    """
    if events < 0:
        raise UsageError("--events must not be negative")
    if not 0 <= sample <= 3600:
        raise UsageError("--sample must be from 0 to 3600 s")
    fetch = partial(fetch_node_pages, cluster, admins, tls)
    return show_status(fetch, events=events, sample=sample, check=check, json=json)


def show_status(
    fetch: Callable[[], NodePages], *, events: int = 0, sample: float = 1.0, check: bool = False, json: bool = False
) -> int:
    """Shows the nodes that `fetch` returns, and returns the exit code of `ha status`. Calls `fetch` again for rates."""
    pages, errors, tried = fetch()
    if json:
        shown: dict[str, Any] = {address: msgspec.Raw(page.raw) for address, page in pages.items()}
        shown |= {address: {"error": error} for address, error in errors.items()}
        print_json(shown)
    else:
        _show(list(pages.values()), _flows(pages, fetch, sample), events)
    if not pages:
        notices().print(f"ha: {safe(explain_no_node(tried))}")
        return EXIT_UNREACHABLE
    for address, reason in errors.items():
        notices().print(f"ha: {safe(address)}: {safe(reason)}")
    if errors:
        return EXIT_UNREACHABLE
    nodes = [page.node for page in pages.values()]
    if check and (problems := [problem for node in nodes if (problem := _problem(node))]):
        for problem in problems:
            notices().print(f"ha: {safe(problem)}")
        return EXIT_REFUSED
    return EXIT_NOT_READY if any(node.is_ready is False for node in nodes) else EXIT_DONE


def _problem(node: NodeStatus) -> str:
    """Returns the problem that --check reports: sends to a master are degraded, or it is unknown whether they are or
    whether a slave is ready. "" if there is none.
    """
    if node.is_ready is None:
        what = f"{node.name} is ready" if node.role == "SLAVE" else f"sends to {node.name} are degraded"
        return f"can't tell whether {what}: {node.not_ready_reason}"
    if node.role == "SLAVE" or node.degraded_reason == "":
        return ""
    if node.degraded_reason is None:
        return f"can't tell whether sends to {node.name} are degraded: its version does not report it"
    return f"sends to {node.name} are degraded: {node.degraded_reason}"


def _flows(pages: dict[str, Page], again: Callable[[], NodePages], sample_s: float) -> list[NodeFlow]:
    """Returns the flow of each node, in the order of `pages`; samples a second time for rates if a slave is behind."""
    flow = Flow()
    flows = flow.add(time.monotonic(), [page.node for page in pages.values()])
    if sample_s > 0 and any(slave.lag_bytes > 0 for node in flows for slave in node.slaves):
        time.sleep(sample_s)
        later = again().pages
        if later.keys() == pages.keys():
            flows = flow.add(time.monotonic(), [later[address].node for address in pages])
    return flows


def _show(pages: list[Page], flows: list[NodeFlow], event_count: int) -> None:
    console = output()
    nodes = [page.node for page in pages]
    if nodes:
        console.print(nodes_table(flows))
    members = [node for node in nodes if node.member is not None]
    if members:
        console.print(members_table(members))
    if any(flow.slaves for flow in flows):
        console.print(slaves_table(flows))
    for node, flow in zip(nodes, flows, strict=True):
        name = safe(flow.name)
        if problem := flow.readiness_problem:
            console.print(safe(problem))
        if node.duplicates:
            console.print(f"{name}: another broker has the same name and ID: {safe(', '.join(node.duplicates))}")
        _show_damage(console, name, node.damage)
        if node.timers.pending_count:
            console.print(f"{name}: {_timers_text(node.timers)}")
        if node.link is not None:
            link = node.link
            rate = f", {link.received_bytes_per_s / 1e6:,.1f} MB/s" if link.received_bytes_per_s else ""
            age = "" if link.last_read_age_s is None else f", last data {seconds(link.last_read_age_s)} ago"
            console.print(f"{name} ← {safe(link.master_address or 'no master')}: {safe(flow.link)}{rate}{age}")
        elif not flow.slaves:
            console.print(f"{name}: {safe(node.ha.explanation or 'no slave is connected')}")
        elif flow.waiting_sends:
            console.print(f"{name}: {flow.waiting_sends:,} sends are waiting for a slave")
        for role, held in node.tls.credentials.items():
            if held.is_expiring and held.expires_at_ms is not None:
                end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(held.expires_at_ms / 1000))
                console.print(f"{name}: {safe(role)} certificate {safe(held.certificate)} expires {end}")
            if held.error:
                console.print(f"{name}: {safe(role)} certificate could not be reloaded: {safe(held.error)}")
        for event in node.events[:event_count]:
            console.print(f"  {safe(event.level)} {safe(event.text)}")


def _timers_text(timers: Timers) -> str:
    text = f"{timers.pending_count:,} timer messages are pending"
    if timers.next_due_ms is not None:
        text += time.strftime(", the next from %Y-%m-%d %H:%M:%S UTC on", time.gmtime(timers.next_due_ms / 1000))
    counts = ", ".join(f"{safe(due)}: {count:,}" for due, count in timers.due_counts.items() if count)
    return f"{text} ({counts})" if counts else text


def _table(*columns: str) -> Table:
    """Returns an empty table. Long values are wrapped, because numbers must not be cut off in `ha top`, whose lines are
    as wide as the terminal."""
    return Table(*(Column(name, overflow="fold") for name in columns), box=None)


def nodes_table(flows: list[NodeFlow]) -> Table:
    """Returns a table with one row per node."""
    columns = ("role", "remoting", "ready", "in sync", "log from", "to", "behind", "MB/s", "unflushed", "undispatched")
    table = _table("node", *columns, "up")
    for node in flows:
        table.add_row(
            safe(node.name),
            safe(node.role),
            safe(node.remoting),
            {True: "yes", False: "NO", None: "unknown"}[node.is_ready],
            f"{sum(slave.counts for slave in node.slaves)} of {len(node.slaves)}" if node.slaves else "–",
            *(f"{offset:,}" for offset in (node.min_offset, node.max_offset)),
            "–" if node.behind_bytes is None else f"{node.behind_bytes:,}",
            megabytes(node.written_bytes_per_s),
            *("?" if count is None else f"{count:,}" for count in (node.unflushed_bytes, node.undispatched_bytes)),
            duration(node.uptime_s),
        )
    return table


def members_table(nodes: list[NodeStatus]) -> Table:
    """Returns a table with one row per failover group member."""
    columns = ("state", "for", "epoch", "master", "sync-state set", "members", "lease", "problem")
    table = _table("member", *columns)
    for node in nodes:
        member = node.member
        assert member is not None
        table.add_row(
            safe(node.name),
            safe(member.state),
            duration(member.state_age_s),
            str(member.epoch),
            "none" if member.master_id is None else str(member.master_id),
            "?" if member.sync_state_set is None else _ids(member.sync_state_set),
            _ids(member.members),
            _lease(member),
            safe(member.reason or member.agreement_fault),
        )
    return table


def _ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids)) or "none"


def _lease(member: Membership) -> str:
    left_s = member.lease_remaining_s
    if left_s is None or left_s <= 0:
        return "none" if member.lease_ttl_s is None else "expired"
    return f"{left_s:.1f} of {member.lease_ttl_s or 0:g} s"


def slaves_table(flows: list[NodeFlow]) -> Table:
    """Returns a table with one row per slave that is connected to a master."""
    columns = ("master", "state", "acknowledged", "bytes behind", "time behind", "MB/s", "eta", "last ack", "counts")
    table = _table("slave", *columns)
    for node in flows:
        for slave in node.slaves:
            table.add_row(
                safe(slave.identity),
                safe(node.name),
                safe(slave.state),
                f"{slave.ack_offset:,}",
                f"{slave.lag_bytes:,}",
                seconds(slave.lag_s),
                megabytes(slave.ack_bytes_per_s),
                "–" if slave.eta_s is None else seconds(slave.eta_s),
                "–" if slave.last_ack_age_s is None else f"{seconds(slave.last_ack_age_s)} ago",
                "yes" if slave.counts else f"no: {safe(slave.why_not)}",
            )
    return table


def seconds(value: float | None) -> str:
    """Formats a duration, with tenths of a second below a minute; "?" for None."""
    if value is None:
        return "?"
    return f"{value:.1f} s" if value < 60 else duration(value)


def megabytes(rate: float | None) -> str:
    """Formats a rate, given in bytes per second, in MB per second; "–" for None."""
    return "–" if rate is None else f"{rate / 1e6:,.1f}"


def _show_damage(console: Console, name: str, damage: Damage) -> None:
    log = damage.log
    for each in log.open:
        repair_error = f"; repair failed: {safe(each.heal_trouble)}" if each.heal_trouble else ""
        console.print(
            f"{name} DAMAGED: commitlog {safe(each.file)}, offsets {each.begin:,} to {each.end:,} "
            f"(found by {safe(each.found_by)}: {safe(each.reason)}){repair_error}"
        )
    if log.open_count > len(log.open):
        console.print(f"{name} DAMAGED: {log.open_count:,} ranges, {log.open_bytes:,} bytes in total")
    repairs = [
        f"{count:,} {what}"
        for count, what in (
            (log.healed_count, "log ranges"),
            (damage.scrub.queue_entries_mended_count, "queue entries"),
            (damage.scrub.index_rebuilt_count, "index rebuilds"),
            (damage.checksum_rebuilt_count, "checksum files rebuilt"),
        )
        if count
    ]
    if repairs:
        console.print(f"{name} repaired since start: {', '.join(repairs)}")

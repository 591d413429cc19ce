"""`ha doctor`: checks a cluster and reports each finding with a solution.

It connects to name servers, each broker's ports and halog's admin ports, and asks brokers for their state, with
requests that RocketMQ supports, too: GET_BROKER_RUNTIME_INFO (28), GET_BROKER_CONFIG (26), EXCHANGE_BROKER_HA_INFO
(906), GET_BROKER_HA_STATUS (907), and in a cluster with several broker groups GET_ALL_TOPIC_CONFIG (21). It changes
nothing; --write-test writes a temporary file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from ha.cli.admin_pages import LOCAL_ADMINS, AdminFlags, Page
from ha.cli.exits import EXIT_DONE, EXIT_REFUSED, EXIT_UNREACHABLE, UsageError
from ha.cli.flags import LOCAL, PLAIN, ClusterFlags, TlsFlags
from ha.cli.showing import output, print_json, safe, size

if TYPE_CHECKING:
    from ha.cli.doctor.findings import Finding
    from ha.cli.nodes import Facts


def doctor(
    *,
    store: Annotated[Path | None, Parameter(help="Also check this store directory and its disk.")] = None,
    write_test: Annotated[
        bool,
        Parameter(negative=(), help="With --store: measure the disk's write speed with up to 64 MiB or 3 s of writes."),
    ] = False,
    json: Annotated[bool, Parameter(negative=(), help="Print facts and findings as JSON.")] = False,
    cluster: ClusterFlags = LOCAL,
    admins: AdminFlags = LOCAL_ADMINS,
    tls: TlsFlags = PLAIN,
) -> int:
    """Check a cluster from this machine: ports, addresses, replication, contradictory settings, clocks, disks.

    An HA port is checked by connecting and disconnecting. Exit codes: 0 no errors (possibly warnings); 1 errors; 2
    usage; 69 no node could be reached.
    """
    if write_test and store is None:
        raise UsageError("--write-test requires --store, the directory to write to")
    from ha.cli.doctor.topics import ask_topics
    from ha.cli.nodes import check_ha_ports, gather

    of_store, speed = ([], None) if store is None else _examine_store(store, write_test=write_test)
    facts = gather(cluster, admins, tls)
    check_ha_ports(facts, admins.timeout)
    ask_topics(facts, cluster, tls, admins.timeout)
    pages = {address: page for address, page in facts.admins.items() if isinstance(page, Page)}
    findings = [*_examine(facts, pages), *of_store]
    if json:
        print_json(_report(facts, findings, speed))
    else:
        console = output()
        console.print(
            f"Checked {len(facts.name_servers)} name servers, {len(facts.brokers)} brokers, {len(pages)} admin ports."
        )
        if speed is not None:
            console.print(
                f"{store}: {size(int(speed['bytes_per_s']))} per second with an fsync per MiB; an fsync took "
                f"{speed['sync_median_s'] * 1000:.1f} ms, {speed['sync_max_s'] * 1000:.1f} ms at most"
            )
        _print_findings(console, findings)
    if not pages and not any(reach.is_open for reach in facts.name_servers):
        return EXIT_UNREACHABLE
    return EXIT_REFUSED if any(finding.is_error for finding in findings) else EXIT_DONE


def _examine_store(store: Path, *, write_test: bool) -> tuple[list[Finding], dict[str, float] | None]:
    """Returns the findings about a store, and the speed of its disk if it was measured."""
    from ha.cli.doctor import machine

    findings = [*machine.examine_directory(store), *machine.examine_format(store)]
    if not write_test:
        return findings, None
    speed, more = machine.examine_speed(store)
    return findings + more, speed


def _examine(facts: Facts, pages: dict[str, Page]) -> list[Finding]:
    from ha.cli.doctor import machine, topics
    from ha.cli.doctor.checks import examine

    findings = [*examine(facts), *topics.examine_topics(facts)]
    for address, page in pages.items():
        if page.node.pid and address.rpartition(":")[0] in ("127.0.0.1", "localhost"):
            findings += machine.examine_process(page.node.pid, page.node.name)
    return [*findings, *machine.examine_own_limit()]


def _report(facts: Facts, findings: list[Finding], speed: dict[str, float] | None) -> dict[str, Any]:
    """Returns the report for --json."""
    return {
        "findings": findings,
        "name_servers": facts.name_servers,
        "brokers": [
            {
                "cluster": broker.cluster,
                "name": broker.name,
                "broker_id": broker.broker_id,
                "address": broker.address,
                "reach": broker.reach,
                "ha_address": broker.ha_address,
                "ha_reach": broker.ha_reach,
                "version": (broker.figures or {}).get("brokerVersionDesc"),
                "clock_ahead_s": broker.clock_ahead_s,
                "knows_config": broker.config is not None,
            }
            for broker in facts.brokers
        ],
        "admin_ports": {
            address: {"name": page.node.name} if isinstance(page, Page) else {"error": page}
            for address, page in facts.admins.items()
        },
        "disk": speed,
    }


def _print_findings(console: Console, findings: list[Finding]) -> None:
    for finding in findings:
        console.print(f"{finding.weight.value.upper()} {safe(finding.where)}: {safe(finding.what)}", soft_wrap=True)
        console.print(f"  → {safe(finding.cure)}  [{finding.check}]", soft_wrap=True)
    weights = [finding.weight.value for finding in findings]
    errors, warnings = weights.count("error"), weights.count("warning")
    console.print(f"{errors} errors, {warnings} warnings" if errors or warnings else "No problems found.")

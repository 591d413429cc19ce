"""`ha doctor`: checks a cluster and reports each finding with a solution.

It connects to name servers, each broker's ports and halog's admin ports, and asks brokers for their state (requests 28,
26, 906 and 907, which RocketMQ supports, too). It changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import anyio
from cyclopts import Parameter

from ha.cli.admin_pages import LOCAL_ADMINS, AdminFlags, Page
from ha.cli.exits import EXIT_DONE, EXIT_REFUSED, EXIT_UNREACHABLE, UsageError
from ha.cli.flags import LOCAL, PLAIN, ClusterFlags, TlsFlags
from ha.cli.showing import output, print_json, safe, size
from ha.client import ClientOptions


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
    from ha.cli.doctor.checks import examine
    from ha.cli.doctor.facts import gather
    from ha.cli.doctor.findings import Weight
    from ha.cli.doctor.machine import (
        examine_directory,
        examine_format,
        examine_own_limit,
        examine_process,
        examine_speed,
    )

    if write_test and store is None:
        raise UsageError("--write-test requires --store, the directory to write to")
    asked = admins.checked()
    files = tls.checked()
    options = ClientOptions(
        credentials=cluster.credentials(),
        tls=files,
        connect_timeout_s=admins.timeout,
        request_timeout_s=admins.timeout,
    )

    async def ask() -> Any:
        return await gather(
            cluster.addresses(),
            asked,
            options=options,
            token=admins.token(),
            context=None if files is None else files.context(),
            timeout_s=admins.timeout,
            named_admins=bool(admins.admin),
        )

    facts = anyio.run(ask, backend="trio")
    found = examine(facts)
    for address, page in facts.admins.items():
        if isinstance(page, Page) and page.node.pid and address.rpartition(":")[0] in ("127.0.0.1", "localhost"):
            found += examine_process(page.node.pid, page.node.name)
    found += examine_own_limit()
    speed = None
    if store is not None:
        found += [*examine_directory(store), *examine_format(store)]
        if write_test:
            speed, more = examine_speed(store)
            found += more
    pages = {address: page for address, page in facts.admins.items() if isinstance(page, Page)}
    reached = bool(pages) or any(reach.is_open for reach in facts.name_servers)
    if json:
        print_json(
            {
                "findings": found,
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
        )
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
        for finding in found:
            console.print(f"{finding.weight.value.upper()} {safe(finding.where)}: {safe(finding.what)}", soft_wrap=True)
            console.print(f"  → {safe(finding.cure)}  [{finding.check}]", soft_wrap=True)
        errors = sum(finding.weight is Weight.ERROR for finding in found)
        warnings = sum(finding.weight is Weight.WARNING for finding in found)
        console.print(f"{errors} errors, {warnings} warnings" if errors or warnings else "No problems found.")
    if not reached:
        return EXIT_UNREACHABLE
    return EXIT_REFUSED if any(finding.weight is Weight.ERROR for finding in found) else EXIT_DONE

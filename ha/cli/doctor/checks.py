"""The checks of `ha doctor`: pure functions of the collected facts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from statistics import median_low

from ha.cli.admin_pages import NodeStatus, Page
from ha.cli.doctor.findings import Finding, Weight
from ha.cli.nodes import BrokerFacts, Facts, Outcome, Reach, is_local
from ha.cli.showing import duration, size
from ha.protocol.addresses import split_address

CLOCK_WARNING_S = 5.0
CLOCK_ERROR_S = 60.0
DISK_WARNING, DISK_ERROR = 0.75, 0.90
"""Used shares of a disk (0 to 1) at which a warning and an error are reported: RocketMQ's diskMaxUsedSpaceRatio, above
which expired files are deleted at any time, and the share at which RocketMQ stops storing messages"""
UNDISPATCHED_MAX = 64 << 20
"""Maximum number of bytes of the log that may be missing from the consume queues without a warning"""
FILES_MIN = 16_384
"""File descriptor limit below which a node gets a warning"""
_MUST_AGREE = {
    "mappedFileSizeCommitLog": "a slave's log is a byte-for-byte copy, so its files must have the same size",
    "messageDelayLevel": "a slave that becomes master would deliver delayed messages at other times",
}
_Found = Iterator[Finding]


def examine(facts: Facts) -> list[Finding]:
    """Returns all findings, errors first."""
    found = [
        *_name_servers(facts),
        *_admin_ports(facts),
        *_addresses(facts),
        *_ha_ports(facts),
        *_replication(facts),
        *_roles(facts),
        *_settings(facts),
        *_acknowledgement(facts),
        *_clocks(facts),
        *_disks(facts),
        *_versions(facts),
        *_pages(facts),
    ]
    order = list(Weight)
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.weight))


def _error(check: str, where: str, what: str, cure: str) -> Finding:
    return Finding(check=check, weight=Weight.ERROR, where=where, what=what, cure=cure)


def _warning(check: str, where: str, what: str, cure: str) -> Finding:
    return Finding(check=check, weight=Weight.WARNING, where=where, what=what, cure=cure)


def _note(check: str, where: str, what: str, cure: str) -> Finding:
    return Finding(check=check, weight=Weight.NOTE, where=where, what=what, cure=cure)


def _why_closed(reach: Reach, what_listens: str) -> tuple[str, str]:
    """Returns problem and solution for a port that is not open."""
    match reach.outcome:
        case Outcome.REFUSED:
            return (
                f"{reach.address} refuses connections: the machine is up, but nothing listens on the port",
                f"start {what_listens}, or correct the address; if it runs, check which address it is bound to "
                "(bindAddress) with: ss -ltn",
            )
        case Outcome.SILENT:
            return (
                f"{reach.address} does not respond ({reach.detail}): a firewall drops packets, or the address is wrong",
                "open this port in firewalls and security groups, for this machine and the other nodes, or correct "
                "the address",
            )
        case _:
            return (
                f"{reach.address} can't be reached: {reach.detail}",
                "correct the name or address, or the route to it",
            )


def _name_servers(facts: Facts) -> _Found:
    for reach in facts.name_servers:
        if not reach.is_open:
            what, cure = _why_closed(reach, "the name server")
            yield _error("name-server-port", f"name server {reach.address}", what, cure)
    for address, error in facts.name_server_errors.items():
        yield _error(
            "name-server-answer",
            f"name server {address}",
            f"its port is open, but it does not respond as a name server: {error}",
            "check that it is a name server's port; if it uses TLS, add --tls-ca, otherwise remove it",
        )
    is_answered = any(reach.is_open for reach in facts.name_servers) and not facts.name_server_errors
    if is_answered and not facts.brokers:
        yield _error(
            "no-broker",
            "the cluster",
            "the name servers respond, but no broker is registered",
            "start brokers with namesrvAddr set to these name servers; if they run, check their logs",
        )


def _admin_ports(facts: Facts) -> _Found:
    for address, page in facts.admins.items():
        if isinstance(page, str) and facts.named_admins:
            yield _error(
                "admin-port",
                f"admin port {address}",
                page,
                "start the node, or correct --admin; adminBindAddress and adminListenPort set where a node listens, "
                "by default only on 127.0.0.1",
            )
    for broker in facts.brokers:
        reason = facts.admins.get(broker.admin_address or "")
        if isinstance(reason, str) and broker.status is None and not facts.named_admins:
            yield _note(
                "admin-port",
                broker.label,
                f"its admin port could not be read, so that readiness, damage, certificates and registration were not "
                f"checked: {reason}",
                "give --token-file, or run ha doctor on the broker's machine",
            )


def _host(address: str) -> str:
    try:
        return split_address(address)[0]
    except ValueError:
        return ""


def _addresses(facts: Facts) -> _Found:
    outside = [reach.address for reach in facts.name_servers if not is_local(_host(reach.address))]
    for broker in facts.brokers:
        if not broker.reach.is_open:
            what, cure = _why_closed(broker.reach, "the broker")
            yield _error(
                "remoting-port",
                broker.label,
                f"address announced to clients: {what}",
                f"{cure}; brokerIP1 and listenPort set the announced address",
            )
        elif broker.error:
            yield _error(
                "remoting-answer",
                broker.label,
                f"its port is open, but it does not respond: {broker.error}",
                "if the broker uses TLS (tls.server.mode), add --tls-ca, otherwise remove it; with access control, use "
                "--access-key; otherwise check the broker's log",
            )
        host = _host(broker.address)
        if is_local(host) and outside:
            yield _error(
                "advertised-loopback",
                broker.label,
                f"it announces {host} to clients, which is each client's own machine, but name servers are at "
                f"{', '.join(outside)}",
                "set brokerIP1 to an address of the broker that clients can reach",
            )
        if host in ("0.0.0.0", "::"):
            yield _error(
                "advertised-wildcard",
                broker.label,
                f"it announces {host} to clients, which they can't connect to",
                "set brokerIP1 to an address of the broker that clients can reach",
            )


def _ha_ports(facts: Facts) -> _Found:
    for broker in facts.brokers:
        if not broker.is_master or not broker.reach.is_open:
            continue
        if broker.ha_reach is None:
            yield _note(
                "ha-port-unknown",
                broker.label,
                "the address of its HA port is unknown" + (f": {broker.error}" if broker.error else ""),
                "use an admin's --access-key, or the node's --admin port",
            )
            continue
        if not broker.ha_reach.is_open:
            what, cure = _why_closed(broker.ha_reach, "the broker")
            yield _error(
                "ha-port",
                broker.label,
                f"HA address announced to slaves: {what}",
                f"{cure}; brokerIP2 and haListenPort set the announced address",
            )
        host = _host(broker.ha_address)
        others = [
            each.address for each in facts.brokers if each.name == broker.name and not is_local(_host(each.address))
        ]
        if is_local(host) and others:
            yield _error(
                "ha-loopback",
                broker.label,
                f"it announces {host} to slaves, which is each slave's own machine",
                "set brokerIP2 to an address of the master that slaves can reach",
            )


def _sets(facts: Facts) -> dict[str, list[BrokerFacts]]:
    found: dict[str, list[BrokerFacts]] = defaultdict(list)
    for broker in facts.brokers:
        found[broker.name].append(broker)
    return found


def _replication(facts: Facts) -> _Found:
    """Checks replication links from both ends."""
    for node in _nodes(facts):
        link = node.link
        if link is not None and link.state != "transfer":
            yield _error("slave-link", *_link_trouble(node, facts))
        for slave in node.ha.slaves:
            if slave.state == "out_of_range":
                yield _error(
                    "slave-out-of-range",
                    f"slave {slave.identity} of {node.name}",
                    slave.why_not_in_sync or "it requests an offset that the master does not have",
                    "it has a different log, or was down for longer than the master keeps files: set haMasterAddress "
                    "to its own master, or move its store aside so that it copies the log again (haOutOfRange)",
                )
    asked = {node.addresses.get("remoting") for node in _nodes(facts)}
    for broker in facts.brokers:
        replication = broker.replication
        if replication is None or broker.is_master or broker.address in asked:
            continue
        client = replication.ha_client_runtime_info
        if not client.master_addr:
            yield _error(
                "slave-link",
                broker.label,
                "it reports that it has no master",
                "check that brokerName and brokerClusterName are the master's, that the master is registered, and "
                "that haMasterAddress, if set, is the master's HA port",
            )
    for name, brokers in _sets(facts).items():
        master = next((broker for broker in brokers if broker.is_master), None)
        slaves = [broker for broker in brokers if not broker.is_master]
        if master is None:
            yield _error(
                "no-master",
                name,
                "slaves are registered, but no master: no messages can be stored",
                "start the master; if it runs, check its log and namesrvAddr",
            )
        elif slaves and master.replication is not None and not master.replication.ha_connection_info:
            yield _error(
                "no-slave-connected",
                master.label,
                f"{len(slaves)} slaves are registered, but none is connected to its HA port",
                "check that slaves can reach its HA port (brokerIP2, haListenPort) and follow it (haMasterAddress)",
            )


_OTHER_LOG = "correct haMasterAddress, or compare the logs and keep one (docs/disaster-recovery.md, step 5)"
_CONDITION_CURES = {
    "connect_failed": "open the master's HA port for this slave, or correct haMasterAddress or the master's brokerIP2",
    "no_master": "set haMasterAddress, or check that brokerName is the master's and that the master is registered",
    "malformed_frame": "set mappedFileSizeCommitLog as on the master, and check that haMasterAddress is its HA port",
    "master_behind": f"it copied from a different master, or its master lost the end of its log: {_OTHER_LOG}",
    "diverged": f"its log has a different history: {_OTHER_LOG}",
    "offset_mismatch": f"its log has a different history: {_OTHER_LOG}",
    "out_of_range": "compare its log with its master's (ha status): if the master's is damaged or shorter, keep this "
    "node's store, which may have the only copy of the bytes; if the master's begins after the end of this node's, set "
    "haOutOfRange=resync, or in a failover group move this node's store aside",
    "not_authenticated": "set the same haSharedSecret on both sides",
    "housekeeping_timeout": "set the master's haSendHeartbeatInterval well below the slave's haHousekeepingInterval",
    "append_failed": "free space on its disk",
    "damaged": "its own log is damaged: run ha log verify on its store",
}


def _link_trouble(node: NodeStatus, facts: Facts) -> tuple[str, str, str]:
    link = node.link
    assert link is not None
    what = f"it does not copy its master ({link.master_address or 'unknown'}): {link.detail or link.condition}"
    cure = _CONDITION_CURES.get(link.condition, "check its log and its master's")
    if "TLS" in link.detail or "handshake" in link.detail.lower():
        cure = "set the same haTls on both sides, with certificates signed by CAs that the other side trusts"
    for broker in facts.brokers:
        is_its_port = bool(broker.ha_address) and broker.ha_address == link.master_address
        is_open_here = is_its_port and broker.ha_reach is not None and broker.ha_reach.is_open
        if is_open_here and link.condition == "connect_failed":
            cure = "the master's HA port is open from this machine: check for a firewall between the two nodes; " + cure
    return node.name, what, cure


def _nodes(facts: Facts) -> list[NodeStatus]:
    return [page.node for page in facts.admins.values() if isinstance(page, Page)]


def _roles(facts: Facts) -> _Found:
    masters: dict[str, set[str]] = defaultdict(set)
    ids: dict[tuple[str, int], set[str]] = defaultdict(set)
    clusters: dict[str, set[str]] = defaultdict(set)
    for broker in facts.brokers:
        ids[broker.name, broker.broker_id].add(broker.address)
        clusters[broker.name].add(broker.setting("brokerClusterName") or broker.cluster)
        if broker.is_master:
            masters[broker.name].add(broker.address)
        role = broker.setting("brokerRole")
        if role is not None and (role == "SLAVE") == broker.is_master:
            yield _error(
                "role",
                broker.label,
                f"brokerRole is {role}, but brokerId is {broker.broker_id}: only a master has brokerId 0",
                "set brokerId to 0 for a master, to 1 or more for a slave",
            )
    for node in _nodes(facts):
        address = node.addresses.get("remoting") or "?"
        ids[node.broker_name, node.broker_id].add(address)
        if node.cluster_name:
            clusters[node.broker_name].add(node.cluster_name)
        ids[node.broker_name, node.broker_id].update(node.duplicates)
        if node.broker_id == 0:
            masters[node.broker_name].update([address, *node.duplicates])
    for (name, broker_id), addresses in facts.duplicates.items():
        ids[name, broker_id] |= addresses
        if broker_id == 0:
            masters[name] |= addresses
    for name, addresses in masters.items():
        if len(addresses) > 1:
            yield _error(
                "two-masters",
                name,
                f"{len(addresses)} masters have this brokerName: {', '.join(sorted(addresses))}; each stores messages "
                "that the others lack, and name servers announce the one that registered last",
                "keep the one whose log you want (ha log diff shows where they diverge), stop the others, and start "
                "them as slaves or with a different brokerName",
            )
    for (name, broker_id), addresses in ids.items():
        if broker_id and len(addresses) > 1:
            yield _error(
                "same-id",
                f"{name}:{broker_id}",
                f"{len(addresses)} slaves have this brokerId: {', '.join(sorted(addresses))}",
                "give each slave a different brokerId",
            )
    for name, found in clusters.items():
        if len(found) > 1:
            yield _error(
                "cluster-name",
                name,
                f"its nodes have different cluster names: {', '.join(sorted(found))}",
                "set the same brokerClusterName on the master and its slaves",
            )


def _settings(facts: Facts) -> _Found:
    for name, brokers in _sets(facts).items():
        for key, why in _MUST_AGREE.items():
            values = {broker.label: value for broker in brokers if (value := broker.setting(key)) is not None}
            if len(set(values.values())) > 1:
                shown = "; ".join(f"{value} on {label}" for label, value in values.items())
                cure = f"set the same {key} on all nodes"
                if key == "mappedFileSizeCommitLog":
                    cure += "; the slave needs a new store"
                yield _error(f"setting-{key}", name, f"{key} is {shown}: {why}", cure)
        for one, other in combinations(brokers, 2):
            for sender, receiver in ((one, other), (other, one)):
                interval = sender.number("haSendHeartbeatInterval")
                timeout = receiver.number("haHousekeepingInterval")
                if interval is not None and timeout is not None and interval >= timeout:
                    yield _error(
                        "heartbeat",
                        receiver.label,
                        f"haHousekeepingInterval {timeout} ms is not above the haSendHeartbeatInterval {interval} ms "
                        f"of {sender.label}: an idle connection is repeatedly closed and reopened",
                        "set haHousekeepingInterval to several times haSendHeartbeatInterval",
                    )
        yield from _tls_between(brokers)
    for broker in facts.brokers:
        batch = broker.number("haTransferBatchSize")
        for key in ("haMaxGapNotInSync", "haSlaveFallbehindMax"):
            limit = broker.number(key)
            if batch is not None and limit is not None and limit < batch:
                yield _error(
                    "fall-behind",
                    broker.label,
                    f"{key} {limit} is less than one haTransferBatchSize {batch}: a slave that is one transfer behind "
                    "is not in sync, so sends return SLAVE_NOT_AVAILABLE under load",
                    f"set {key} to a large multiple of haTransferBatchSize (RocketMQ: 268435456)",
                )
                break


def _tls_between(brokers: list[BrokerFacts]) -> _Found:
    """Compares haTls of each slave with its master's."""
    for master in brokers:
        for slave in brokers:
            if not master.is_master or slave.is_master:
                continue
            asked, used = master.setting("haTls"), slave.setting("haTls")
            if (asked == "enforcing" and used in ("disabled", "permissive")) or (
                asked == "disabled" and used == "enforcing"
            ):
                yield _error(
                    "ha-tls",
                    slave.label,
                    f"its haTls is {used}, but its master's is {asked}: only one side uses TLS on the HA port",
                    "set haTls=enforcing on both, with certificates signed by CAs that the other side trusts; "
                    "permissive on the master accepts both kinds during the change",
                )


def _acknowledgement(facts: Facts) -> _Found:
    for brokers in _sets(facts).values():
        master = next((broker for broker in brokers if broker.is_master), None)
        if master is None:
            continue
        node_count = len(brokers)
        role = master.setting("brokerRole")
        needed = master.number("inSyncReplicas")
        least = master.number("minInSyncReplicas")
        # RocketMQ 5.x reports inSyncReplicas=1 by default, and sends don't wait; it follows allAckInSyncStateSet in
        # controller mode only. RocketMQ 4.9 and halog report none of the three keys by default: then a SYNC_MASTER
        # waits for one slave, and a member of a failover group for all in sync.
        waits_for_all = (
            master.setting("allAckInSyncStateSet") == "true" and master.setting("enableControllerMode") != "false"
        ) or (needed is None and bool(master.setting("etcdEndpoints")))
        needs_slave = role == "SYNC_MASTER" and not waits_for_all and (needed or (1 if least else 2)) > 1
        waits = needs_slave or (role == "SYNC_MASTER" and waits_for_all)
        cure = "start more slaves, or lower it"
        if needed is not None and needed > node_count and needs_slave:
            yield _error(
                "ack-count",
                master.label,
                f"inSyncReplicas is {needed}, but {node_count} nodes have this name: no send can return SEND_OK",
                cure,
            )
        if least is not None and least > node_count and role == "SYNC_MASTER":
            yield _error(
                "ack-minimum",
                master.label,
                f"minInSyncReplicas is {least}, but {node_count} nodes have this name: no messages can be stored",
                cure,
            )
        if needed is not None and least is not None and least > needed:
            yield _error(
                "ack-order",
                master.label,
                f"minInSyncReplicas {least} is more than inSyncReplicas {needed}",
                "set inSyncReplicas to at least minInSyncReplicas",
            )
        if needs_slave and node_count == 1 and master.status is None:  # `_pages` reports what the node itself says
            yield _error(
                "sync-alone",
                master.label,
                "it waits for a slave but has none: sends return SLAVE_NOT_AVAILABLE (RocketMQ 5.x: "
                "FLUSH_SLAVE_TIMEOUT), and messages are stored on one node only",
                "start a slave with the same brokerName, or set brokerRole=ASYNC_MASTER",
            )
        elif not waits and node_count > 1 and role is not None:
            why = "its inSyncReplicas is 1" if role == "SYNC_MASTER" else f"brokerRole is {role}"
            yield _note(
                "async",
                master.label,
                f"{why}: SEND_OK does not wait for its slaves",
                "set brokerRole=SYNC_MASTER and inSyncReplicas=2 if messages must survive the loss of the machine",
            )


def _clocks(facts: Facts) -> _Found:
    skews = {broker.label: broker.clock_ahead_s for broker in facts.brokers if broker.clock_ahead_s is not None}
    for address, page in facts.admins.items():
        if isinstance(page, Page) and page.clock_ahead_s is not None:
            remoting = page.node.addresses.get("remoting")
            if not any(broker.address == remoting for broker in facts.brokers):
                skews[f"{page.node.name} ({address})"] = page.clock_ahead_s
    if not skews:
        return
    skews["this machine"] = 0.0
    usual = median_low(skews.values())
    for label, value in skews.items():
        apart_s = value - usual
        if abs(apart_s) < CLOCK_WARNING_S:
            continue
        found = _error if abs(apart_s) >= CLOCK_ERROR_S else _warning
        yield found(
            "clock",
            label,
            f"its clock is {_about(abs(apart_s))} {'ahead of' if apart_s > 0 else 'behind'} the others'",
            "run a time service (chrony, systemd-timesyncd) on it: retention, delayed messages, search by time and "
            "transaction checks use the broker's clock",
        )


def _about(seconds: float) -> str:
    """Formats a duration in whole seconds, or in whole minutes from one minute on."""
    return duration(round(seconds / 60) * 60) if seconds >= 60 else f"{seconds:.0f} s"


def _disks(facts: Facts) -> _Found:
    for broker in facts.brokers:
        figures = broker.figures or {}
        try:
            ratio = float(figures.get("commitLogDiskRatio", ""))
        except ValueError:
            ratio = -1.0
        capacity = figures.get("commitLogDirCapacity", "")
        if ratio >= DISK_ERROR:
            yield _error(
                "disk-space",
                broker.label,
                f"the disk of its log is {ratio:.0%} full ({capacity}): it stores no more messages, or soon won't",
                "free space, lower fileReservedTime, or use a larger disk",
            )
        elif ratio >= DISK_WARNING:
            yield _warning(
                "disk-space",
                broker.label,
                f"the disk of its log is {ratio:.0%} full ({capacity}): expired files are deleted at any time",
                "free space, lower fileReservedTime, or use a larger disk",
            )
        behind = broker.figure("dispatchBehindBytes")
        if behind is not None and behind > UNDISPATCHED_MAX:
            yield _warning(
                "dispatch",
                broker.label,
                f"{size(behind)} of its log are not in a consume queue yet: consumers see them late",
                "check its disk and processor: queues and index are written more slowly than the log",
            )


def _versions(facts: Facts) -> _Found:
    versions: dict[str, list[str]] = defaultdict(list)
    for broker in facts.brokers:
        text = (broker.figures or {}).get("brokerVersionDesc")
        if broker.status is not None and broker.status.version:
            text = f"halog {broker.status.version}"
        if text:
            versions[text].append(broker.label)
    if len(versions) > 1:
        shown = "; ".join(f"{version}: {', '.join(labels)}" for version, labels in sorted(versions.items()))
        yield _warning(
            "versions",
            "the cluster",
            f"nodes run different versions: {shown}",
            "expected during an upgrade (slaves first); otherwise upgrade all to one version",
        )


def _pages(facts: Facts) -> _Found:
    """Checks what only halog's admin ports report."""
    for node in _nodes(facts):
        if not node.is_ready:
            yield _error(
                "not-ready",
                node.name,
                f"it is not ready: {node.not_ready_reason}",
                "check the other findings, or its log",
            )
        elif node.degraded_reason:
            yield _error(
                "degraded",
                node.name,
                f"sends to it are degraded: {node.degraded_reason}",
                "check the findings about its slaves and disk; start a slave with the same brokerName if it has none",
            )
        for server in node.name_servers:
            if not server.is_registered:
                yield _error(
                    "registration",
                    node.name,
                    f"it is not registered at name server {server.address}"
                    + (f": {server.error}" if server.error else ""),
                    "open that port for the node's machine, or correct namesrvAddr",
                )
        damage = node.damage.log
        if damage.open_count:
            yield _error(
                "damage",
                node.name,
                f"{damage.open_count:,} ranges of its log are damaged, {size(damage.open_bytes)}",
                "configure a peer to repair from (healFrom); see docs/corruption.md, and ha status for the ranges",
            )
        now_ms = time.time() * 1000
        for role, held in node.tls.credentials.items():
            if held.error:
                yield _error(
                    "certificate",
                    node.name,
                    f"its {role} certificate could not be reloaded: {held.error}",
                    "replace the PEM files; they are loaded without a restart",
                )
            if held.expires_at_ms is None or not (held.is_expiring or held.expires_at_ms <= now_ms):
                continue
            is_over = held.expires_at_ms <= now_ms
            end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(held.expires_at_ms / 1000))
            yield (_error if is_over else _warning)(
                "certificate",
                node.name,
                f"its {role} certificate {held.certificate} {'expired' if is_over else 'expires'} {end}",
                "renew it; new connections use the new file without a restart",
            )

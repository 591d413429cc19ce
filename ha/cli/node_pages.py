"""The status pages of a cluster's nodes, for `ha status` and `ha top`.

For nodes whose admin port can't be reached, and for RocketMQ's brokers, which have none, a page is made from what their
remoting port reports.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ha.cli.admin_pages import AdminFlags, Commitlog, MasterSide, NodeStatus, Page, Slave, SlaveSide, fetch_pages
from ha.cli.flags import LOCAL, ClusterFlags, TlsFlags
from ha.cli.nodes import BrokerFacts, Facts, gather, uptime_s

ROCKETMQ_ROLE = "MASTER"
"""Role that is shown for a master whose configuration can't be read"""
_REPORTED = (
    *("role", "broker_name", "broker_id", "is_ready", "not_ready_reason"),
    *("cluster_name", "version", "uptime_s", "addresses"),
)


class NodePages(NamedTuple):
    """Pages and errors by the address that was asked."""

    pages: dict[str, Page]
    errors: dict[str, str]
    """Address -> why a node or name server that should respond doesn't; and broker name -> what nodes it lacks"""
    tried: dict[str, str]
    """`errors`, and the same for name servers and admin ports that need not respond"""


def fetch_node_pages(cluster: ClusterFlags, admins: AdminFlags, tls: TlsFlags) -> NodePages:
    """Returns the pages of the nodes that `admins` names, by default of all that the name servers know.

    The default includes the nodes of this machine, which need not be registered. Raises UsageError if a flag is
    invalid or a file can't be used.
    """
    asked, files = admins.checked(), tls.client_tls()
    if not admins.admin:
        return pages_of(gather(cluster, admins, tls), is_default=cluster.servers == LOCAL.servers)
    return answers_of(fetch_pages(asked, admins.token(), None if files is None else files.context(), admins.timeout))


def answers_of(answers: dict[str, Page | str]) -> NodePages:
    """Separates the pages and the errors of nodes. All of these nodes should respond, so `errors` has every error."""
    errors = {address: answer for address, answer in answers.items() if isinstance(answer, str)}
    return NodePages({address: page for address, page in answers.items() if isinstance(page, Page)}, errors, errors)


def pages_of(facts: Facts, *, is_default: bool) -> NodePages:
    """Returns the pages of registered brokers in the order of cluster, name and ID, then those of other nodes.

    `is_default`: whether the name server is the default one, which need not run: its errors are then only in `tried`.
    """
    pages: dict[str, Page] = {}
    errors: dict[str, str] = {}
    for broker in facts.brokers:
        page = facts.admins.get(broker.status_address)
        if isinstance(page, Page):
            pages[broker.status_address] = page
        elif broker.figures is not None:
            pages[broker.address] = remoting_page(broker, _why_no_admin_page(facts, broker))
        else:
            errors[broker.address] = f"{broker.name}:{broker.broker_id}: {broker.error or broker.reach.detail}"
    with_master = {(broker.cluster, broker.name) for broker in facts.brokers if broker.is_master}
    for broker in facts.brokers:
        if (broker.cluster, broker.name) not in with_master:
            errors[broker.name] = "no master is registered"
    pages |= {address: page for address, page in facts.admins.items() if isinstance(page, Page)}
    servers = {each.address: f"name server: {each.detail}" for each in facts.name_servers if not each.is_open}
    servers |= {address: f"name server: {error}" for address, error in facts.name_server_errors.items()}
    tried = servers | errors | {address: page for address, page in facts.admins.items() if isinstance(page, str)}
    return NodePages(pages, errors if is_default else servers | errors, tried)


def _why_no_admin_page(facts: Facts, broker: BrokerFacts) -> str:
    """Returns why a broker's admin port gave no page; "" if the broker reports no admin port, like RocketMQ's."""
    address = broker.admin_address
    if address is None:
        return ""
    page = facts.admins.get(address)
    return f"admin port {address}: {page if isinstance(page, str) else 'belongs to another node'}"


def remoting_page(broker: BrokerFacts, why: str = "") -> Page:
    """Returns a page made from what the remoting port reported. `why`: what is wrong with the admin port, or ""."""
    end = broker.figure("commitLogMaxOffset") or 0
    behind = broker.figure("dispatchBehindBytes")
    version = (broker.figures or {}).get("brokerVersionDesc", "")
    node = NodeStatus(
        role=broker.setting("brokerRole") or ("SLAVE" if broker.broker_id else ROCKETMQ_ROLE),
        broker_name=broker.name,
        broker_id=broker.broker_id,
        is_ready=None,
        not_ready_reason=f"only its remoting port ({version}) was read" + (f"; {why}" if why else ""),
        degraded_reason=None if broker.is_master else "",
        cluster_name=broker.cluster,
        version=version,
        uptime_s=float(uptime_s(broker.figures or {}) or 0),
        addresses={"remoting": broker.address},
        commitlog=Commitlog(
            min_offset=broker.figure("commitLogMinOffset") or 0,
            max_offset=end,
            flushed_offset=None,
            dispatched_offset=None if behind is None else end - behind,
        ),
        ha=_slaves(broker),
        ha_client=_link(broker),
    )
    told = {key: getattr(node, key) for key in _REPORTED}
    told |= {"commitlog": node.commitlog, "ha": node.ha, "ha_client": node.ha_client, "read_from": "remoting"}
    return Page(msgspec.json.encode(told), node, broker.clock_ahead_s)


def _slaves(broker: BrokerFacts) -> MasterSide:
    if broker.replication is None:
        return MasterSide(explanation="this release does not report its slaves")
    return MasterSide(
        slaves=[
            Slave(
                identity=each.addr,
                state="connected",
                ack_offset=each.slave_ack_offset,
                lag_bytes=each.diff,
                is_in_sync=each.in_sync,
                transferred_bytes_per_s=each.transferred_byte_in_second,
                why_not_in_sync="" if each.in_sync else "not in sync",
            )
            for each in broker.replication.ha_connection_info
        ]
    )


def _link(broker: BrokerFacts) -> SlaveSide | None:
    if broker.is_master:
        return None
    link = None if broker.replication is None else broker.replication.ha_client_runtime_info
    return SlaveSide(
        state="unknown",
        condition="only its admin port reports it",
        master_address=None if link is None else link.master_addr,
        received_bytes_per_s=0 if link is None else link.transferred_byte_in_second,
    )

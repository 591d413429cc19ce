"""Checks that clients use all broker groups: asks each master for its topics, and the name servers for the route of one
of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import anyio

from ha.cli.doctor.findings import Finding, Weight
from ha.cli.flags import ClusterFlags, TlsFlags
from ha.cli.names import user_topics
from ha.cli.nodes import BrokerFacts, Facts, client_options
from ha.client import Admin, Client, ClientOptions
from ha.errors import HalogError
from ha.protocol.codes import Permission


def ask_topics(facts: Facts, cluster: ClusterFlags, tls: TlsFlags, timeout_s: float) -> None:
    """Sets `topics` and `is_drained` of each master that shares its cluster with other masters, unless a request to it
    fails."""
    masters = [broker for broker in facts.brokers if broker.is_master and broker.figures is not None]
    clusters = [broker.cluster for broker in masters]
    several = [broker for broker in masters if clusters.count(broker.cluster) > 1]
    if several:
        ask = partial(_ask_all, several, cluster.addresses(), client_options(cluster, tls, timeout_s), timeout_s)
        anyio.run(ask, backend="trio")


async def _ask_all(masters: list[BrokerFacts], servers: list[str], options: ClientOptions, timeout_s: float) -> None:
    async with Client(servers, options=options) as client, Admin(client) as admin, anyio.create_task_group() as tasks:
        for master in masters:
            tasks.start_soon(_ask, admin, master, masters, timeout_s)


async def _ask(admin: Admin, master: BrokerFacts, masters: list[BrokerFacts], timeout_s: float) -> None:
    try:
        with anyio.fail_after(timeout_s):
            configs = await admin.topic_configs(master.name)
            writable = [topic for topic, config in configs.items() if config.perm & Permission.WRITE]
            is_drained = False
            if writable:  # a drained broker takes messages of no topic
                route = await admin.route(writable[0])
                is_drained = all(queue.broker_name != master.name for queue in route.write_queues)
    except (HalogError, OSError, TimeoutError):
        return  # for example, access control requires the account of an admin
    master.topics = frozenset(user_topics(configs, masters))
    master.is_drained = is_drained


def examine_topics(facts: Facts) -> Iterator[Finding]:
    """Yields a finding for each broker group that clients don't use, because it is drained or has none of the topics of
    the other groups."""
    masters = [broker for broker in facts.brokers if broker.topics is not None]
    for master in masters:
        of_others = {topic for each in masters if each.cluster == master.cluster for topic in each.topics or ()}
        if master.is_drained:
            yield Finding(
                check="drained",
                weight=Weight.NOTE,
                where=master.label,
                what="its group is drained: the name servers tell producers to send to other groups",
                cure=f"stop it once ha broker drain {master.name} succeeds; ha broker undrain {master.name} keeps it",
            )
        elif of_others and not master.topics:
            yield Finding(
                check="no-topics",
                weight=Weight.WARNING,
                where=master.label,
                what=f"its group has none of the {len(of_others):,} topics of the others, so clients don't use it",
                cure=f"ha broker join {master.name}",
            )

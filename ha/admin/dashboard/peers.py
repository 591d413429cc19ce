"""Finds the names of the brokers at the other ends of this node's replication connections.

A master knows a slave's address (on loopback, only the ephemeral port distinguishes slaves) and, if the slave has sent
it, its broker ID. The slave is the first of these brokers of the set that is found: the one with this ID; the one that
reports this address as its end of the connection; if no other slave is connected from that host, the only slave there
that reports no address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .source import Neighbour


def name_peers(status: dict[str, Any], neighbours: Sequence[Neighbour]) -> None:
    """Adds `name` and `url` to the slaves and the master in the data of /status, and replaces the slaves' identities in
    its sentences with these names. `url` is "" for an unknown broker, as is `name` for an unknown master."""
    own_set = [each for each in neighbours if each.broker_name == status["broker_name"]]
    slaves = status["ha"]["slaves"]
    hosts = [_host(slave["peer"]) for slave in slaves]
    names: dict[str, str] = {}
    for slave, host in zip(slaves, hosts, strict=True):
        found = [each for each in own_set if each.broker_id == slave["broker_id"]]
        found = found or [each for each in own_set if each.ha_client_address == slave["peer"]]
        if not found and hosts.count(host) == 1:
            found = [each for each in own_set if each.broker_id and each.host == host and not each.ha_client_address]
        known = found[0] if len(found) == 1 else None
        own_name = slave["identity"] if slave["broker_id"] is None else f"{status['broker_name']}:{slave['broker_id']}"
        slave["name"] = own_name if known is None else known.name
        slave["url"] = "" if known is None else known.url
        names[slave["identity"]] = slave["name"]
    link = status["ha_client"]
    if link is not None:
        master = next((each for each in own_set if each.ha_address and each.ha_address == link["master_address"]), None)
        link["name"] = "" if master is None else master.name
        link["url"] = "" if master is None else master.url
    for told, key in ((status, "degraded_reason"), (status, "single_copy_reason"), (status["ha"], "explanation")):
        for identity, name in names.items():
            told[key] = told[key].replace(f"slave {identity} ", f"slave {name} ")


def _host(peer: str) -> str:
    return peer.rpartition(":")[0].strip("[]")

"""Evaluates the policies of one user of ACL 2.0. No I/O.

    entries     an entry matches a request if its resource covers the request's, it has one of the actions that suffice
                (All is every action), and its source addresses, if it has any, include the client's
    types       Default policies count only if no entry of the Custom policies matches
    priority    of the matching entries the most specific one decides: `Type:name`, then `Type:prefix*` (the longest
                prefix first), then `Type:*`, then `*`; among equal ones, Deny
    otherwise   the request is denied

Sources: AclAuthorizationHandler, PolicyEntry, Resource, Environment, IPAddressUtils; tests/fixtures/acl2 has a real
broker's answers. Stricter than RocketMQ: `*` is accepted only at the end of a name (`Topic:a*b*` means `Topic:a*` in
RocketMQ), and source addresses are addresses or networks in prefix notation, which match only clients of the same
address family.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import NamedTuple, TypeAlias

from ha.protocol.access_bodies import (
    ACTIONS,
    CUSTOM,
    DECISIONS,
    DENY,
    POLICY_TYPES,
    PolicyEntryInfo,
    PolicyInfo,
    known_name,
)

from .requirements import Right

ANY, CLUSTER, TOPIC, GROUP = "Any", "Cluster", "Topic", "Group"
RESOURCE_TYPES = (ANY, CLUSTER, "Namespace", TOPIC, GROUP)

LITERAL, PREFIXED, EVERY = range(3)
"""Kinds of resource patterns, the most specific first."""

_BITS = {
    "Pub": Right.PUB,
    "Sub": Right.SUB,
    "Get": Right.GET,
    "Create": Right.CREATE,
    "Update": Right.UPDATE,
    "Delete": Right.DELETE,
    "List": Right.LIST,
}
ALL_ACTIONS = sum(_BITS.values())
NO_MATCH, DENIED = "no matched policies.", "the decision is deny."

_Network: TypeAlias = IPv4Network | IPv6Network


class PolicyError(Exception):
    """A policy entry is invalid. The text is that of RocketMQ's error, if RocketMQ refuses the entry as well."""


class Resource(NamedTuple):
    """The resource of an entry. `name` is the prefix if `pattern` is PREFIXED, and "" if it is EVERY."""

    kind: str
    pattern: int
    name: str

    def covers(self, kind: str, name: str) -> bool:
        """Returns whether the entry is about the resource `name` of `kind`."""
        if self.kind == ANY:
            return True
        if self.kind != kind:
            return False
        if self.pattern == LITERAL:
            return name == self.name
        return self.pattern == EVERY or name.startswith(self.name)

    @property
    def text(self) -> str:
        """The resource as policies write it, such as `Topic:orders*`."""
        if self.kind == ANY:
            return "*"
        return f"{self.kind}:{self.name}" + ("" if self.pattern == LITERAL else "*")


class Entry(NamedTuple):
    """A parsed policy entry. `networks`: the client addresses to which it applies; None for all."""

    resource: Resource
    actions: int
    networks: tuple[_Network, ...] | None
    is_denied: bool

    def is_from(self, host: str) -> bool:
        """Returns whether the entry applies to requests from `host`."""
        if self.networks is None:
            return True
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address.version == network.version and address in network for network in self.networks)

    @property
    def priority(self) -> tuple[bool, int, int, bool]:
        """Sort key: of the matching entries, the one with the smallest key decides."""
        resource = self.resource
        length = len(resource.name) if resource.pattern == PREFIXED else 0
        return resource.kind == ANY, resource.pattern, -length, not self.is_denied


def parse_resource(text: str | None) -> Resource:
    """Returns the resource that `text` names. Raises PolicyError if it is invalid."""
    text = text or ""
    if text == "*":
        return Resource(ANY, EVERY, "")
    word, _, name = text.partition(":")
    kind = known_name(word, RESOURCE_TYPES)
    if kind is None or not text.strip():
        raise PolicyError("The resource is null.")
    if kind == ANY:
        return Resource(ANY, EVERY, "")
    pattern = LITERAL
    if name.endswith("*"):
        name = name[:-1]
        pattern = PREFIXED if name else EVERY
    if "*" in name:
        raise PolicyError(f"The resource {text!r} has a * before its end; accepted are *, Topic:*, Topic:prefix*")
    return Resource(kind, pattern, name)


def parse_actions(names: Iterable[str] | None) -> int:
    """Returns the bits of `names`; unknown names are ignored, as in RocketMQ. Raises PolicyError if no known name is
    left, or if one is Any."""
    known = {known_name(name, ACTIONS) for name in names or ()} - {None}
    if not known:
        raise PolicyError("The actions is empty.")
    if "Any" in known:
        raise PolicyError("The actions can not be Any.")
    if "All" in known:
        return ALL_ACTIONS
    return sum(_BITS[name] for name in known if name is not None)


def parse_entry(info: PolicyEntryInfo) -> Entry:
    """Returns the entry of `info`. Raises PolicyError if it is invalid."""
    resource = parse_resource(info.resource)
    actions = parse_actions(info.actions)
    networks = tuple(_network(text) for text in info.source_ips) if info.source_ips else None
    decision = known_name(info.decision, DECISIONS)
    if decision is None:
        raise PolicyError("The decision is null or illegal.")
    return Entry(resource, actions, networks, decision == DENY)


def canonical(info: PolicyEntryInfo) -> PolicyEntryInfo:
    """Returns `info` in the normalized form in which it is stored and shown. Raises PolicyError if it is invalid."""
    entry = parse_entry(info)
    return PolicyEntryInfo(
        resource=entry.resource.text,
        actions=[name for each in info.actions or () if (name := known_name(each, ACTIONS)) is not None],
        source_ips=info.source_ips or None,
        decision=known_name(info.decision, DECISIONS),
    )


def policy_type(policy: PolicyInfo) -> str:
    """Returns the type of `policy`; CUSTOM if it is missing or unknown."""
    return known_name(policy.policy_type, POLICY_TYPES) or CUSTOM


class Policies:
    """All entries of one user, by type and in order of priority."""

    __slots__ = ("_by_type",)

    def __init__(self, policies: Iterable[PolicyInfo]) -> None:
        """Parses the entries of `policies`. Raises PolicyError if one is invalid."""
        by_type: dict[str, list[Entry]] = {name: [] for name in POLICY_TYPES}
        for policy in policies:
            by_type[policy_type(policy)] += [parse_entry(info) for info in policy.entries or ()]
        self._by_type = [sorted(entries, key=lambda entry: entry.priority) for entries in by_type.values()]

    def denial(self, kind: str, name: str, actions: int, host: str) -> str:
        """Returns why `actions` (bits of `Right`, any of which suffices) on a resource are denied from `host`; "" if
        they are allowed."""
        for entries in self._by_type:
            for entry in entries:
                if entry.actions & actions and entry.resource.covers(kind, name) and entry.is_from(host):
                    return DENIED if entry.is_denied else ""
        return NO_MATCH


def _network(text: str) -> _Network:
    if not text.strip():
        raise PolicyError("The source ip is empty.")
    _, slash, length = text.partition("/")
    try:
        if slash and not (length.isascii() and length.isdigit()):
            raise ValueError
        return ip_network(text, strict=False)
    except ValueError:
        raise PolicyError("The source ip is invalid.") from None

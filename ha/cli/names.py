"""Recognizes the brokers' own topics and groups, which commands show only with --all. Also reports unknown names, and
applies a change to several brokers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Protocol, TypeVar

from cyclopts import Parameter

from ha.cli.exits import UsageError
from ha.cli.showing import safe
from ha.client import Admin
from ha.client.admin import check_masters
from ha.errors import ConnectionFailed, RouteNotFound
from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import MASTER_ID
from ha.protocol.topic_names import REPLY_SUFFIX, is_system_topic

ChangedT = TypeVar("ChangedT")
All = Annotated[
    bool, Parameter(name="--all", negative=(), help="Include system, retry and dead-letter topics, and system groups.")
]

_NAMES_SHOWN_MAX = 10
_GROUP_PREFIX = "CID_RMQ_SYS_"
_GROUPS = frozenset(
    {
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_PULL",
        "CID_ONS-HTTP-PROXY",
        "CLIENT_INNER_PRODUCER",
        "DEFAULT_CONSUMER",
        "DEFAULT_PRODUCER",
        "FILTERSRV_CONSUMER",
        "SCHEDULE_CONSUMER",
        "SELF_TEST_C_GROUP",
        "SELF_TEST_P_GROUP",
        "TOOLS_CONSUMER",
        "__MONITOR_CONSUMER",
    }
)
"""RocketMQ's predefined groups (MixAll.PREDEFINE_GROUP_SET), without those that have _GROUP_PREFIX"""


class NamedBroker(Protocol):
    """A broker as the name servers know it."""

    @property
    def cluster(self) -> str:
        """Name of the broker's cluster."""

    @property
    def name(self) -> str:
        """Name of the broker."""


def user_topics(topics: Iterable[str], brokers: Iterable[NamedBroker]) -> list[str]:
    """Returns the topics that are not the brokers' own: neither system topics, nor those that a broker creates with its
    own name or its cluster's name."""
    names = {name for broker in brokers for name in (broker.name, broker.cluster, broker.cluster + REPLY_SUFFIX)}
    return [topic for topic in topics if topic not in names and not is_system_topic(topic)]


def user_groups(groups: Iterable[str]) -> list[str]:
    """Returns the groups that are not the brokers' own."""
    return [group for group in groups if group not in _GROUPS and not group.startswith(_GROUP_PREFIX)]


async def check_brokers(admin: Admin, names: Iterable[str]) -> None:
    """Raises UsageError for the first name that no broker has."""
    known = sorted({broker.name for broker in await admin.brokers()})
    for name in names:
        if name not in known:
            more = f" and {len(known) - _NAMES_SHOWN_MAX} more" if len(known) > _NAMES_SHOWN_MAX else ""
            shown = ", ".join(known[:_NAMES_SHOWN_MAX]) or "none"
            raise UsageError(f"no broker {safe(name)}; known brokers: {safe(shown)}{more}")


async def change_brokers(
    admin: Admin, names: Sequence[str], change: Callable[[str], Awaitable[ChangedT]]
) -> list[ChangedT]:
    """Calls `change` for each broker in `names`; if `names` is empty, for every broker that has a master. Returns the
    results.

    Raises UsageError, before any change, if a name is unknown. If `names` is empty, raises ConnectionFailed if there is
    no broker, or, after the others were changed, if a broker has no master.
    """
    await check_brokers(admin, names)
    if names:
        return [await change(name) for name in names]
    brokers = await admin.brokers()
    changed = [await change(broker.name) for broker in brokers if MASTER_ID in broker.addresses]
    check_masters(brokers)
    return changed


async def without_master(admin: Admin) -> list[str]:
    """Returns the names of the broker sets that have no master. What they hold is missing in the answers of `admin`."""
    return [broker.name for broker in await admin.brokers() if MASTER_ID not in broker.addresses]


async def find_group(admin: Admin, group: str) -> GroupConfig:
    """Returns the settings of a group.

    Raises UsageError if no broker has it; ConnectionFailed if no master has it, and a broker set has no master.
    """
    groups = await admin.groups()
    if group not in groups:
        if unasked := await without_master(admin):
            raise ConnectionFailed(
                ", ".join(unasked), f"no master is registered, and no other broker has group {group}"
            )
        raise UsageError(f"no consumer group {safe(group)}; ha group list shows the groups, ha group create adds one")
    return groups[group]


def explain_missing_topic(error: RouteNotFound) -> str:
    """Returns a message that says that no broker has the topic, and what to do."""
    return f"no topic {safe(error.topic)}; ha topic list shows the topics, ha topic create adds one"

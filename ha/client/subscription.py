"""Subscriptions: which messages of a topic a consumer receives, by tags or by an SQL92 condition on properties.

Sources: FilterAPI.buildSubscriptionData, SubscriptionData.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ha.protocol.bodies import SubscriptionData
from ha.protocol.properties import java_hash

TAG = "TAG"
SQL92 = "SQL92"
EVERYTHING = "*"


class Sql92(msgspec.Struct, frozen=True):
    """Selects messages whose properties satisfy `condition`, e.g. "region = 'EU' AND amount > 100". Brokers evaluate
    the condition; they need enablePropertyFilter=true."""

    condition: str


def subscription_data(topic: str, wanted: str | Sql92, version: int) -> SubscriptionData:
    """Returns the subscription as sent to brokers. `version`, a time in ms, must be greater after each change.

    `wanted`: "*", tags joined by "||", or Sql92. Raises ValueError for an empty condition, or an expression without a
    tag."""
    if isinstance(wanted, Sql92):
        if not wanted.condition.strip():
            raise ValueError(f"topic {topic}: an SQL92 condition may not be empty")
        return SubscriptionData(topic=topic, sub_string=wanted.condition, expression_type=SQL92, sub_version=version)
    tags = wanted_tags(wanted)
    if tags is None:
        return SubscriptionData(topic=topic, sub_string=EVERYTHING, sub_version=version)
    return SubscriptionData(
        topic=topic,
        sub_string=wanted,
        tags_set=sorted(tags),
        code_set=sorted({java_hash(tag) for tag in tags}),
        sub_version=version,
    )


def checked_subscriptions(
    group: str, subscriptions: Mapping[str, str | Sql92], version: int
) -> dict[str, SubscriptionData]:
    """Returns the subscription to each topic. Raises ValueError without a group or a topic, or if the group's name
    can't be encoded as UTF-8, and the errors of `subscription_data`."""
    if not subscriptions:
        raise ValueError("subscriptions: name at least one topic")
    if not group:
        raise ValueError("group: a consumer is a member of one")
    group.encode()
    return {topic: subscription_data(topic, wanted, version) for topic, wanted in subscriptions.items()}


def wanted_tags(expression: str) -> frozenset[str] | None:
    """Returns the tags in a tag expression; None if it matches all messages ("*" or blank). Raises ValueError if it has
    no tag."""
    if expression.strip() in ("", EVERYTHING):
        return None
    tags = frozenset(filter(None, map(str.strip, expression.split("||"))))
    if not tags:
        raise ValueError(f"{expression!r} names no tag; accepted: '*', or tags joined by '||'")
    return tags

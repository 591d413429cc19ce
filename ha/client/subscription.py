"""What a consumer wants of a topic: tags, or an SQL92 condition on properties.

Sources: FilterAPI.buildSubscriptionData, SubscriptionData.
"""

from __future__ import annotations

import msgspec

from ha.protocol.bodies import SubscriptionData
from ha.protocol.properties import java_hash

TAG = "TAG"
SQL92 = "SQL92"
EVERYTHING = "*"


class Sql92(msgspec.Struct, frozen=True):
    """Messages whose properties fulfil `condition`, e.g. "region = 'EU' AND amount > 100"; the broker decides.

    RocketMQ's brokers need enablePropertyFilter=true for it."""

    condition: str


def subscription_data(topic: str, wanted: str | Sql92, version: int) -> SubscriptionData:
    """The subscription as brokers are told it. `version` (ms) grows when the subscription changes.

    `wanted`: "*", tags joined by "||", or Sql92. ValueError for an empty condition."""
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


def wanted_tags(expression: str) -> frozenset[str] | None:
    """The tags that a tag expression names; None if it takes all messages. ValueError if it names none."""
    if expression.strip() in ("", EVERYTHING):
        return None
    tags = frozenset(filter(None, map(str.strip, expression.split("||"))))
    if not tags:
        raise ValueError(f"{expression!r} names no tag; accepted: '*', or tags joined by '||'")
    return tags

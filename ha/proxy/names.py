"""Checks the names of topics and groups in calls."""

from __future__ import annotations

import re
from typing import Any

from ha.protocol.topic_names import (
    DLQ_PREFIX,
    INTERNAL_TOPICS,
    NAME_SIZE_MAX,
    RETRY_PREFIX,
    SYSTEM_TOPIC_PREFIX,
    TRACE_TOPIC,
)

from .messages import Code
from .refusal import CallRefused

TOPIC_LENGTH_MAX = 127
"""Maximum length of a topic's name in characters; NAME_SIZE_MAX for retry and dead-letter topics."""
_VALID = re.compile(r"[%|a-zA-Z0-9_-]+")
_SYSTEM_TOPICS = INTERNAL_TOPICS | {"TBW102", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "BenchmarkTest", TRACE_TOPIC}


def resource_name(resource: Any) -> str:
    """Returns a resource's name as brokers know it: `namespace%name`, after the prefix of a retry or dead-letter topic;
    the name alone if there is no namespace. The name may already contain the namespace."""
    namespace, name = resource.resource_namespace, str(resource.name)
    if not namespace or not name:
        return name
    prefix = next((prefix for prefix in (RETRY_PREFIX, DLQ_PREFIX) if name.startswith(prefix)), "")
    rest = name.removeprefix(prefix)
    return name if rest.startswith(f"{namespace}%") else f"{prefix}{namespace}%{rest}"


def topic_name(resource: Any) -> str:
    """Returns a topic's name as brokers know it. Raises CallRefused (ILLEGAL_TOPIC) if it is invalid, too long, or that
    of a system topic."""
    name = resource_name(resource)
    length_max = NAME_SIZE_MAX if name.startswith((RETRY_PREFIX, DLQ_PREFIX)) else TOPIC_LENGTH_MAX
    if _VALID.fullmatch(name) is None:
        raise CallRefused(Code.ILLEGAL_TOPIC, f"topic {name[:80]!r} is empty or not of the form ^[%|a-zA-Z0-9_-]+$")
    if len(name) > length_max:
        raise CallRefused(Code.ILLEGAL_TOPIC, f"topic of {len(name)} characters; at most {length_max}")
    if name in _SYSTEM_TOPICS or name.startswith(SYSTEM_TOPIC_PREFIX):
        raise CallRefused(Code.ILLEGAL_TOPIC, f"cannot access system topic: {name}")
    return name


def group_name(resource: Any) -> str:
    """Returns a consumer group's name as brokers know it. Raises CallRefused (ILLEGAL_CONSUMER_GROUP) if it is invalid
    or too long."""
    name = resource_name(resource)
    if _VALID.fullmatch(name) is None:
        raise CallRefused(
            Code.ILLEGAL_CONSUMER_GROUP, f"group {name[:80]!r} is empty or not of the form ^[%|a-zA-Z0-9_-]+$"
        )
    if len(name) > NAME_SIZE_MAX:
        raise CallRefused(Code.ILLEGAL_CONSUMER_GROUP, f"group of {len(name)} characters; at most {NAME_SIZE_MAX}")
    return name

"""Parses the sink's options, once on the driver, into the struct that tasks get."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ha.client import SendStatus
from ha.errors import OptionError
from ha.spark.option_values import GivenOptions, Table, count, known_option, seconds, servers, size, topic_name, words
from ha.spark.sink.identity import check_sink_name

COMMIT_TOPIC = "halog-sink-commits"
_BATCH_BYTES_MAX = 4 * 1024 * 1024 - 64 * 1024
"""Maximum of batchBytes: brokers accept requests up to maxMessageSize (4 MiB)"""
_SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a sink. Limits apply to one task; `batch_…` to one request."""

    servers: tuple[str, ...]
    topic: str | None = None
    """Topic of rows without a topic"""
    producer_group: str = "halog-sink"
    batch_row_count: int = 256
    batch_bytes: int = 512 * 1024
    in_flight: int = 4
    """Maximum number of concurrent requests of a task"""
    send_timeout_s: float = 60.0
    """Timeout for storing a request, repetitions included"""
    accepted: frozenset[SendStatus] = frozenset({SendStatus.SEND_OK})
    """Statuses that count as stored safely enough for a commit"""
    sink_id: str | None = None
    commit_topic: str = COMMIT_TOPIC


def _statuses(option: str, text: str) -> frozenset[SendStatus]:
    accepted = {SendStatus.SEND_OK}
    for word in words(option, text.upper()):
        if word not in SendStatus.__members__:
            raise OptionError(option, f"{word!r} is no status", ", ".join(SendStatus.__members__))
        accepted.add(SendStatus[word])
    return frozenset(accepted)


_VALUES: Table = {
    "servers": ("servers", servers),
    "topic": ("topic", topic_name),
    "producerGroup": ("producer_group", topic_name),
    "batchSize": ("batch_row_count", count(most=10_000)),
    "batchBytes": ("batch_bytes", size(1024, _BATCH_BYTES_MAX, f"1024 to {_BATCH_BYTES_MAX} bytes, such as 512k")),
    "inFlight": ("in_flight", count(most=256)),
    "sendTimeout": ("send_timeout_s", seconds(1, 86_400, "1s to 24 h, such as 30s or 2m (alone: ms)")),
    "acceptStatus": ("accepted", _statuses),
    "sinkId": ("sink_id", lambda _, text: check_sink_name(text)),
    "commitTopic": ("commit_topic", topic_name),
}
_OPTIONS = {name.lower(): name for name in _VALUES}


def parse_sink_options(raw: Mapping[str, str]) -> SinkOptions:
    """Parses the options, whose names may be in any case. Raises OptionError for an unknown or invalid one, or if
    `servers` is missing."""
    if any(key.lower() == "path" for key in raw):
        raise OptionError("path", "the sink sends to brokers, it writes no files", "servers, and save() or start()")
    own = {key: value for key, value in raw.items() if key.lower() not in _SPARKS_OWN}
    given = GivenOptions({known_option(key, _OPTIONS, "the sink"): value for key, value in own.items()})
    if "servers" not in given:
        raise OptionError("servers", "it is missing", "name servers as host:port, separated by commas")
    return SinkOptions(**given.fields(_VALUES))

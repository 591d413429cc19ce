"""The sink's options, parsed once on the driver into the struct that tasks get."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

import msgspec

from ha.client import SendStatus
from ha.client.options import name_server_addresses
from ha.errors import OptionError
from ha.spark.sink.identity import check_sink_name

COMMIT_TOPIC = "halog-sink-commits"
_BATCH_BYTES_MAX = 4 * 1024 * 1024 - 64 * 1024
"""Brokers accept requests up to maxMessageSize (4 MiB)"""
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_TIME = re.compile(r"(\d{1,9})\s*(ms|s|m|min)?")
_TIME_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, None: 0.001}
_SIZE = re.compile(r"(\d{1,12})\s*(k|kb|m|mb|b)?")
_SIZE_BYTES = {"k": 1024, "kb": 1024, "m": 1 << 20, "mb": 1 << 20, "b": 1, None: 1}
_OPTIONS = {
    name.lower(): name
    for name in (
        "servers",
        "topic",
        "producerGroup",
        "batchSize",
        "batchBytes",
        "inFlight",
        "sendTimeout",
        "acceptStatus",
        "sinkId",
        "commitTopic",
    )
}
_SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a sink. Limits apply to one task; `batch_…` to one request."""

    servers: tuple[str, ...]
    topic: str | None = None
    """For rows without a topic"""
    producer_group: str = "halog-sink"
    batch_row_count: int = 256
    batch_bytes: int = 512 * 1024
    in_flight: int = 4
    """Concurrent requests of a task"""
    send_timeout_s: float = 60.0
    """Timeout for storing a request, repetitions included"""
    accepted: frozenset[SendStatus] = frozenset({SendStatus.SEND_OK})
    """Statuses that count as stored safely enough for a commit"""
    sink_id: str | None = None
    commit_topic: str = COMMIT_TOPIC


def parse_sink_options(raw: Mapping[str, str]) -> SinkOptions:
    """Parse the options; names in any case. OptionError for the first invalid one."""
    given: dict[str, str] = {}
    for key, value in raw.items():
        lower = key.lower()
        if lower in _SPARKS_OWN:
            continue
        if lower == "path":
            raise OptionError("path", "the sink sends to brokers, it writes no files", "servers, and save() or start()")
        if lower not in _OPTIONS:
            close = difflib.get_close_matches(lower, _OPTIONS, n=1, cutoff=0.75)
            hint = f"did you mean {_OPTIONS[close[0]]}? All: " if close else ""
            raise OptionError(key, "no option of the sink has this name", hint + ", ".join(_OPTIONS.values()))
        given[_OPTIONS[lower]] = str(value).strip()
    if "servers" not in given:
        raise OptionError("servers", "it is missing", "name servers as host:port, separated by commas")
    try:
        servers = name_server_addresses(given["servers"])
    except ValueError as error:
        raise OptionError("servers", str(error), "name servers as host:port, separated by commas") from None
    chosen: dict[str, object] = {}
    if "topic" in given:
        chosen["topic"] = _topic("topic", given["topic"])
    if "commitTopic" in given:
        chosen["commit_topic"] = _topic("commitTopic", given["commitTopic"])
    if "producerGroup" in given:
        chosen["producer_group"] = _topic("producerGroup", given["producerGroup"])
    if "sinkId" in given:
        chosen["sink_id"] = check_sink_name(given["sinkId"])
    if "batchSize" in given:
        chosen["batch_row_count"] = _count("batchSize", given["batchSize"], 10_000)
    if "inFlight" in given:
        chosen["in_flight"] = _count("inFlight", given["inFlight"], 256)
    if "batchBytes" in given:
        chosen["batch_bytes"] = _size(given["batchBytes"])
    if "sendTimeout" in given:
        chosen["send_timeout_s"] = _seconds(given["sendTimeout"])
    if "acceptStatus" in given:
        chosen["accepted"] = _statuses(given["acceptStatus"])
    return SinkOptions(servers=servers, **chosen)  # type: ignore[arg-type]


def _topic(option: str, value: str) -> str:
    if _TOPIC.fullmatch(value) is None:
        raise OptionError(option, f"{value!r} can't be one", "1 to 127 of A-Z a-z 0-9 _ - % |")
    return value


def _count(option: str, value: str, most: int) -> int:
    if re.fullmatch(r"\d{1,6}", value) is None or not 1 <= int(value) <= most:
        raise OptionError(option, f"{value!r} is not such a number", f"1 to {most}")
    return int(value)


def _size(value: str) -> int:
    found = _SIZE.fullmatch(value.lower())
    size = int(found[1]) * _SIZE_BYTES[found[2]] if found else 0
    if not 1024 <= size <= _BATCH_BYTES_MAX:
        raise OptionError(
            "batchBytes",
            f"{value!r} is no such size",
            f"1024 to {_BATCH_BYTES_MAX} bytes, such as 512k",
        )
    return size


def _seconds(value: str) -> float:
    found = _TIME.fullmatch(value.lower())
    seconds = int(found[1]) * _TIME_S[found[2]] if found else 0.0
    if not 1 <= seconds <= 86_400:
        raise OptionError("sendTimeout", f"{value!r} is no such time", "1s to 24 h, such as 30s or 2m (alone: ms)")
    return seconds


def _statuses(value: str) -> frozenset[SendStatus]:
    accepted = {SendStatus.SEND_OK}
    for word in filter(None, (part.strip().upper() for part in value.split(","))):
        if word not in SendStatus.__members__:
            raise OptionError("acceptStatus", f"{word!r} is no status", ", ".join(SendStatus.__members__))
        accepted.add(SendStatus[word])
    return frozenset(accepted)

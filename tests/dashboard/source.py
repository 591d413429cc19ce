"""A source with fixed answers, for tests that need no node."""

from collections.abc import Mapping, Sequence

from ha.admin.dashboard.source import (
    Counts,
    FoundMessages,
    GroupDetail,
    Groups,
    MessageDetail,
    MessageLine,
    Missing,
    Neighbour,
    QueuePart,
    TopicDetail,
    Topics,
)

BODY = b"what a message says"
KEY = "what it is found by"

LINE = MessageLine(
    topic="t",
    queue_id=0,
    queue_offset=0,
    physical_offset=0,
    message_size=200,
    body_size=len(BODY),
    store_timestamp_ms=1,
    unique_id="",
    tags="",
    keys=KEY,
    body_begin=BODY,
    is_body_cut=False,
)


def slave(identity: str, acknowledged: int, end: int) -> dict[str, object]:
    """A slave in the form of /status."""
    return {
        "identity": identity, "peer": identity, "state": "transfer", "request_offset": 0, "start_offset": 0,
        "transfer_offset": end, "ack_offset": acknowledged, "lag_bytes": end - acknowledged, "is_in_sync": True,
        "transferred_bytes": 0, "transferred_bytes_per_s": 0, "connected_s": 1.0, "last_report_age_s": 0.1,
        "broker_id": None, "why_not_in_sync": "",
    }  # fmt: skip


def neighbour(broker_id: int, **differs: str) -> Neighbour:
    """A broker of the same name as the node of `Source`."""
    told = {"host": "127.0.0.1", "url": "", "ha_address": "", "ha_client_address": "", **differs}
    return Neighbour(broker_name="b", broker_id=broker_id, **told)


class Source:
    """What a node would answer. `status_count`: how often it was asked what /status shows."""

    def __init__(self, *, is_content_open: bool = True) -> None:
        self.is_content_open = is_content_open
        self.status_count = 0
        self.end = 0
        self.stored_count = 0
        self.slaves: list[dict[str, object]] = []
        self.other_brokers: list[Neighbour] = []

    def status(self) -> Mapping[str, object]:
        self.status_count += 1
        return {
            "version": "1", "role": "ASYNC_MASTER", "cluster_name": "c", "broker_name": "b", "broker_id": 0,
            "is_ready": True, "not_ready_reason": "", "degraded_reason": "", "single_copy_reason": "", "uptime_s": 1.0,
            "commitlog": {"min_offset": 0, "max_offset": self.end},
            "store": {"segment_count": 1, "disk_used_ratio": 0.5},
            "timers": {"pending_count": 0, "next_due_ms": None, "due_counts": {}},
            "damage": {"log": {"open_count": 0, "open_bytes": 0, "open": [], "healed_count": 0}, "verified_bytes": 0},
            "ha": {"in_sync": 0, "slave_count": 0, "push2_slave_max_offset": 0, "waiting_request_count": 0,
                   "closed_counts": {}, "had_slave": False, "explanation": "", "slaves": self.slaves},
            "ha_client": None, "member": None, "name_servers": [], "events": [],
        }  # fmt: skip

    def neighbours(self) -> Sequence[Neighbour]:
        return self.other_brokers

    def counts(self) -> Counts:
        return Counts(self.stored_count, 0)

    async def topics(self, search: str, *, with_system: bool, begin: int, count: int) -> Topics:
        return Topics([], 0)

    async def topic(self, name: str, *, begin: int, count: int, at_ms: int | None = None) -> TopicDetail | Missing:
        return Missing("none")

    async def queue(self, topic: str, queue_id: int, queue_offset: int, count: int) -> QueuePart | Missing:
        return Missing("none")

    async def offset_at(self, topic: str, queue_id: int, at_ms: int) -> int | Missing:
        return Missing("none")

    async def with_key(self, topic: str, key: str, count: int) -> FoundMessages:
        return FoundMessages([LINE], is_cut=False)

    async def with_key_anywhere(self, key: str, count: int) -> FoundMessages:
        return FoundMessages([LINE] if key == KEY else [], is_cut=False)

    async def topic_names(self, count: int) -> Sequence[str]:
        return ["t"][:count]

    async def message(self, physical_offset: int, body_size_max: int) -> MessageDetail | Missing:
        return MessageDetail(
            line=LINE,
            message_id="id",
            born_timestamp_ms=1,
            born_host="h:1",
            store_host="h:2",
            flag=0,
            system_flags=[],
            reconsume_times=0,
            prepared_transaction_offset=0,
            body_crc=0,
            is_body_sound=True,
            properties={"KEYS": KEY},
            body=BODY,
            is_body_cut=False,
            body_note="",
            queue=None,
        )

    async def message_by_id(self, message_id: str) -> int | Missing:
        return Missing("none")

    async def groups(self, search: str, *, begin: int, count: int) -> Groups:
        return Groups([], 0)

    async def group(self, name: str, *, topic_count_max: int, queue_count_max: int) -> GroupDetail | Missing:
        return Missing("none")

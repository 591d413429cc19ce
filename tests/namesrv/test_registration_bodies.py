"""What a name server reads of a registration's body, directly or in a worker."""

import json
from typing import Any

import pytest

from ha.errors import RemoteProtocolError
from ha.namesrv.registrations import UNUSUAL_SIZE_MAX, Topics, read_unusual, read_usual
from ha.protocol.bodies import DataVersion
from tests.namesrv.brokers import VERSION, compressed_body, register_body, topic_json

USUAL = register_body(["T1", topic_json("T2", queues=8, perm=4)])
REFERENCE = b'{"$ref":"$.topicConfigSerializeWrapper.dataVersion"}'


def text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def wrapped(**wrapper: Any) -> bytes:
    return text({"topicConfigSerializeWrapper": wrapper})


def queues(topics: Topics) -> dict[str, tuple[int, int, int, int]]:
    return {
        name: (each.perm, each.read_queue_nums, each.write_queue_nums, each.topic_sys_flag)
        for name, each in topics.items()
    }


BODIES = {
    "RocketMQ 5": (USUAL, True),
    "of this project": (USUAL.replace(REFERENCE, b"null"), True),
    "no version, and the defaults of a topic": (wrapped(topicConfigTable={"T1": {}, "T2": {"perm": 4}}), True),
    "numbers as strings": (wrapped(topicConfigTable={"T1": {"perm": "4", "readQueueNums": "3"}}), True),
    "nothing": (b"{}", True),
    "a topic by reference": (
        wrapped(topicConfigTable={"T1": topic_json("T1"), "T2": {"$ref": "$.topicConfigSerializeWrapper.x"}}, x={}),
        False,
    ),
    "attributes by reference": (
        wrapped(
            topicConfigTable={
                "T1": topic_json("T1"),
                "T2": {"attributes": {"$ref": "$.topicConfigSerializeWrapper.topicConfigTable.T1.attributes"}},
            }
        ),
        False,
    ),
    "bare integer keys": (USUAL.replace(b'"topicQueueMappingInfoMap":{}', b'"topicQueueMappingInfoMap":{1:2}'), False),
    "text in two lines": (json.dumps(json.loads(USUAL), indent=1).encode(), False),
}


@pytest.mark.parametrize(("body", "is_usual"), BODIES.values(), ids=BODIES)
def test_both_ways_of_reading_find_the_same(body: bytes, is_usual: bool) -> None:
    usual = read_usual(memoryview(body))
    assert (usual is not None) == is_usual
    version, topics = read_unusual(body, is_compressed=False, topic_count_max=10)
    if usual is not None:
        assert (usual[0], queues(usual[1])) == (version, queues(topics))


def test_what_is_found() -> None:
    usual = read_usual(USUAL)
    assert usual is not None
    assert usual[0] == DataVersion(counter=VERSION["counter"], timestamp=VERSION["timestamp"])
    assert queues(usual[1]) == {"T1": (6, 4, 4, 0), "T2": (4, 8, 8, 0)}


def test_a_compressed_body() -> None:
    version, topics = read_unusual(compressed_body(["T1", "T2"]), is_compressed=True, topic_count_max=2)
    assert version.counter == VERSION["counter"]
    assert queues(topics) == {"T1": (6, 4, 4, 0), "T2": (6, 4, 4, 0)}
    with pytest.raises(RemoteProtocolError, match="2 topics; at most 1"):
        read_unusual(compressed_body(["T1", "T2"]), is_compressed=True, topic_count_max=1)


TOO_LARGE = wrapped(topicConfigTable={"T1": {"writeQueueNums": 2**31}})
"""Java's clients could not read a route with such a number."""


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"topicConfigSerializeWrapper":5}', b"\xff", b'{"a":"\\ud800"}', TOO_LARGE],
)
def test_an_invalid_body_is_left_to_the_worker(body: bytes) -> None:
    assert read_usual(body) is None
    with pytest.raises(RemoteProtocolError):
        read_unusual(body, is_compressed=False, topic_count_max=10)


def test_unusual_text_is_limited() -> None:
    body = b'{"x":{1:2},"y":"' + bytes(UNUSUAL_SIZE_MAX) + b'"}'
    with pytest.raises(RemoteProtocolError, match="not standard JSON"):
        read_unusual(body, is_compressed=False, topic_count_max=10)

"""Headers of requests that lack a field, or have one of another type: the answer names it."""

import pytest

from ha.protocol.bodies import LIST_SIZE_MAX, REQUEST_SIZE_MAX
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import PULL, SEND_V1, SEND_V2, Node, text

HEADERS: dict[int, dict[str, object]] = {
    10: {**SEND_V1, "properties": "", "reconsumeTimes": 0},
    310: SEND_V2,
    320: {**SEND_V2, "m": True},
    11: PULL,
    361: PULL,
    14: {"consumerGroup": "g", "topic": "TT", "queueId": 0},
    15: {"consumerGroup": "g", "topic": "TT", "queueId": 0, "commitOffset": 0},
    29: {"topic": "TT", "queueId": 0, "timestamp": 0},
    30: {"topic": "TT", "queueId": 0},
    31: {"topic": "TT", "queueId": 0},
    32: {"topic": "TT", "queueId": 0},
    34: {},
    35: {"clientID": "c", "producerGroup": "", "consumerGroup": "g"},
    38: {"consumerGroup": "g"},
    21: {},
    43: {},
    201: {},
    907: {},
}
REQUIRED = {
    10: list(SEND_V1),
    310: list("abcdefgh"),
    320: list("abcdefgh"),
    11: [name for name in PULL if name != "subscription"],
    14: ["consumerGroup", "topic", "queueId"],
    15: ["consumerGroup", "topic", "queueId", "commitOffset"],
    29: ["topic", "queueId", "timestamp"],
    30: ["topic", "queueId"],
    31: ["topic", "queueId"],
    32: ["topic", "queueId"],
    38: ["consumerGroup"],
}
INTEGERS = {"queueId", "sysFlag", "d", "e", "f", "g", "h", "bornTimestamp", "queueOffset", "commitOffset", "timestamp"}


@pytest.mark.parametrize("code", REQUIRED)
async def test_missing_and_ill_typed_fields(node: Node, code: int) -> None:
    for name in REQUIRED[code]:
        fields = {key: text(value) for key, value in HEADERS[code].items()}
        variants = [{key: value for key, value in fields.items() if key != name}]
        if name in INTEGERS:
            variants += [{**fields, name: value} for value in ("", "x", "1.5", "9" * 30)]
        for ext_fields in variants:
            command = RemotingCommand(code, ext_fields=ext_fields, body=b"body")
            answer = await node.client.invoke("broker", command, 10)
            assert answer.code == 1, ext_fields
            assert answer.remark
            assert name in answer.remark


@pytest.mark.parametrize(
    ("code", "size_max"),
    [(46, REQUEST_SIZE_MAX), (400, REQUEST_SIZE_MAX), (401, REQUEST_SIZE_MAX), (200151, LIST_SIZE_MAX)],
)
async def test_large_bodies_are_refused(node: Node, code: int, size_max: int) -> None:
    answer = await node.ask(code, b"[" * (size_max + 1))
    assert answer.code == 1
    assert f"at most {size_max}" in (answer.remark or "")

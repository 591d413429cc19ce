"""Arbitrary headers and bodies of requests: every request is answered, and nothing breaks."""

import tempfile
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from ha.protocol.remoting import RemotingCommand
from tests.broker.node import PULL, SEND_V1, SEND_V2, Node, open_node, text

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
async def test_missing_and_ill_typed_fields(node: Node, autojump_clock: object, code: int) -> None:
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


VALUES = st.one_of(
    st.integers(-(1 << 64), 1 << 64).map(str),
    st.sampled_from(
        ["-1", "0", "1", "2147483647", "9223372036854775807", "true", "%RETRY%", "%RETRY%g", "TBW102", "*", "||"]
    ),
    st.text(max_size=20),
    st.text(alphabet="\x01\x02abWAITDELY=", max_size=30),
)


@st.composite
def requests(draw: st.DrawFn) -> RemotingCommand:
    code = draw(st.sampled_from(list(HEADERS)))
    ext_fields = {key: text(value) for key, value in HEADERS[code].items()}
    for name in draw(st.lists(st.sampled_from(sorted(ext_fields)), max_size=3) if ext_fields else st.just([])):
        ext_fields[name] = draw(VALUES)
    ext_fields.update(draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)))
    if "suspendTimeoutMillis" in ext_fields:
        ext_fields["suspendTimeoutMillis"] = "1000"
    body = draw(st.one_of(st.binary(max_size=60), st.just(b'{"clientID":"c","consumerDataSet":[{}]}')))
    return RemotingCommand(code, ext_fields=ext_fields, body=body, serialize_type=draw(st.sampled_from([0, 1])))


@given(st.lists(requests(), min_size=10, max_size=40))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_request_is_answered(commands: list[RemotingCommand]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_node(Path(folder)) as node:
                for command in commands:
                    answer = await node.client.invoke("broker", command, 200)
                    assert answer.is_response
                    assert answer.code in {0, 10, 11, 12} or answer.remark, (command, answer)

    trio.run(main, clock=MockClock(autojump_threshold=0))

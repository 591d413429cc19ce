"""Random admin requests: each is answered, and valid ones still work afterwards."""

import json
import tempfile
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import open_node

ADMIN_CODES = (
    *(12, 17, 25, 26, 28, 33, 200, 202, 203, 204, 207, 208, 215, 222, 223, 225, 300, 303, 305, 306, 307, 308, 309),
    *(314, 315, 316, 317, 321, 328, 329, 343, 345, 351, 352, 906),
)
GOOD = {
    "topic": "TT",
    "group": "g",
    "consumerGroup": "g",
    "producerGroup": "g",
    "groupName": "g",
    "queueId": "0",
    "offset": "0",
    "index": "0",
    "count": "5",
    "timestamp": "0",
    "isForce": "true",
    "key": "k",
    "maxNum": "9",
    "beginTimestamp": "0",
    "endTimestamp": "9223372036854775807",
    "readQueueNums": "2",
    "writeQueueNums": "2",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": "0",
    "order": "false",
    "attributes": "",
    "cleanOffset": "true",
    "clientAddr": "",
    "clientId": "c",
    "msgId": "0A00000100002A9F0000000000000000",
    "srcGroup": "g",
    "destGroup": "h",
    "offline": "true",
    "statsName": "TOPIC_PUT_NUMS",
    "statsKey": "TT",
    "isOrder": "false",
    "compareGroup": "g",
    "filterGroups": "",
}
NAMES = st.sampled_from([*GOOD, "topicList", "masterHaAddress", "defaultTopic", "_UNIQUE_KEY_QUERY"])
VALUES = st.one_of(
    st.sampled_from(
        [
            *("", "0", "1", "-1", "4", "true", "false", "TT", "g", "T2", "%RETRY%g", "TBW102", "9223372036854775807"),
            *("²", "-9223372036854775808", "+message.type=FIFO", "-x", "GROUP_GET_NUMS", "TT@g", "2147483647"),
        ]
    ),
    st.text(max_size=4),
)
BODIES = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(
        [
            b"{}",
            b"null",
            b"[]",
            b'{"groupName":"g2"}',
            b'{"groupConfigList":[{"groupName":"g3"}]}',
            b"a=b\nbrokerName=b0\n",
        ]
    ),
)
REQUESTS = st.builds(
    lambda code, good, fields, body, serialize_type: RemotingCommand(
        code, ext_fields=good | fields, body=body, version=479, serialize_type=serialize_type
    ),
    st.sampled_from(ADMIN_CODES),
    st.sampled_from([GOOD, GOOD, {}]),
    st.dictionaries(NAMES, VALUES, max_size=3),
    BODIES,
    st.sampled_from([0, 1]),
)
HEARTBEAT = {
    "clientID": "c",
    "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "TT", "subString": "a||b"}]}],
    "producerDataSet": [{"groupName": "g"}],
}


@settings(max_examples=60)
@given(requests=st.lists(REQUESTS, max_size=12))
def test_every_request_gets_one_answer(requests: list[RemotingCommand]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_node(Path(folder)) as node:
                await node.send(b"x", i="KEYS\x01k\x02")
                await node.ask(34, json.dumps(HEARTBEAT).encode())
                await node.ask(15, consumerGroup="g", topic="TT", queueId=0, commitOffset=1)
                for request in requests:
                    answer = await node.client.invoke(node.address, request, 60)
                    assert answer.code in (0, 1, 2, 16, 17, 22, 26, 29, 206, 207), (request, answer)
                    assert answer.serialize_type == request.serialize_type
                assert (await node.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).code == 0
                assert (await node.send(b="T9")).code == 0

    trio.run(main, clock=MockClock(autojump_threshold=0))

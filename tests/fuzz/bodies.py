"""JSON of the JVM side, the bodies written in it, and the compressed form of a registration."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.admin_requests import decode_consume_stats, decode_topic_stats
from ha.protocol.bodies import (
    ClusterInfo,
    ConsumerOffsets,
    DataVersion,
    GroupTable,
    HARuntimeInfo,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigTable,
    TopicList,
    TopicRouteData,
    decode_compressed,
    decode_heartbeat,
    encode_compressed,
)
from ha.protocol.group_requests import (
    ConsumeStatus,
    ProcessQueueInfo,
    decode_consumer_status,
    decode_queue_offsets,
    decode_running_info,
    encode_queue_offset_list,
    encode_queue_offsets,
    encode_running_info,
)
from ha.protocol.java_json import dumps, dumps_pretty, loads, read_as
from tests.fuzz.harness import Harness
from tests.protocol.golden import STORES, store_files

BODIES: tuple[type[msgspec.Struct], ...] = (
    TopicConfigTable,
    ConsumerOffsets,
    GroupTable,
    RegisterBrokerBody,
    TopicRouteData,
    ClusterInfo,
    TopicList,
    DataVersion,
    HARuntimeInfo,
)


ANSWERS: tuple[Callable[[bytes], object], ...] = (
    decode_queue_offsets,
    decode_consumer_status,
    decode_running_info,
    decode_topic_stats,
    decode_consume_stats,
)
"""What brokers and clients answer with objects as keys: read, or the one error"""
INVALID_ANSWERS = (
    b"[]",
    b'{"offsetTable":5}',
    b'{"offsetTable":{"a":1}}',
    b'{"offsetTable":{{"queueId":"x"}:1}}',
    b'{"offsetTable":[5]}',
    b'{"mqTable":[1]}',
    b'{"consumerTable":{"c":5}}',
)


def _without_nulls(value: Any) -> Any:
    """The value without the members that are null, which are not written, and with keys as text."""
    if isinstance(value, dict):
        return {
            (key if isinstance(key, tuple) else str(key)): _without_nulls(member)
            for key, member in value.items()
            if member is not None
        }
    return [_without_nulls(member) for member in value] if isinstance(value, list) else value


def text(data: bytes) -> None:
    """Any text: a value or the one error; a value is the same after writing and reading; Python's reader agrees."""
    try:
        value = loads(data)
    except RemoteProtocolError:
        value = None
    try:
        standard = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        standard = None
    if value is None:
        return
    if b'"$ref"' in data:
        return  # a reference stands for what it leads to
    if standard is not None and b"." not in data and b"e" not in data and b"E" not in data and len(data) < 1000:
        assert value == standard, (value, standard)
    expected = _without_nulls(value)
    # An object key is written as an object without its null members, and text may hold lone surrogates.
    try:
        written = dumps(value, bare_integer_keys=True)
    except UnicodeEncodeError:
        raise AssertionError("what was read can't be written") from None
    if '{{"' not in str(written[:2]) and b"\xef\xbf\xbd" not in written and not _has_tuple_keys(value):
        assert loads(written) == expected, written
        assert loads(dumps_pretty(value)) == expected


def _has_tuple_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return any(isinstance(key, tuple) or _has_tuple_keys(member) for key, member in value.items())
    return isinstance(value, list) and any(map(_has_tuple_keys, value))


def _refuse(name: str) -> None:
    raise ValueError(name)


def bodies(data: bytes) -> None:
    """The first byte selects the body; what is read is unchanged by writing it in compact, pretty or standard form."""
    if not data:
        return
    number = data[0] % (len(BODIES) + 1 + len(ANSWERS))
    try:
        if number > len(BODIES):
            ANSWERS[number - len(BODIES) - 1](data[1:])
            return
        if number == len(BODIES):
            value: Any = decode_heartbeat(data[1:])
            again = decode_heartbeat
        else:
            kind = BODIES[number]
            value = read_as(kind, data[1:])

            def again(raw: bytes) -> Any:  # type: ignore[misc]
                return read_as(kind, raw)
    except RemoteProtocolError:
        return
    first = again(dumps(value))
    for written in (dumps(value), dumps_pretty(value), dumps(value, bare_integer_keys=False)):
        # Null members are not written: the second reading is the settled one.
        assert again(written) == first, written


def registration(data: bytes) -> None:
    """A compressed registration: the zlib stream itself, and, behind a 0x01, what is in it."""
    raw = zlib.compress(data[1:], 1) if data[:1] == b"\x01" else data[1:]
    try:
        body = decode_compressed(raw)
    except RemoteProtocolError:
        return
    wrapper = body.topic_config_serialize_wrapper
    names_fit = all(
        " " not in topic.topic_name and " " not in topic.topic_filter_type and "\ufffd" not in topic.topic_name
        for topic in wrapper.topic_config_table.values()
    )
    if names_fit:
        again = decode_compressed(encode_compressed(body))
        assert again.filter_server_list == body.filter_server_list
        assert again.topic_config_serialize_wrapper.data_version == wrapper.data_version
        assert again.topic_config_serialize_wrapper.topic_config_table.keys() == wrapper.topic_config_table.keys()


def config_texts() -> list[tuple[str, bytes]]:
    """The JSON files of the golden stores, by name."""
    return [
        (name, content)
        for version in STORES
        for name, content in sorted(store_files(version).items())
        if name.endswith(".json") and len(content) < 8000
    ]


def text_seeds() -> list[bytes]:
    """Both dialects."""
    return [
        b'{0:5,-1:"x","a":[1,2.5,true,null,{}]}',
        b'{"a":{"b":[1,{"c":"d"}]},"r":{"$ref":"$.a.b[1]"}}',
        b'{{"brokerName":"b0","queueId":1,"topic":"t"}:9,{"a":[]}:1}',
        b'[{"$ref":"$[1]"},{"x":1}]',
        b'"\\ud83d\\ude00 \xf0\x9f\x98\x80"',
        *(content for _, content in config_texts()),
    ]


def body_seeds() -> list[bytes]:
    """A good body of each kind."""
    kinds = {"topics.json": 0, "consumerOffset.json": 1, "subscriptionGroup.json": 2}
    found = [
        bytes([number]) + content
        for name, content in config_texts()
        for file, number in kinds.items()
        if name.endswith(file)
    ]
    table = TopicConfigTable(topic_config_table={"T": TopicConfig(topic_name="T", attributes={"+a": "b"})})
    heartbeat = (
        b'{"clientID":"c@1","consumerDataSet":[{"consumeFromWhere":2,"consumeType":"CONSUME_PASSIVELY","groupName":"g",'
        b'"messageModel":1,"subscriptionDataSet":[{"codeSet":[84],"subString":"T || U","subVersion":"7","topic":"t",'
        b'"tagsSet":["T"]}],"unitMode":false}],"producerDataSet":[{"groupName":"p"}],"heartbeatFingerprint":5}'
    )
    route = b'{"brokerDatas":[{"brokerAddrs":{0:"h:1","1":"h:2"},"brokerName":"b","cluster":"C"}],"queueDatas":[{}]}'
    cluster = b'{"brokerAddrTable":{"b":{"brokerAddrs":{0:"h:1"}}},"clusterAddrTable":{"C":["b"]}}'
    return [
        *found,
        b"\x03" + dumps(RegisterBrokerBody(topic_config_serialize_wrapper=table, filter_server_list=["f"])),
        b"\x04" + route,
        b"\x05" + cluster,
        b'\x06{"topicList":["a","b"]}',
        b'\x07{"counter":1,"stateVersion":0,"timestamp":5}',
        b"\x08" + dumps(HARuntimeInfo()),
        b"\x09" + heartbeat,
        *answer_seeds(),
    ]


def answer_seeds() -> list[bytes]:
    """One of each of ANSWERS, the first in both of its forms."""
    offsets = {("T", "b", 0): 5, ("T", "b", 1): 1 << 40}
    info = encode_running_info({("T", "b", 0): ProcessQueueInfo()}, {"k": "v"}, {"T": ConsumeStatus()}, [])
    queue = b'{{"brokerName":"b","queueId":0,"topic":"T"}:'
    return [
        b"\x0a" + encode_queue_offsets(offsets),
        b"\x0a" + encode_queue_offset_list(offsets),
        b'\x0b{"consumerTable":{"c@1":%b9}}}' % queue,
        b"\x0c" + info,
        b'\x0d{"offsetTable":%b{"lastUpdateTimestamp":1,"maxOffset":9,"minOffset":0}}}' % queue,
        b'\x0e{"consumeTps":1.5,"offsetTable":%b{"brokerOffset":9,"consumerOffset":4,"lastTimestamp":1}}}' % queue,
        *(bytes([number]) + body for number in range(0x0A, 0x0F) for body in INVALID_ANSWERS),
    ]


def registration_seeds() -> list[bytes]:
    """One with topics, inside and outside of its zlib stream."""
    topics = {
        name: TopicConfig(topic_name=name, attributes=attributes)
        for name, attributes in (("a", {}), ("b", {"+k": "v"}), ("c", None))
    }
    version = DataVersion(counter=3, timestamp=4)
    table = TopicConfigTable(topic_config_table=topics, data_version=version)
    raw = encode_compressed(RegisterBrokerBody(topic_config_serialize_wrapper=table, filter_server_list=["f:1"]))
    return [b"\x00" + raw, b"\x01" + zlib.decompress(raw), b"\x00" + zlib.compress(bytes(1 << 16))]


WORDS = (
    b'{"$ref":"$',
    b'"$ref"',
    b"{{",
    b"}:",
    b"0:",
    b"-1:",
    b"[[[[[[[[",
    b"1e999",
    b"-0",
    b"99999999999999999999999",
    b"\\ud800",
    b"null",
    b'":"',
    b'":{',
    b'":[',
)


def _field_names() -> tuple[bytes, ...]:
    return tuple(sorted({b'"%b":' % name.encode() for kind in BODIES for name in kind.__struct_encode_fields__}))


HARNESSES = {
    "java_json": Harness(run=text, seeds=text_seeds, words=WORDS, memory_max=16 << 20),
    "bodies": Harness(run=bodies, seeds=body_seeds, words=(*WORDS, *_field_names())),
    "registration": Harness(run=registration, seeds=registration_seeds, memory_max=96 << 20),
}

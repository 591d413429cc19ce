"""Remoting frames in both header encodings, and the typed fields of requests."""

from typing import Any

import msgspec

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.namesrv import processor as namesrv
from ha.protocol import headers, pop
from ha.protocol.admin_requests import BrokerNameRequest, TopicRequest
from ha.protocol.group_requests import GetConsumerListRequest, UnregisterClientRequest
from ha.protocol.headers import Header, parse_header
from ha.protocol.remoting import (
    SERIALIZE_JSON,
    SERIALIZE_ROCKETMQ,
    RemotingCommand,
    RemotingParser,
    encode_command,
)
from ha.protocol.request_parser import AckCommand, PopCommand, RequestParser, SendCommand, ack_command
from tests.fuzz.harness import Harness, pieces_of

FRAME_SIZE_MAX = 1 << 16
ACK = {
    "consumerGroup": "g",
    "topic": "TT",
    "queueId": "3",
    "extraInfo": "1000 1764280000000 60000 0 0 broker-a 3 1007",
    "offset": "1007",
}
HEADERS: tuple[type[Header], ...] = (
    headers.SendMessageRequest,
    headers.SendMessageRequestV2,
    headers.PullMessageRequest,
    headers.QueryConsumerOffsetRequest,
    headers.UpdateConsumerOffsetRequest,
    headers.GetMaxOffsetRequest,
    headers.GetMinOffsetRequest,
    headers.SearchOffsetRequest,
    headers.RegisterBrokerRequest,
    headers.RegisterBrokerResponse,
    headers.UnregisterBrokerRequest,
    headers.GetRouteInfoRequest,
    headers.PullMessageResponse,
    headers.SendMessageResponse,
    headers.OffsetResponse,
    headers.HeartbeatResponse,
    UnregisterClientRequest,
    GetConsumerListRequest,
    namesrv.SettingRequest,
    BrokerNameRequest,
    TopicRequest,
    namesrv.ClusterRequest,
    namesrv.HeartbeatRequest,
)


def plain(command: RemotingCommand) -> RemotingCommand:
    """The command with its body as bytes, for comparison."""
    return msgspec.structs.replace(command, body=bytes(command.body))


def parse(chunks: list[bytes]) -> tuple[list[RemotingCommand], bool]:
    """What a parser makes of the chunks, and whether it refused one."""
    parser = RemotingParser(frame_size_max=FRAME_SIZE_MAX)
    found: list[RemotingCommand] = []
    for chunk in chunks:
        try:
            found += map(plain, parser.feed(chunk))
        except RemoteProtocolError:
            return found, True
    return found, False


def frames(data: bytes) -> None:
    """Raw bytes: cut anywhere they give the same commands or are refused all the same; what is read can be written."""
    whole, refused = parse([data])
    check_requests(data, whole, refused)
    for cut in pieces_of(data):
        found, refused_too = parse(cut)
        assert refused_too == refused
        assert found == whole if not refused else True
    for command in whole:
        check_round_trip(command)


def check_requests(data: bytes, whole: list[RemotingCommand], refused: bool) -> None:
    """The parser of a broker's ports reads the same, the fields of sends, pops and acknowledgements included."""
    requests = RequestParser(frame_size_max=FRAME_SIZE_MAX)
    try:
        found = requests.feed(data)
    except RemoteProtocolError:
        assert refused
        return
    assert not refused
    singly: list[RemotingCommand] = []
    for command in found:
        singly += map(command.alone, range(len(command.offsets))) if isinstance(command, AckCommand) else [command]
    for command, expected in zip(singly, whole, strict=True):
        assert bytes(command.body) == expected.body
        assert (command.code, command.opaque, command.flag) == (expected.code, expected.opaque, expected.flag)
        if type(command) is SendCommand:
            request = parse_header(headers.SendMessageRequest, expected.ext_fields)
            for name in headers.SendMessageRequest.__struct_fields__:
                assert getattr(command.request, name) == getattr(request, name), name
        elif type(command) is AckCommand:
            ack = ack_command(expected)
            assert (command.popped, command.offsets) == (ack.popped, ack.offsets)
        elif type(command) is PopCommand:
            popping = parse_header(pop.PopMessageRequest, expected.ext_fields)
            for name in pop.PopMessageRequest.__struct_fields__:
                assert getattr(command.request, name) == getattr(popping, name), name
        else:
            assert command.ext_fields == expected.ext_fields


def check_round_trip(command: RemotingCommand) -> None:
    """A command that is read, written and read again is unchanged."""
    try:
        raw = encode_command(command)
    except LocalProtocolError:
        # Bad UTF-8 became U+FFFD, three bytes for one, and a name may then exceed its int16.
        assert command.serialize_type == SERIALIZE_ROCKETMQ
        assert any("\ufffd" in name for name in command.ext_fields)
        return
    [again] = RemotingParser().feed(raw)
    expected = plain(command)
    if command.serialize_type == SERIALIZE_ROCKETMQ and not command.remark:
        expected.remark = None
    assert plain(again) == expected


def header(data: bytes) -> None:
    """The first byte chooses the encoding, the rest is header and, behind the first blank line, body: well framed."""
    if not data:
        return
    head, _, body = data[1:].partition(b"\n\n")
    size = 4 + len(head) + len(body)
    marks = (data[0] & 1) << 24 | len(head)
    frames(size.to_bytes(4, "big") + marks.to_bytes(4, "big") + head + body)


FIELD = b"\x1e"
EQUALS = b"\x1f"


def fields_of(raw: bytes) -> dict[str, str]:
    """Ext fields written `name 1F value 1E` repeated: a form that mutation does not break."""
    fields = {}
    for part in raw.split(FIELD):
        name, equals, value = part.partition(EQUALS)
        if equals:
            fields[str(name, "utf-8", "replace")] = str(value, "utf-8", "replace")
    return fields


def to_fields(fields: dict[str, Any]) -> bytes:
    """The other way round."""
    return FIELD.join(f"{name}\x1f{value}".encode() for name, value in fields.items())


def request_fields(data: bytes) -> None:
    """The first byte chooses the request; what is read from fields gives the same when written and read again."""
    if not data:
        return
    kind = HEADERS[data[0] % len(HEADERS)]
    try:
        found = parse_header(kind, fields_of(data[1:]))
    except RemoteProtocolError:
        return
    again = parse_header(type(found), found.to_ext_fields())
    assert again == found


def frame_seeds() -> list[bytes]:
    """Commands in both encodings, usual sends and an acknowledgement among them."""
    from tests.broker.node import SEND_V2

    commands = [
        RemotingCommand(310, 8, 0, ext_fields={name: str(value) for name, value in SEND_V2.items()}, body=b"hello"),
        RemotingCommand(310, 7, 0, ext_fields={"a": "pg", "b": "TT", "e": "0", "i": "TAGS\x01x\x02"}, body=b"hello"),
        RemotingCommand(11, -1, 2, remark="größe", ext_fields={"topic": "T", "queueId": "0"}),
        RemotingCommand(0, 1, 1, remark="", body=b"x" * 40),
        RemotingCommand(105),
    ]
    found = [encode_command(RemotingCommand(200_051, 9, ext_fields=ACK))]
    for serialize_type in (SERIALIZE_JSON, SERIALIZE_ROCKETMQ):
        raws = [encode_command(msgspec.structs.replace(c, serialize_type=serialize_type)) for c in commands]
        found += [*raws, b"".join(raws)]
    return found


def header_seeds() -> list[bytes]:
    """The headers of the same, and what other JSON libraries make of one."""
    found = []
    for raw in frame_seeds():
        size = int.from_bytes(raw[5:8], "big")
        found.append(raw[4:5] + raw[8 : 8 + size] + b"\n\nbody")
    loose = (
        b'{"code":"10","flag":null,"language":5,"extFields":{"a":1,"b":true,"c":null,"d":[1,{"e":2.5}]}}',
        b'{"code":10,"language":"GO","remark":{"x":1},"extFields":{"raw\x01control":"\xff"},"opaque":"-3"}',
        b'{"code":1e3,"version":-0,"extFields":{"\\ud800":"\\udfff\\u0000"}}',
    )
    return [*found, *(b"\x00" + text for text in loose)]


def field_seeds() -> list[bytes]:
    """A good request of each kind that has an example elsewhere, and one with nothing."""
    from tests.broker.node import PULL, SEND_V2

    every = {**PULL, **SEND_V2, "brokerName": "b", "brokerAddr": "h:1", "clusterName": "C", "haServerAddr": "h:2"}
    every |= {"brokerId": 0, "namespace": "n", "key": "k", "value": "v", "cluster": "C", "clientID": "c"}
    every |= {"timestamp": 5, "offset": 9, "msgId": "0A", "bodyCrc32": 3, "compressed": "TRUE", "setZeroIfNotFound": 0}
    every |= {"producerGroup": "g", "defaultTopic": "t", "defaultTopicQueueNums": 4, "bornTimestamp": 1, "flag": 0}
    every |= {"suggestWhichBrokerId": 0, "nextBeginOffset": 1, "minOffset": 0, "maxOffset": 9}
    everything = to_fields(every)
    return [bytes([number]) + everything for number in range(len(HEADERS))] + [b"\x00"]


def _names() -> tuple[bytes, ...]:
    found = {name.encode() for kind in HEADERS for name in kind.__struct_encode_fields__}
    return (*sorted(found), EQUALS, FIELD, b"-1", b"2147483648", b"9223372036854775808", b"true", b"1_0", b"\xd9\xa3")


JSON_WORDS = (
    b'{"code":310,',
    b'{"code":10,"',
    b'"code":',
    b'"extFields":{',
    b'"remark":',
    b'"opaque":',
    b'"flag":',
    b'"language":',
    b'"version":',
    b'"serializeTypeCurrentRPC":',
    b"\\u0001",
    b"\\ud800",
    b"null",
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"[[[[",
    b'{"a":',
)

HARNESSES = {
    "remoting_frames": Harness(run=frames, seeds=frame_seeds, words=JSON_WORDS),
    "remoting_header": Harness(run=header, seeds=header_seeds, words=JSON_WORDS),
    "request_fields": Harness(run=request_fields, seeds=field_seeds, words=_names()),
}

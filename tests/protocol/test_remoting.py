"""Remoting frames against the released classes' bytes, other clients' habits, and anything else."""

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.codes import LanguageCode
from ha.protocol.remoting import (
    EXT_FIELD_COUNT_MAX,
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    FRAME_SIZE_MAX,
    SERIALIZE_JSON,
    SERIALIZE_ROCKETMQ,
    CommandTemplate,
    RemotingCommand,
    RemotingParser,
    encode_command,
    json_text,
)

SEND_EXT = {
    "a": "pg",
    "b": "T1",
    "c": "TBW102",
    "d": "4",
    "e": "0",
    "f": "0",
    "g": "1700000000000",
    "h": "0",
    "i": "TAGS\x01TagA\x02",
    "j": "0",
    "k": "false",
    "m": "false",
    "n": "b0",
}
SEND_BINARY = bytes.fromhex(
    "000000ab010000a201360001df0000000900000000000000000000008d000161000000027067000162000000025431000163000000065442573130"
    "320001640000000134000165000000013000016600000001300001670000000d3137303030303030303030303000016800000001300001690000000a"
    "5441475301546167410200016a000000013000016b0000000566616c736500016d0000000566616c736500016e00000002623068656c6c6f"
)
ROUTE_BINARY = bytes.fromhex(
    "00000029 01000024 0069 00 01df 00000007 00000000 00000002 726b 0000000d 0005 746f706963 00000002 7431 62"
)
SEND_JSON_HEADER = (
    rb'{"code":310,"extFields":{"a":"pg","b":"T1","c":"TBW102","d":"4","e":"0","f":"0","g":"1700000000000","h":"0",'
    rb'"i":"TAGS\u0001TagA\u0002","j":"0","k":"false","m":"false","n":"b0"},"flag":0,"language":"JAVA","opaque":9,'
    rb'"serializeTypeCurrentRPC":"JSON","version":479}'
)
PULL_JSON_HEADER = (
    b'{"code":11,"extFields":{"queueId":"1","maxMsgNums":"32","sysFlag":"6","suspendTimeoutMillis":"15000",'
    b'"commitOffset":"0","topic":"t","queueOffset":"2","subscription":"*","subVersion":"3","consumerGroup":"g"},'
    b'"flag":0,"language":"JAVA","opaque":7,"serializeTypeCurrentRPC":"JSON","version":479}'
)
RESPONSE_JSON = (
    bytes.fromhex("000000800000007a")
    + b'{"code":0,"extFields":{"offset":"5"},"flag":1,"language":"JAVA","opaque":7,"serializeTypeCurrentRPC":"JSON",'
    + b'"version":479}xy'
)


def json_frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body


PULL_EXT = {
    "queueId": "1",
    "maxMsgNums": "32",
    "sysFlag": "6",
    "suspendTimeoutMillis": "15000",
    "commitOffset": "0",
    "topic": "t",
    "queueOffset": "2",
    "subscription": "*",
    "subVersion": "3",
    "consumerGroup": "g",
}
JAVA = LanguageCode.JAVA
VECTORS = [
    pytest.param(
        RemotingCommand(310, 9, 0, JAVA, 479, None, SEND_EXT, b"hello", SERIALIZE_ROCKETMQ),
        SEND_BINARY,
        id="send binary",
    ),
    pytest.param(
        RemotingCommand(105, 7, 0, JAVA, 479, "rk", {"topic": "t1"}, b"b", SERIALIZE_ROCKETMQ), ROUTE_BINARY, id="route"
    ),
    pytest.param(
        RemotingCommand(310, 9, 0, JAVA, 479, None, SEND_EXT, b"hello"),
        json_frame(SEND_JSON_HEADER, b"hello"),
        id="send JSON",
    ),
    pytest.param(RemotingCommand(11, 7, 0, JAVA, 479, None, PULL_EXT), json_frame(PULL_JSON_HEADER), id="pull JSON"),
    pytest.param(RemotingCommand(0, 7, 1, JAVA, 479, None, {"offset": "5"}, b"xy"), RESPONSE_JSON, id="response JSON"),
]


def test_vectors_have_the_sizes_of_the_specification() -> None:
    assert json_frame(PULL_JSON_HEADER)[:8].hex() == "0000012800000124"


@pytest.mark.parametrize(("command", "frame"), VECTORS)
def test_frames_of_the_released_classes(command: RemotingCommand, frame: bytes) -> None:
    assert encode_command(command) == frame
    assert RemotingParser().feed(frame) == [command]
    assert RemotingParser().feed(frame + frame) == [command, command]

    parser = RemotingParser()
    byte_by_byte = [parser.feed(frame[at : at + 1]) for at in range(len(frame))]
    assert byte_by_byte == [[]] * (len(frame) - 1) + [[command]]
    assert parser.is_between_frames

    parser = RemotingParser()
    assert parser.feed(frame + frame[:-1]) == [command]
    assert not parser.is_between_frames
    assert parser.feed(frame[-1:] + b"\0\0") == [command]


def test_numbers_and_booleans_of_other_clients_become_strings() -> None:
    header = (
        b'{"code":11,"language":"CPP","version":333,"opaque":5,"flag":0,"remark":"",'
        b'"extFields":{"queueId":3,"x":true,"y":"s"}}\n'
    )
    (command,) = RemotingParser().feed(json_frame(header, b"body"))
    assert command == RemotingCommand(
        11, 5, 0, LanguageCode.CPP, 333, "", {"queueId": "3", "x": "true", "y": "s"}, b"body"
    )


@pytest.mark.parametrize(
    ("header", "ext_fields"),
    [
        (b'{"code":1,"extFields":{"a":"x\x01y\x02"}}', {"a": "x\x01y\x02"}),
        (b'{"code":"1","opaque":null,"flag":null,"extFields":null}', {}),
        (b'{"code":1,"extFields":{"a":null,"b":1.5,"c":false}}', {"b": "1.5", "c": "false"}),
        (b'{"code":1,"extFields":{"a":"\xff\xfe"}}', {"a": "��"}),
        (rb'{"code":1,"extFields":{"a":"\ud800x"}}', {"a": "�x"}),
        (rb'{"code":1,"extFields":{"a":"\ud83d\ude00","b":1}}', {"a": "😀", "b": "1"}),
        ('{"code":1,"extFields":{"a":"é世"},"unknown":[1,{}]}'.encode(), {"a": "é世"}),
        (b'{"code":1,"language":9,"extFields":{"a":{"b":1}}} \r\n\t', {"a": '{"b":1}'}),
    ],
)
def test_accepts_what_java_accepts(header: bytes, ext_fields: dict[str, str]) -> None:
    (command,) = RemotingParser().feed(json_frame(header))
    assert (command.code, command.opaque, command.flag, command.ext_fields) == (1, 0, 0, ext_fields)
    for serialize_type in (SERIALIZE_JSON, SERIALIZE_ROCKETMQ):
        command.serialize_type = serialize_type
        assert RemotingParser().feed(encode_command(command)) == [command]


@pytest.mark.parametrize(
    ("name", "language"),
    [(b'"GO"', LanguageCode.GO), (b'"KLINGON"', LanguageCode.OTHER), (b"null", LanguageCode.OTHER)],
)
def test_unknown_language_is_other(name: bytes, language: LanguageCode) -> None:
    (command,) = RemotingParser().feed(json_frame(b'{"code":1,"language":' + name + b"}"))
    assert command.language is language


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(struct.pack(">i", -1), id="negative length"),
        pytest.param(struct.pack(">i", 3), id="no room for a header"),
        pytest.param(struct.pack(">i", FRAME_SIZE_MAX - 3), id="one byte too long"),
        pytest.param(struct.pack(">ii", 10, 7) + bytes(6), id="header longer than the frame"),
        pytest.param(struct.pack(">ii", 4, 0), id="empty header"),
        pytest.param(
            struct.pack(">ii", 3 + len(PULL_JSON_HEADER), len(PULL_JSON_HEADER)) + PULL_JSON_HEADER,
            id="header that goes on in the next frame",
        ),
        pytest.param(struct.pack(">ii", 6, 2 << 24 | 2) + b"{}", id="unknown encoding"),
        pytest.param(b"GET / HTTP/1.1\r\n", id="HTTP"),
        pytest.param(json_frame(b"{}"), id="no code"),
        pytest.param(json_frame(b"[1]"), id="no object"),
        pytest.param(json_frame(b'{"code":99999999999}'), id="code beyond int32"),
        pytest.param(json_frame(b'{"code":1,"opaque":2147483648}'), id="opaque beyond int32"),
        pytest.param(json_frame(b'{"code":1,"x":' + b"9" * 5000 + b"\x01}"), id="endless number"),
        pytest.param(json_frame(b"[" * 100_000), id="deep nesting"),
        pytest.param(json_frame(b'{"code":1,"extFields":{"a":' + b"[" * 900 + b"]" * 900 + b"}}x"), id="text after it"),
        pytest.param(struct.pack(">ii", 14, 1 << 24 | 10) + bytes(10), id="cut binary header"),
        pytest.param(ROUTE_BINARY[:21] + b"\xff" + ROUTE_BINARY[22:], id="negative remark size"),
        pytest.param(ROUTE_BINARY[:27] + b"\x7f" + ROUTE_BINARY[28:], id="ext beyond the header"),
        pytest.param(ROUTE_BINARY[:31] + b"\xff" + ROUTE_BINARY[32:], id="negative name size"),
        pytest.param(ROUTE_BINARY[:38] + b"\x7f" + ROUTE_BINARY[39:], id="value beyond the ext"),
    ],
)
def test_invalid_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        RemotingParser().feed(frame)


def test_maximum_frame_is_accepted_and_its_buffer_is_bounded() -> None:
    body = bytes(FRAME_SIZE_MAX - 8 - len(PULL_JSON_HEADER))
    frame = encode_command(RemotingCommand(11, 7, 0, JAVA, 479, None, PULL_EXT, body))
    assert len(frame) == FRAME_SIZE_MAX
    parser = RemotingParser()
    for start in range(0, len(frame) - 65536, 65536):
        assert parser.feed(frame[start : start + 65536]) == []
        assert len(parser._buffer) <= FRAME_SIZE_MAX
    (command,) = parser.feed(frame[-65536:])
    assert len(command.body) == len(body)
    with pytest.raises(LocalProtocolError):
        encode_command(RemotingCommand(11, 7, 0, JAVA, 479, None, PULL_EXT, bytes(len(body) + 1)))


def test_configured_limits_apply() -> None:
    parser = RemotingParser(frame_size_max=len(RESPONSE_JSON))
    assert len(parser.feed(RESPONSE_JSON)) == 1
    with pytest.raises(RemoteProtocolError):
        RemotingParser(frame_size_max=len(RESPONSE_JSON) - 1).feed(RESPONSE_JSON[:4])


def test_oversized_header_is_refused_before_it_arrives() -> None:
    claim = struct.pack(">ii", 1 << 20, 1001)
    for known in range(8):
        parser = RemotingParser(header_size_max=1000)
        assert parser.feed(claim[:known]) == []
        with pytest.raises(RemoteProtocolError, match="header of 1001 bytes"):
            parser.feed(claim[known:])
    whole = json_frame(b'{"code":1,"remark":"%b"}' % (b"x" * 978))
    assert len(whole) - 8 == 1000
    assert len(RemotingParser(header_size_max=1000).feed(whole)) == 1
    with pytest.raises(RemoteProtocolError, match="header of 1000 bytes"):
        RemotingParser(header_size_max=999).feed(whole)


@pytest.mark.parametrize("serialize_type", [SERIALIZE_JSON, SERIALIZE_ROCKETMQ])
def test_number_of_ext_fields_is_limited(serialize_type: int) -> None:
    def frame(count: int) -> bytes:
        fields = {f"n{number}": "v" for number in range(count)}
        return encode_command(RemotingCommand(1, ext_fields=fields, serialize_type=serialize_type))

    assert len(RemotingParser().feed(frame(EXT_FIELD_COUNT_MAX))) == 1
    with pytest.raises(RemoteProtocolError, match=f"more than {EXT_FIELD_COUNT_MAX} ext fields"):
        RemotingParser().feed(frame(EXT_FIELD_COUNT_MAX + 1))


def test_ext_fields_of_one_name_count_as_several() -> None:
    command = encode_command(RemotingCommand(1, ext_fields={"": ""}, serialize_type=SERIALIZE_ROCKETMQ))
    fields = bytes(6) * (EXT_FIELD_COUNT_MAX + 1)
    header = command[8:-10] + struct.pack(">i", len(fields)) + fields
    marked = struct.pack(">ii", 4 + len(header), SERIALIZE_ROCKETMQ << 24 | len(header))
    with pytest.raises(RemoteProtocolError, match="ext fields"):
        RemotingParser().feed(marked + header)


@pytest.mark.parametrize("size", [10, 100_000])
def test_bodies_stay_valid_when_the_chunk_is_reused(size: int) -> None:
    first, second = (encode_command(RemotingCommand(1, body=bytes([at]) * size)) for at in (1, 2))
    parser = RemotingParser()
    chunk = bytearray(first)
    (command,) = parser.feed(chunk)
    chunk[:] = bytes(len(chunk))
    assert parser.feed(second[:50]) == []
    parser.feed(second[50:])
    assert bytes(command.body) == b"\x01" * size


def test_replies_have_the_opaque_of_their_request() -> None:
    request = RemotingCommand(310, 42, FLAG_ONEWAY, serialize_type=SERIALIZE_ROCKETMQ)
    assert request.is_oneway
    assert not request.is_response
    reply = request.reply(17, "no such topic", {"a": "b"}, b"x")
    assert (reply.code, reply.opaque, reply.flag, reply.serialize_type) == (17, 42, FLAG_RESPONSE, SERIALIZE_ROCKETMQ)
    assert (reply.remark, reply.ext_fields, reply.body) == ("no such topic", {"a": "b"}, b"x")
    assert reply.is_response
    assert not reply.is_oneway
    assert request.reply(0).ext_fields is not request.reply(0).ext_fields


def test_unencodable_commands_are_local_errors() -> None:
    for command in (
        RemotingCommand(200_050, serialize_type=SERIALIZE_ROCKETMQ),
        RemotingCommand(1, ext_fields={"k" * 40_000: "v"}, serialize_type=SERIALIZE_ROCKETMQ),
        RemotingCommand(1, remark="\ud800", serialize_type=SERIALIZE_ROCKETMQ),
        RemotingCommand(1, remark="\ud800"),
    ):
        with pytest.raises(LocalProtocolError):
            encode_command(command)


texts = st.text(st.characters(codec="utf-8"), max_size=20)
commands = st.builds(
    RemotingCommand,
    code=st.integers(0, 32767),
    opaque=st.integers(-(2**31), 2**31 - 1),
    flag=st.integers(0, 3),
    language=st.sampled_from(LanguageCode),
    version=st.integers(0, 32767),
    remark=st.none() | texts.filter(bool),
    ext_fields=st.dictionaries(texts, texts, max_size=6),
    body=st.binary(max_size=60),
    serialize_type=st.sampled_from([SERIALIZE_JSON, SERIALIZE_ROCKETMQ]),
)


def cut(raw: bytes, ends: list[int]) -> Iterator[bytes]:
    for start, end in zip([0, *ends], [*ends, len(raw)], strict=True):
        yield raw[start:end]


@given(st.lists(commands, max_size=4), st.data())
def test_commands_are_parsed_from_any_chunks(sent: list[RemotingCommand], data: st.DataObject) -> None:
    raw = b"".join(map(encode_command, sent))
    ends = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    parser = RemotingParser()
    assert [command for chunk in cut(raw, ends) for command in parser.feed(chunk)] == sent
    assert parser.is_between_frames


@given(text=st.text(), number=st.integers(0, (1 << 63) - 1), opaque=st.integers(0, (1 << 31) - 1), fixed=st.text())
def test_template_equals_encode_command(text: str, number: int, opaque: int, fixed: str) -> None:
    def answer(text: str, number: int, opaque: int) -> RemotingCommand:
        return RemotingCommand(
            0, opaque, FLAG_RESPONSE, remark=fixed, ext_fields={"id": f"%{number:016X}", "text": text, "fixed": fixed}
        )

    marks = [(b"0123456789ABCDEF", b"%016X"), (b'"the text"', b"%b"), (b"2000000001", b"%d")]
    template = CommandTemplate(answer("the text", 0x0123456789ABCDEF, 2_000_000_001), marks)
    assert template.encode(number, json_text(text), opaque) == encode_command(answer(text, number, opaque))


@given(opaques=st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(95, 105), min_size=1, max_size=5))
def test_template_encodes_many_at_once(opaques: list[int]) -> None:
    def answer(opaque: int) -> RemotingCommand:
        return RemotingCommand(0, opaque, FLAG_RESPONSE, remark="100 %")

    template = CommandTemplate(answer(2_000_000_001), [(b"2000000001", b"%d")])
    assert template.encode_each(opaques) == b"".join(map(encode_command, map(answer, opaques)))

"""A RequestParser returns the same values as a RemotingParser with parse_header and parse_handle."""

import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.codes import LanguageCode
from ha.protocol.compiled import pure
from ha.protocol.headers import SendMessageRequest
from ha.protocol.pop import PopMessageRequest
from ha.protocol.remoting import (
    BODY_COPIED_MAX,
    EXT_FIELD_COUNT_MAX,
    FLAG_ONEWAY,
    SERIALIZE_ROCKETMQ,
    RemotingCommand,
    RemotingParser,
    encode_command,
)
from ha.protocol.request_parser import (
    ACK_COUNT_MAX,
    AckCommand,
    AckedPop,
    PopCommand,
    RequestParser,
    SendCommand,
    ack_command,
    pop_request,
    read_requests,
    send_request,
)

from .test_headers import SEND_EXT_FULL
from .test_remoting import SEND_EXT, SEND_JSON_HEADER, json_frame

POP, ACK = 200_050, 200_051
HANDLE = "1000 1764280000000 60000 0 0 broker-a 3 1007"
ACK_EXT = {
    "consumerGroup": "g",
    "topic": "TT",
    "queueId": "3",
    "extraInfo": HANDLE,
    "offset": "1007",
    "bname": "broker-a",
}
POP_EXT = {
    "consumerGroup": "g",
    "topic": "TT",
    "queueId": "-1",
    "maxMsgNums": "32",
    "invisibleTime": "60000",
    "pollTime": "15000",
    "bornTime": "1764280000000",
    "initMode": "0",
    "expType": "TAG",
    "exp": "*",
    "order": "false",
    "attemptId": "a",
    "bname": "broker-a",
}
ACK_JSON_HEADER = json.dumps(
    {"code": ACK, "extFields": ACK_EXT, "flag": 0, "language": "JAVA", "opaque": 9, "version": 495},
    separators=(",", ":"),
).encode()


def read(parser: RemotingParser, frame: bytes) -> tuple[str, RemotingCommand | None, dict[str, Any] | None]:
    """The error in the frame or its ext fields, the command without them, and the fields by name."""
    try:
        (command,) = parser.feed(frame)
    except RemoteProtocolError as error:
        return f"frame: {error}", None, None
    without = RemotingCommand(
        command.code, command.opaque, command.flag, command.language, command.version, command.remark, body=command.body
    )
    fields: dict[str, Any] = {}
    try:
        if command.code == ACK:
            ack = ack_command(command)
            assert ack.opaques == [command.opaque]
            fields = {**ack.popped._asdict(), "offsets": ack.offsets}
        elif command.code == POP:
            pop = pop_request(command)
            fields = {name: getattr(pop, name) for name in PopMessageRequest.__struct_fields__}
        else:
            send = send_request(command)
            fields = {name: getattr(send, name) for name in SendMessageRequest.__struct_fields__}
    except RemoteProtocolError as error:
        return f"header: {error}", without, None
    return "", without, {name: (type(value), value) for name, value in fields.items()}


def check_same(header: bytes) -> None:
    frame = json_frame(header, b"body")
    assert read(RequestParser(), frame) == read(RemotingParser(), frame)


@pytest.mark.parametrize(("code", "ext"), [(310, SEND_EXT), (320, SEND_EXT), (10, SEND_EXT_FULL)])
def test_usual_send_is_parsed_directly(code: int, ext: dict[str, str]) -> None:
    frame = encode_command(RemotingCommand(code, opaque=7, ext_fields=ext, body=b"body"))
    (command,) = RequestParser().feed(frame)
    assert type(command) is SendCommand
    assert command.request.to_ext_fields() == ext
    assert (command.code, command.opaque, command.body, command.ext_fields) == (code, 7, b"body", {})
    assert read(RequestParser(), frame) == read(RemotingParser(), frame)


def test_send_of_the_released_classes_is_parsed_directly() -> None:
    (command,) = RequestParser().feed(json_frame(SEND_JSON_HEADER, b"body"))
    assert type(command) is SendCommand
    check_same(SEND_JSON_HEADER)


def test_usual_ack_is_parsed_directly() -> None:
    frame = json_frame(ACK_JSON_HEADER, b"")
    (command,) = RequestParser().feed(frame)
    assert type(command) is AckCommand
    assert command.popped == AckedPop("g", "TT", 3, 1_764_280_000_000, is_order=False)
    assert (command.offsets, command.opaques) == ([1007], [9])
    assert (command.code, command.opaque, command.ext_fields) == (ACK, 9, {})
    assert read(RequestParser(), frame) == read(RemotingParser(), frame)


def test_usual_pop_is_parsed_directly() -> None:
    frame = encode_command(RemotingCommand(POP, opaque=9, ext_fields=POP_EXT))
    (command,) = RequestParser().feed(frame)
    assert type(command) is PopCommand
    assert command.request.to_ext_fields() == POP_EXT
    assert (command.code, command.opaque, command.ext_fields) == (POP, 9, {})
    assert read(RequestParser(), frame) == read(RemotingParser(), frame)


def ack_frame(opaque: int, ext: dict[str, str] | None = None, **fields: Any) -> bytes:
    return encode_command(RemotingCommand(ACK, opaque, ext_fields=ACK_EXT | (ext or {}), **fields))


@pytest.mark.parametrize("parse", [read_requests, pure(read_requests)])
def test_acks_of_one_pop_become_one_command(parse: Any) -> None:
    numbers = range(ACK_COUNT_MAX + 2)
    data = b"".join(ack_frame(number, {"offset": str(2000 - number)}) for number in numbers)
    commands, position, count = parse(data, 1 << 20, 1 << 16)
    assert (position, count) == (len(data), len(numbers))
    assert [command.opaques for command in commands] == [[*range(ACK_COUNT_MAX)], [ACK_COUNT_MAX, ACK_COUNT_MAX + 1]]
    assert [command.offsets[0] for command in commands] == [2000, 2000 - ACK_COUNT_MAX]
    alone = commands[0].alone(3)
    assert (alone.opaque, alone.opaques, alone.offsets) == (3, [3], [1997])


OTHER_ACKS = [
    ack_frame(1, {"consumerGroup": "h"}),
    ack_frame(1, {"topic": "T"}),
    ack_frame(1, {"queueId": "4"}),
    ack_frame(1, {"extraInfo": HANDLE.replace("1764280000000", "1764280000001")}),
    ack_frame(1, {"extraInfo": HANDLE.replace("60000 0 0", "60000 999 0")}),
    ack_frame(1, flag=FLAG_ONEWAY),
    ack_frame(1, version=9),
    ack_frame(1, language=LanguageCode.GO),
    ack_frame(1, remark="why"),
    ack_frame(1, body=b"body"),
    encode_command(RemotingCommand(POP, 1, ext_fields=POP_EXT)),
]


@pytest.mark.parametrize("parse", [read_requests, pure(read_requests)])
@pytest.mark.parametrize("other", OTHER_ACKS)
def test_acks_are_of_one_command_only_if_they_differ_in_nothing_else(parse: Any, other: bytes) -> None:
    commands, _, count = parse(ack_frame(1) + other + ack_frame(2) + ack_frame(3), 1 << 20, 1 << 16)
    assert count == 4
    assert [len(command.opaques) for command in commands] == [1, 1, 2]


def test_parser_counts_frames() -> None:
    parser = RequestParser()
    parser.feed(2 * ack_frame(1) + encode_command(RemotingCommand(11, ext_fields=SEND_EXT)) + ack_frame(1)[:9])
    assert parser.frame_count == 3
    parser.feed(ack_frame(1)[9:])
    assert parser.frame_count == 4


@pytest.mark.parametrize(
    "command",
    [
        RemotingCommand(ACK, ext_fields={**ACK_EXT, "AccessKey": "who"}),
        RemotingCommand(ACK, ext_fields={**ACK_EXT, "extraInfo": "1 2 3"}),
        RemotingCommand(ACK, ext_fields={name: text for name, text in ACK_EXT.items() if name != "offset"}),
        RemotingCommand(200_053, ext_fields=ACK_EXT),
        RemotingCommand(POP, ext_fields=dict(POP_EXT, AccessKey="who")),
        RemotingCommand(POP, ext_fields=dict(POP_EXT, maxMsgNums="many")),
        RemotingCommand(POP, ext_fields=ACK_EXT),
        RemotingCommand(310, ext_fields={**SEND_EXT, "AccessKey": "who"}),
        RemotingCommand(310, ext_fields=SEND_EXT_FULL),
        RemotingCommand(10, ext_fields=SEND_EXT),
        RemotingCommand(11, ext_fields=SEND_EXT),
        RemotingCommand(310, ext_fields={}),
        RemotingCommand(310, ext_fields={**SEND_EXT, "d": "many"}),
        RemotingCommand(310, ext_fields=SEND_EXT, serialize_type=SERIALIZE_ROCKETMQ),
    ],
)
def test_unusual_commands_keep_their_ext_fields(command: RemotingCommand) -> None:
    frame = encode_command(command)
    assert RequestParser().feed(frame) == RemotingParser().feed(frame)
    assert read(RequestParser(), frame) == read(RemotingParser(), frame)


def test_last_of_two_codes_applies() -> None:
    header = SEND_JSON_HEADER[:-1] + b',"code":11}'
    (command,) = RequestParser().feed(json_frame(header, b"body"))
    assert (type(command), command.code, command.ext_fields) == (RemotingCommand, 11, SEND_EXT)


def test_too_many_ext_fields_are_refused() -> None:
    many = {f"x{number}": "1" for number in range(EXT_FIELD_COUNT_MAX)} | SEND_EXT
    with pytest.raises(RemoteProtocolError, match="ext fields"):
        RequestParser().feed(encode_command(RemotingCommand(310, ext_fields=many)))


NUMBERS = [0, 4, -1, 4.0, 4.5, 1e3, 2**31, -(2**63), 2**63, 2**64, 10**30, True, False, None]
TEXTS = [
    "",
    "4",
    "04",
    " 4",
    "4 ",
    "+4",
    "-4",
    "-0",
    "4.0",
    "4e0",
    "1_0",
    "0x4",
    "\u0664",
    "null",
    "None",
    "nan",
    "Infinity",
]
TEXTS += ["true", "TRUE", "tRuE", "false", "1", "0", "yes", "2147483648", "9223372036854775808", "\u00e4\U0001f600\x01"]
VALUES: st.SearchStrategy[Any] = st.sampled_from(NUMBERS + TEXTS) | st.text() | st.integers() | st.floats()
VALUES |= st.lists(st.integers(), max_size=1) | st.dictionaries(st.text(max_size=2), st.integers(), max_size=1)


@given(
    code=st.sampled_from([10, 310, 320, 11]),
    changes=st.dictionaries(st.sampled_from("abcdefghijklmnz"), VALUES, max_size=3),
    outer=st.dictionaries(
        st.sampled_from(["opaque", "flag", "language", "version", "remark", "extFields", "x"]), VALUES, max_size=2
    ),
    missing=st.sets(st.sampled_from([*SEND_EXT]), max_size=1),
    are_raw=st.booleans(),
)
@example(code=310, changes={"d": 4.0, "k": 1}, outer={}, missing=set(), are_raw=False)
@example(code=310, changes={}, outer={"opaque": "9", "version": 4.0}, missing=set(), are_raw=False)
def test_both_parsers_return_the_same_for_any_values(
    code: int, changes: dict[str, Any], outer: dict[str, Any], missing: set[str], are_raw: bool
) -> None:
    long = dict(zip(SEND_EXT, SEND_EXT_FULL, strict=True)) if code == 10 else {}
    ext = {name: value for name, value in SEND_EXT.items() if name not in missing} | changes
    ext = {long.get(name, name): value for name, value in ext.items()}
    header = {"code": code, "extFields": ext, "flag": 0, "opaque": 9, **outer}
    check_same(json.dumps(header, separators=(",", ":"), ensure_ascii=not are_raw).encode("utf-8", "surrogatepass"))


@given(
    changes=st.dictionaries(st.sampled_from([*ACK_EXT, "x"]), VALUES, max_size=2),
    missing=st.sets(st.sampled_from([*ACK_EXT]), max_size=1),
    words=st.lists(st.sampled_from(TEXTS) | st.integers().map(str), min_size=6, max_size=10),
    has_own_handle=st.booleans(),
    are_raw=st.booleans(),
)
@example(changes={}, missing=set(), words=HANDLE.split(" "), has_own_handle=True, are_raw=False)
@example(changes={}, missing=set(), words=[*HANDLE.split(" "), "9"], has_own_handle=True, are_raw=False)
@example(changes={}, missing=set(), words=HANDLE.replace("broker-a", "").split(" "), has_own_handle=True, are_raw=False)
def test_both_parsers_return_the_same_for_any_ack(
    changes: dict[str, Any], missing: set[str], words: list[str], has_own_handle: bool, are_raw: bool
) -> None:
    ext = {name: value for name, value in ACK_EXT.items() if name not in missing} | changes
    if has_own_handle:
        ext["extraInfo"] = " ".join(words)
    header = {"code": ACK, "extFields": ext, "flag": 0, "opaque": 9}
    check_same(json.dumps(header, separators=(",", ":"), ensure_ascii=not are_raw).encode("utf-8", "surrogatepass"))


@given(
    changes=st.dictionaries(st.sampled_from([*POP_EXT, "x"]), VALUES, max_size=3),
    missing=st.sets(st.sampled_from([*POP_EXT]), max_size=1),
    are_raw=st.booleans(),
)
def test_both_parsers_return_the_same_for_any_pop(changes: dict[str, Any], missing: set[str], are_raw: bool) -> None:
    ext = {name: value for name, value in POP_EXT.items() if name not in missing} | changes
    header = {"code": POP, "extFields": ext, "flag": 0, "opaque": 9}
    check_same(json.dumps(header, separators=(",", ":"), ensure_ascii=not are_raw).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("header", [SEND_JSON_HEADER, ACK_JSON_HEADER])
@given(at=st.integers(0, len(SEND_JSON_HEADER) - 1), to=st.binary(max_size=3), length=st.integers(0, 3))
def test_both_parsers_return_the_same_for_damaged_headers(header: bytes, at: int, to: bytes, length: int) -> None:
    check_same(header[:at] + to + header[at + length :])


FRAMES = [
    json_frame(SEND_JSON_HEADER, b"body"),
    json_frame(SEND_JSON_HEADER, bytes(BODY_COPIED_MAX + 1)),
    json_frame(SEND_JSON_HEADER.replace(b"JAVA", b"GO"), b"body"),
    json_frame(SEND_JSON_HEADER.replace(b"JAVA", b"KLINGON"), b"body"),
    encode_command(RemotingCommand(320, opaque=5, ext_fields={**SEND_EXT, "i": 'q"\\/\u0001\u00e4', "l": "16"})),
    encode_command(RemotingCommand(10, opaque=6, ext_fields=SEND_EXT_FULL)),
    encode_command(RemotingCommand(310, opaque=7, ext_fields={**SEND_EXT, "d": "many"})),
    encode_command(RemotingCommand(11, ext_fields=SEND_EXT)),
    json_frame(ACK_JSON_HEADER, b""),
    json_frame(ACK_JSON_HEADER, b"body"),
    json_frame(ACK_JSON_HEADER.replace(b"495", b"496"), b""),
    json_frame(ACK_JSON_HEADER.replace(b'"offset":"1007"', b'"offset":"01007"'), b""),
    json_frame(ACK_JSON_HEADER.replace(b"60000", b"+60000"), b""),
    json_frame(ACK_JSON_HEADER.replace(b'"g"', b'"h"'), b""),
    encode_command(RemotingCommand(POP, ext_fields=POP_EXT)),
    encode_command(RemotingCommand(310, ext_fields=SEND_EXT, serialize_type=SERIALIZE_ROCKETMQ)),
    struct.pack(">ii", 3, 0),
]


@given(
    frames=st.lists(st.sampled_from(FRAMES), max_size=6),
    cut=st.integers(0, 400),
    length_max=st.sampled_from([1 << 20, 300]),
    header_size_max=st.sampled_from([1 << 16, 200]),
)
def test_twins_parse_the_same_requests(frames: list[bytes], cut: int, length_max: int, header_size_max: int) -> None:
    data = b"".join(frames)
    data = data[: max(len(data) - cut, 0)]
    compiled, python = (read(data, length_max, header_size_max) for read in (read_requests, pure(read_requests)))
    assert compiled == python
    assert [type(command.body) for command in compiled[0]] == [type(command.body) for command in python[0]]


def test_send_command_can_be_copied() -> None:
    (command,) = RequestParser().feed(json_frame(SEND_JSON_HEADER, b"body"))
    assert msgspec.structs.replace(command, body=b"") != command

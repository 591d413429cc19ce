"""Long inputs of the kinds that make a parser quadratic or recurse: linear time, and no error but the parser's own.

The fuzzer's inputs are short, where a quadratic parser is as fast as a linear one.
"""

import time
from collections.abc import Callable

import pytest

from ha.acl.yaml_file import AclFileError, parse_acl_file
from ha.broker.subscription import parse_tag_expression
from ha.config.properties_file import parse_properties
from ha.errors import RemoteProtocolError
from ha.protocol.batch import decode_batch
from ha.protocol.bodies import decode_compressed
from ha.protocol.ha_frame import ReportParser, TransferParser
from ha.protocol.java_json import loads
from ha.protocol.properties import decode_properties, find_property, java_hash
from ha.protocol.record import decode_records
from ha.protocol.remoting import RemotingParser

SIZE = 1 << 18
CPU_S_MAX = 3.0
"""A quadratic parser takes minutes for the size, a linear one a fraction of a second."""

UNITS = [
    *(
        b'"',
        b'{"',
        b'"\\',
        b"\\",
        b"{0:",
        b"{-1:",
        b"{{",
        b"{[",
        b"[",
        b"[[]",
        b"{",
        b'{"a":',
        b'{"$ref":"$',
        b"1",
        b"-",
    ),
    *(b",", b":", b"}", b"]", b" ", b"\n", b"{ ", b', "', b"0:", b"\xff", b"\\u", b"\\ud800", b"tru", b"null,", b"1e9"),
    *(b"\x01", b"\x02", b"a\x01b\x02", b"\x01\x02", b"TAGS\x01", b"\x02TAGS\x01", b"KEYS\x01 \x02", b"a\x01"),
    *(
        b"||",
        b"a||",
        b"=",
        b"\\\n",
        b"#",
        b"\r",
        b"- ",
        b"a: ",
        b"? ",
        b"&a ",
        b"*a",
        b"!",
        b"|\n",
        b"'",
        b"a:\n ",
        b"{a",
    ),
    *(b"\x00", b"\x00\x00\x00\x16" + bytes(18), bytes(12), b"\xff" * 8, b"\x7f\xff\xff\xff", b"%", b"\xda\xa3\x20\xa7"),
]


def frames(data: bytes) -> None:
    RemotingParser().feed(data)


def header(data: bytes) -> None:
    for marks in (0, 1 << 24):
        size = len(data)
        raw = (4 + size).to_bytes(4, "big") + (marks | size).to_bytes(4, "big") + data
        try:
            RemotingParser().feed(raw)
        except RemoteProtocolError:
            pass
    raw = b'{"code":1,"extFields":{"a":"' + data.replace(b'"', b'\\"') + b'"}}'
    RemotingParser().feed((4 + len(raw)).to_bytes(4, "big") + len(raw).to_bytes(4, "big") + raw)


def trickled(data: bytes) -> None:
    """A frame in small chunks, whose bytes must not be copied again for each chunk."""
    parser = RemotingParser()
    parser.feed((4 + SIZE).to_bytes(4, "big") + (2).to_bytes(4, "big") + b"{}")
    for at in range(0, SIZE - 2, 64):
        parser.feed(data[at : at + 64])


def properties(data: bytes) -> None:
    decode_properties(data)
    for name in (b"TAGS", b"KEYS", b"a"):
        find_property(data, name)
    java_hash(str(data, "utf-8", "replace"))


def transfers(data: bytes) -> None:
    list(TransferParser().feed(data))


def text_properties(data: bytes) -> None:
    try:
        parse_properties(str(data[: SIZE // 4], "utf-8", "replace"))
    except ValueError:
        pass


def acl_file(data: bytes) -> None:
    """YAML is parsed by Python: some 100 KB/s, so less of this."""
    try:
        parse_acl_file(data[: SIZE // 256])
    except AclFileError:
        pass


PARSERS: dict[str, Callable[[bytes], object]] = {
    "json": loads,
    "registration": decode_compressed,
    "frames": frames,
    "header": header,
    "trickled": trickled,
    "batch": decode_batch,
    "records": decode_records,
    "properties": properties,
    "reports": ReportParser().feed,
    "transfers": transfers,
    "tags": lambda data: parse_tag_expression(str(data[: SIZE // 4], "utf-8", "replace")),
    "configuration": text_properties,
    "acl file": acl_file,
}


@pytest.mark.parametrize("name", PARSERS)
def test_repetitions(name: str) -> None:
    parse = PARSERS[name]
    slow = []
    for unit in UNITS:
        for text in (unit * (SIZE // len(unit)), b"{" + unit * (SIZE // len(unit)), unit * (SIZE // len(unit)) + b"}"):
            began = time.process_time()
            try:
                parse(text)
            except RemoteProtocolError:
                pass
            took_s = time.process_time() - began
            if took_s > CPU_S_MAX:
                slow.append((unit, took_s))
    assert not slow

"""Inputs that were findings, each with what went wrong: (target, what, input). Replayed by test_replay.py."""

from ha.protocol.batch import encode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from tests.fuzz.remoting import to_fields


def _record(message: Message, store_ms: int = 1_700_000_000_000) -> bytes:
    host = encode_host("10.1.2.3", 10911)
    return encode_record(message, queue_offset=0, physical_offset=0, store_timestamp_ms=store_ms, store_host=host)


def _inner(properties: bytes, body: bytes = encode_batch([(0, b"x", b"")])) -> bytes:
    return _record(Message("b", 0, body, properties, sys_flag=SysFlag.INNER_BATCH))


_DEEP = b'{"x":' + b"[" * 5000

REGRESSIONS: list[tuple[str, str, bytes]] = [
    ("etcd_answers", "an answer nested deeper than Python's stack: RecursionError", b"\x03" + _DEEP),
    ("etcd_answers", "a key's value that is: the same", b"\x07group " + _DEEP),
    ("spark_options", "a record of the commit topic that is: the same", _DEEP),
    ("spark_options", "an option that is: the same", to_fields({"path": "x", "startingOffsets": "[" * 5000})),
    ("spark_options", "paths that are: the same", to_fields({"paths": "[" * 5000})),
    ("admin_credentials", "a form of more fields than are read: ValueError", b"&".join([b"a=1"] * 11)),
    ("arrow_records", "INNER_BASE that is no number: ValueError", _inner(b"INNER_BASE\x01x\x02")),
    ("arrow_records", "INNER_BASE beyond an int64: OverflowError", _inner(b"INNER_BASE\x01%b\x02" % (b"9" * 20))),
    ("arrow_records", "an inner batch that is none: RemoteProtocolError came out", _inner(b"", b"no batch")),
    (
        "arrow_records",
        "a store time beyond what microseconds can say, in a batch with inner batches: OverflowError",
        _inner(b"") + b"--next--" + _record(Message("t", 0, b""), store_ms=0x0020_010D_B800_0000),
    ),
    (
        "arrow_records",
        "a body of a few bytes made 64 MiB be allocated before it was inflated",
        _record(Message("t", 0, b"\x04\x22M\x18`@\x82", sys_flag=SysFlag.COMPRESSED | SysFlag.COMPRESSION_LZ4)),
    ),
    ("arrow_store", "a queue entry that points before the log: IndexError", b"\x0e\x00]7O\x01\r\x80"),
    ("admin_credentials", "a form token whose proof is no UTF-8: UnicodeEncodeError", b"999999999999..\xff"),
    ("queue_ends", "content with a guard that is right, but none that was written: an exception at the start", b""),
    ("queue_ends", "the same, no UTF-8", b'{"\x94T":{}'),
]

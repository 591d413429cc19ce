"""Writes a large commitlog that uses little disk space: bodies consist of zeros and are holes in the files.

Every record is valid, including sizes, queue offsets, physical offsets, times, keys and the CRC of its body. A record
uses only the one or two pages of its header and properties. Queues and index are not written. The same arguments
produce the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from ha.protocol.record import CRC_MASK, FILLER_SIZE_MIN, Message
from ha.protocol.record_encoding import encode_filler, encode_record
from ha.protocol.store_files import segment_name

BEGIN_MS = 1_790_000_000_000
STORE_HOST = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
_BODY_AT = 88
_PAGE = 4096


@dataclass(frozen=True)
class SparseStore:
    """Parameters of a store. Sizes in bytes; segments use the sizes in `body_bytes` in turn."""

    root: Path
    segment_count: int
    segment_bytes: int = 1 << 30
    body_bytes: Sequence[int] = (64 << 10, 64 << 10, 64 << 10, 1024)
    topics: Sequence[str] = ("flights", "delays", "weather")
    queues: int = 4
    messages_per_ms: int = 20


@dataclass(frozen=True)
class Written:
    """Result; `end` is the physical offset after the last record."""

    record_count: int
    end: int


def write_sparse_store(wanted: SparseStore) -> Written:
    """Writes `root`/commitlog. Raises OSError if it exists already, or if the disk is full."""
    commitlog = wanted.root / "commitlog"
    commitlog.mkdir(parents=True)
    number = 0
    offsets: dict[tuple[str, int], int] = {}
    end = 0
    for segment in range(wanted.segment_count):
        start = segment * wanted.segment_bytes
        body_bytes = wanted.body_bytes[segment % len(wanted.body_bytes)]
        is_last = segment == wanted.segment_count - 1
        with (commitlog / segment_name(start)).open("wb", buffering=1 << 20) as file:
            os.truncate(file.fileno(), wanted.segment_bytes)
            position = 0
            for head, hole, tail in _records(wanted, number, body_bytes, offsets):
                size = len(head) + hole + len(tail)
                if position + size + FILLER_SIZE_MIN > wanted.segment_bytes:
                    break
                _place(head, start + position)
                file.write(head)
                if hole >= _PAGE:
                    file.seek(position + len(head) + hole)
                else:
                    file.write(bytes(hole))
                file.write(tail)
                topic, queue_id = _queue_of(wanted, number)
                offsets[topic, queue_id] = offsets.get((topic, queue_id), 0) + 1
                position += size
                number += 1
            end = start + position
            if not is_last:
                file.write(encode_filler(wanted.segment_bytes - position))
    return Written(number, end)


def _queue_of(wanted: SparseStore, number: int) -> tuple[str, int]:
    return wanted.topics[number % len(wanted.topics)], number // len(wanted.topics) % wanted.queues


def _records(
    wanted: SparseStore, first: int, body_bytes: int, offsets: dict[tuple[str, int], int]
) -> Iterator[tuple[bytearray, int, bytes]]:
    """Yields (head with body length and CRC, body size, rest) per record; the caller increments `offsets`."""
    crc = (crc32(bytes(body_bytes)) & CRC_MASK).to_bytes(4, "big")
    number = first
    while True:
        topic, queue_id = _queue_of(wanted, number)
        now_ms = BEGIN_MS + number // wanted.messages_per_ms
        properties = (
            f"UNIQ_KEY\x01{number * 0x9E3779B97F4A7C15 % (1 << 128):032X}\x02KEYS\x01N{number % 5000:05d}\x02"
            f"TAGS\x01{'late' if number % 7 == 0 else 'early'}\x02WAIT\x01true\x02"
        )
        message = Message(
            topic=topic,
            queue_id=queue_id,
            body=b"",
            properties=properties.encode(),
            born_timestamp_ms=now_ms - number % 40,
        )
        raw = bytearray(
            encode_record(
                message,
                queue_offset=offsets.get((topic, queue_id), 0),
                physical_offset=0,
                store_timestamp_ms=now_ms,
                store_host=STORE_HOST,
            )
        )
        head = raw[:_BODY_AT]
        head[:4] = (len(raw) + body_bytes).to_bytes(4, "big")
        head[8:12] = crc
        head[84:88] = body_bytes.to_bytes(4, "big")
        yield head, body_bytes, bytes(raw[_BODY_AT:])
        number += 1


def _place(head: bytearray, physical_offset: int) -> None:
    head[28:36] = physical_offset.to_bytes(8, "big")

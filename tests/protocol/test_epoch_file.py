"""The epoch file, against what RocketMQ wrote (spec/vectors)."""

import pytest

from ha.errors import RemoteProtocolError
from ha.protocol.epoch_file import EpochEntry, decode_epoch_file, encode_epoch_file

WRITTEN = [
    (b"2\n773307083\n7-7000\n8-8000\n", [EpochEntry(7, 7000), EpochEntry(8, 8000)]),
    (b"2\n452276649\n1-0\n3-1535\n", [EpochEntry(1, 0), EpochEntry(3, 1535)]),
]


@pytest.mark.parametrize(("content", "entries"), WRITTEN)
def test_epoch_file_of_rocketmq(content: bytes, entries: list[EpochEntry]) -> None:
    assert decode_epoch_file(content) == entries
    assert encode_epoch_file(entries) == content


def test_a_crc_of_0_is_not_checked() -> None:
    assert decode_epoch_file(b"1\n0\n7-7000\n") == [EpochEntry(7, 7000)]


def test_no_entries() -> None:
    assert decode_epoch_file(encode_epoch_file([])) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"2\n773307083\n7-7000\n8-8001\n",
        b"3\n773307083\n7-7000\n8-8000\n",
        b"2\n0\n7-7000\n",
        b"1\n0\n7;7000\n",
        b"1\n0\n7-7000-1\n",
        b"2\n0\n8-7000\n7-8000\n",
        b"2\n0\n7-8000\n8-8000\n",
        b"x\n0\n",
    ],
)
def test_invalid_epoch_file_is_refused(content: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_epoch_file(content)

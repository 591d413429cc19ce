"""Byte 0 restored from the rest of the first record."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.replication.first_byte import FirstByte

RECORD = bytes.fromhex("00000120daa320a7") + b"the rest"


@pytest.mark.parametrize("size", range(1, 15))
def test_byte_0_is_restored_from_chunks_of_any_size(size: int) -> None:
    parser, received = FirstByte(), RECORD[1:]
    for at in range(0, len(received), size):
        restored = parser.feed(memoryview(received[at : at + size]))
        if restored is not None:
            assert at + size >= 7
            assert restored == RECORD[: at + size + 1]
            return
        assert at + size < 7
    pytest.fail("never restored")


def test_version_2_records_count_too() -> None:
    record = bytes.fromhex("00000120daa320ab")
    restored = FirstByte().feed(memoryview(record[1:]))
    assert restored is not None
    assert bytes(restored) == record


@given(st.binary(min_size=7).filter(lambda b: b[3:7] not in (RECORD[4:8], bytes.fromhex("daa320ab"))))
def test_anything_else_is_refused(received: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        FirstByte().feed(memoryview(received))

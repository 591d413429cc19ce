"""HA messages with epochs, against the recorded dialogue of two 5.5.0 brokers in controller mode, in every cut."""

from collections.abc import Iterable
from typing import Any

import pytest

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.auto_switch_frame import (
    EPOCH_COUNT_MAX,
    EpochFrameHeader,
    EpochReport,
    MasterHandshake,
    MasterMessageParser,
    SlaveHandshake,
    SlaveMessageParser,
    speaks_epochs,
)
from ha.protocol.epoch_file import EpochEntry
from ha.protocol.ha_frame import TransferBody, encode_report

from .golden import ha_connections

CONNECTIONS = [
    pytest.param(connection, id=f"conn{connection['connection']}") for connection in ha_connections("5.5.0-autoswitch")
]


def chunks(raw: bytes, cut: str, connection: dict[str, Any], way: str) -> list[bytes]:
    if cut == "whole":
        return [raw]
    if cut == "bytes":
        return [raw[at : at + 1] for at in range(len(raw))]
    return [raw[at : at + size] for _, direction, at, size in connection["segments"] if direction == way]


def master_events(pieces: Iterable[bytes]) -> list[MasterHandshake | tuple[EpochFrameHeader, bytes]]:
    """Feed the pieces to one parser, and put bodies together again."""
    parser = MasterMessageParser()
    found: list[Any] = []
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, TransferBody):
                header, body = found[-1]
                assert event.physical_offset == header.physical_offset + len(body)
                found[-1] = header, body + bytes(event.chunk)
            else:
                found.append(event if isinstance(event, MasterHandshake) else (event, b""))
    return found


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("cut", ["whole", "bytes", "segments"])
def test_recorded_master_messages(connection: dict[str, Any], cut: str) -> None:
    stream = connection["m2s"]
    expected: list[Any] = []
    for frame in connection["frames"]:
        if frame["dir"] != "m2s":
            continue
        if frame["type"] == "handshake":
            epochs = tuple(EpochEntry(epoch, start) for epoch, start in frame["epochs"])
            expected.append(MasterHandshake(frame["maxPhyOffset"], epochs))
            continue
        header = EpochFrameHeader(
            frame["offset"], frame["bodySize"], frame["epoch"], frame["epochStartOffset"], frame["confirmOffset"]
        )
        end = frame["pos"] + frame["length"]
        expected.append((header, stream[end - frame["bodySize"] : end]))
    found = master_events(chunks(stream, cut, connection, "m2s"))
    assert found == expected
    encoded = [
        event.encode() if isinstance(event, MasterHandshake) else event[0].encode() + event[1] for event in found
    ]
    assert b"".join(encoded) == stream


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("cut", ["whole", "bytes", "segments"])
def test_recorded_slave_messages(connection: dict[str, Any], cut: str) -> None:
    expected: list[SlaveHandshake | EpochReport] = []
    for frame in connection["frames"]:
        if frame["dir"] == "s2m" and frame["type"] == "handshake":
            from_last, learner = frame["isSyncFromLastFile"] == 1, frame["isAsyncLearner"] == 1
            expected.append(SlaveHandshake(frame["slaveBrokerId"], from_last, learner))
        elif frame["dir"] == "s2m":
            expected.append(EpochReport(frame["maxOffset"]))
    parser = SlaveMessageParser()
    found = [message for piece in chunks(connection["s2m"], cut, connection, "s2m") for message in parser.feed(piece)]
    assert found == expected
    assert b"".join(message.encode() for message in found) == connection["s2m"]


def test_a_history_of_two_epochs() -> None:
    """As observed of a 5.3.3 broker (spec/vectors)."""
    seen = bytes.fromhex("00000001 00000018 0000000000000998 00000003")
    seen += bytes.fromhex("00000001 0000000000000000 00000003 00000000000005ff")
    handshake = MasterHandshake(2456, (EpochEntry(1, 0), EpochEntry(3, 1535)))
    assert master_events([seen]) == [handshake]
    assert handshake.encode() == seen
    assert SlaveHandshake(2).encode() == bytes.fromhex("00000001 0000 0000 0000000000000002")


def test_frame_before_the_start_of_its_epoch() -> None:
    """A RocketMQ master cuts at the end of an epoch and names the next one."""
    header = EpochFrameHeader(0, 1535, 3, 1535, 0)
    assert master_events([header.encode() + bytes(1535)]) == [(header, bytes(1535))]


def test_handshake_has_the_newest_epochs_of_a_long_history() -> None:
    epochs = tuple(EpochEntry(number, number * 10) for number in range(EPOCH_COUNT_MAX + 5))
    assert master_events([MasterHandshake(99_999, epochs).encode()]) == [MasterHandshake(99_999, epochs[5:])]


@pytest.mark.parametrize(
    "raw",
    [
        "00000000",  # a state of neither
        "00000003",
        "00000001 0000000b 0000000000000998 00000003",  # no multiple of 12
        "00000001 fffffff4 0000000000000998 00000003",
        "00000001 00002ee4 0000000000000998 00000003",  # more epochs than a slave takes
        "00000001 00000000 0000000000000998 00000003",  # a last epoch of no history
        "00000001 0000000c 0000000000000998 00000003 00000001 0000000000000000",  # another last epoch
        "00000001 00000000 ffffffffffffffff ffffffff",
        "00000001 00000018 0000000000000998 00000001 00000003 0000000000000000 00000001 0000000000000010",
        "00000001 00000018 0000000000000998 00000003 00000001 0000000000000010 00000003 0000000000000000",
        "00000002 ffffffff 0000000000000000 00000001 0000000000000000 0000000000000000",
        "00000002 00000001 ffffffffffffffff 00000001 0000000000000000 0000000000000000",
        "00000002 00000000 fffffffffffffffe 00000001 0000000000000000 0000000000000000",
        "00000002 7fffffff 0000000000000000 00000001 0000000000000000 0000000000000000",
    ],
)
def test_invalid_master_messages_are_refused(raw: str) -> None:
    with pytest.raises(RemoteProtocolError):
        master_events([bytes.fromhex(raw)])


@pytest.mark.parametrize(
    "raw",
    [
        "00000000",
        "00000001 0002 0000 0000000000000002",
        "00000001 0000 ffff 0000000000000002",
        "00000001 0000 0004 0000000000000002",
        "00000001 0000 0002 0000000000000002 0000000000000000",
        "00000001 0000 0000 ffffffffffffffff",
        "00000002 ffffffffffffffff",
    ],
)
def test_invalid_slave_messages_are_refused(raw: str) -> None:
    with pytest.raises(RemoteProtocolError):
        SlaveMessageParser().feed(bytes.fromhex(raw))


@pytest.mark.parametrize(("from_last", "is_learner"), [(False, False), (True, True)])
def test_a_handshake_with_a_run_id(from_last: bool, is_learner: bool) -> None:
    handshake = SlaveHandshake(2, from_last, is_learner, 0x0102030405060708)
    raw = handshake.encode()
    assert raw == bytes.fromhex(f"00000001 000{from_last:d} 000{is_learner + 2} 0000000000000002 0102030405060708")
    for cut in range(1, len(raw)):
        parser = SlaveMessageParser()
        assert parser.feed(raw[:cut]) == []
        assert parser.feed(raw[cut:] + EpochReport(5).encode()) == [handshake, EpochReport(5)]


GIB_4 = 1 << 32


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (b"", None),
        (b"\0\0", None),
        (SlaveHandshake(2).encode(), True),
        (SlaveHandshake(2**31, syncs_from_last_file=True, is_learner=True).encode() + b"x", True),
        (SlaveHandshake(2).encode()[:15], None),
        (encode_report(0), False),
        (encode_report(433), False),
        (SlaveHandshake(2, run_id=7).encode(), True),
        (encode_report(GIB_4 + 4), False),
        (encode_report(GIB_4), None),
        (encode_report(GIB_4) + encode_report(GIB_4), False),
        (encode_report(GIB_4 + 0x10001) * 2, False),
        (b"\xff" * 8, False),
        (EpochReport(433).encode(), False),
    ],
)
def test_detects_the_protocol_of_a_slave(received: bytes, expected: bool | None) -> None:
    assert speaks_epochs(received) is expected


def test_invalid_values_cannot_be_encoded() -> None:
    with pytest.raises(LocalProtocolError):
        EpochReport(-1).encode()
    for offset, size in ((-2, 0), (-1, 1), (0, -1)):
        with pytest.raises(LocalProtocolError):
            EpochFrameHeader(offset, size, 1, 0, 0).encode()

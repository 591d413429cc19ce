"""HA frames against the recorded dialogues of real brokers, in every cut."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.ha_frame import (
    ReportParser,
    TransferBody,
    TransferHeader,
    TransferParser,
    encode_report,
    encode_transfer_header,
)

from .golden import ha_connections

CAPTURES = ("4.9.7-default", "5.5.0-default")
CONNECTIONS = [
    pytest.param(connection, id=f"{capture}-conn{connection['connection']}")
    for capture in CAPTURES
    for connection in ha_connections(capture)
]


def cut_at(raw: bytes, ends: Iterable[int]) -> Iterator[bytes]:
    start = 0
    for end in ends:
        yield raw[start:end]
        start = end
    yield raw[start:]


def segment_ends(connection: dict[str, Any], way: str) -> list[int]:
    return [position + length for _, direction, position, length in connection["segments"] if direction == way]


def frames_of(chunks: Iterable[bytes]) -> list[tuple[int, bytes]]:
    """Feed `chunks` to one parser and put its events together again: (physical offset, body) of each frame."""
    parser = TransferParser()
    frames: list[tuple[int, bytearray, int]] = []
    for chunk in chunks:
        for event in parser.feed(chunk):
            if isinstance(event, TransferHeader):
                frames.append((event.physical_offset, bytearray(), event.body_size))
            else:
                offset, body, _ = frames[-1]
                assert event.physical_offset == offset + len(body)
                assert len(event.chunk) > 0
                body += event.chunk
    assert all(len(body) == size for _, body, size in frames[:-1])
    return [(offset, bytes(body)) for offset, body, _ in frames]


def recorded_transfers(connection: dict[str, Any]) -> list[tuple[int, bytes]]:
    stream = connection["m2s"]
    return [
        (frame["physicOffset"], stream[frame["pos"] + 12 : frame["pos"] + 12 + frame["bodySize"]])
        for frame in connection["frames"]
        if frame["dir"] == "m2s"
    ]


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("cut", ["whole", "bytes", "segments"])
def test_recorded_transfers_are_reproduced(connection: dict[str, Any], cut: str) -> None:
    stream = connection["m2s"]
    ends = {"whole": [], "bytes": range(1, len(stream)), "segments": segment_ends(connection, "m2s")}[cut]
    assert frames_of(cut_at(stream, ends)) == recorded_transfers(connection)


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_recorded_transfers_with_trailing_bytes(connection: dict[str, Any]) -> None:
    expected = recorded_transfers(connection)
    assert frames_of([connection["m2s"] + bytes(11)]) == expected
    assert frames_of([connection["m2s"] + encode_transfer_header(77, 5) + b"abc"]) == [*expected, (77, b"abc")]


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_recorded_transfers_are_encoded_to_their_bytes(connection: dict[str, Any]) -> None:
    encoded = b"".join(
        encode_transfer_header(offset, len(body)) + body for offset, body in recorded_transfers(connection)
    )
    assert encoded == connection["m2s"]


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_recorded_reports(connection: dict[str, Any]) -> None:
    stream = connection["s2m"]
    expected = [frame["offset"] for frame in connection["frames"] if frame["dir"] == "s2m"]
    assert b"".join(map(encode_report, expected)) == stream

    for ends in (segment_ends(connection, "s2m"), range(1, len(stream))):
        parser = ReportParser()
        reports = [parser.feed(chunk) for chunk in cut_at(stream, ends)]
        assert [offset for offset in reports if offset is not None] == expected
    assert ReportParser().feed(stream) == expected[-1]
    assert ReportParser().feed(stream + b"\0" * 7) == expected[-1]


def test_last_complete_report_of_a_chunk_is_returned() -> None:
    parser = ReportParser()
    assert parser.feed(encode_report(0) + encode_report(4096)) == 4096
    assert parser.feed(encode_report(5000)[:3]) is None
    assert parser.feed(encode_report(5000)[3:] + encode_report(6000)[:7]) == 5000
    assert parser.feed(encode_report(6000)[7:]) == 6000
    assert parser.feed(b"") is None


@pytest.mark.parametrize("offsets", [(4096, 0), (2**62, 0, 0), (5, 7, 6, 8), (-1, 0), (-5, -7)])
def test_decreasing_reports_in_a_chunk_are_refused(offsets: tuple[int, ...]) -> None:
    """Noise followed by zeros is not a request for offset 0."""
    with pytest.raises(RemoteProtocolError):
        ReportParser().feed(b"".join(offset.to_bytes(8, "big", signed=True) for offset in offsets))


def test_heartbeat_of_the_specification() -> None:
    assert encode_transfer_header(13552, 0) == bytes.fromhex("00000000000034f0 00000000")
    (event,) = TransferParser().feed(encode_transfer_header(13552, 0))
    assert isinstance(event, TransferHeader)
    assert event.is_heartbeat
    assert event.physical_offset == 13552


def test_header_comes_before_its_body_and_bodies_are_views() -> None:
    parser = TransferParser()
    chunk = bytearray(encode_transfer_header(100, 4) + b"ab")
    header, body = parser.feed(chunk)
    assert header == TransferHeader(100, 4)
    assert isinstance(body, TransferBody)
    assert (body.physical_offset, bytes(body.chunk), body.chunk.obj is chunk) == (100, b"ab", True)
    assert not parser.is_between_frames
    assert [bytes(event.chunk) for event in parser.feed(b"cd") if isinstance(event, TransferBody)] == [b"cd"]
    assert parser.is_between_frames


def test_negative_report_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        ReportParser().feed(b"\xff" * 8)


@pytest.mark.parametrize(("offset", "size"), [(0, -1), (-1, 0), (0, 1001), (0, 2**31 - 1)])
def test_invalid_transfer_header_is_refused_after_valid_events(offset: int, size: int) -> None:
    raw = (
        encode_transfer_header(5, 1)
        + b"x"
        + offset.to_bytes(8, "big", signed=True)
        + size.to_bytes(4, "big", signed=True)
    )
    events = TransferParser(body_size_max=1000).feed(raw)
    assert [type(event) for event in itertools.islice(events, 2)] == [TransferHeader, TransferBody]
    with pytest.raises(RemoteProtocolError):
        next(events)


def test_values_out_of_range_are_local_errors() -> None:
    for offset in (-1, 2**63):
        with pytest.raises(LocalProtocolError):
            encode_report(offset)
    for offset, size in ((-1, 0), (0, -1), (2**63, 0), (0, 2**31)):
        with pytest.raises(LocalProtocolError):
            encode_transfer_header(offset, size)


frames = st.lists(st.tuples(st.integers(0, 2**62), st.binary(max_size=40)), max_size=6)


@given(frames, st.data())
def test_transfers_are_parsed_from_any_chunks(sent: list[tuple[int, bytes]], data: st.DataObject) -> None:
    raw = b"".join(encode_transfer_header(offset, len(body)) + body for offset, body in sent)
    ends = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    assert frames_of(cut_at(raw, ends)) == sent

"""The HA protocol with epochs in both directions, and the epoch file."""

import itertools

from ha.errors import RemoteProtocolError
from ha.protocol.auto_switch_frame import (
    EpochFrameHeader,
    EpochReport,
    MasterHandshake,
    MasterMessageParser,
    SlaveHandshake,
    SlaveMessageParser,
)
from ha.protocol.epoch_file import EpochEntry, decode_epoch_file, encode_epoch_file
from ha.protocol.ha_frame import TransferBody
from tests.fuzz.harness import Harness, pieces_of

BODY_SIZE_MAX = 5000
HISTORY = (EpochEntry(1, 0), EpochEntry(2, 5000), EpochEntry(7, 1 << 33))


def parsers(data: bytes) -> None:
    """Both directions, whole and in pieces: the same messages, and the same end if the bytes are refused."""
    said, refused = from_slave([data])
    told, refused_by_slave = from_master([data])
    for cut in pieces_of(data):
        in_pieces, refused_in_pieces = from_slave(cut)
        assert refused_in_pieces == refused
        assert in_pieces[: len(said)] == said
        assert from_master(cut) == (told, refused_by_slave)
    for message in said:
        assert SlaveMessageParser().feed(message.encode()) == [message]


def from_slave(chunks: list[bytes]) -> tuple[list[SlaveHandshake | EpochReport], bool]:
    """The messages of a slave, and whether the bytes were refused. Of a refused chunk no message is known."""
    parser = SlaveMessageParser()
    found: list[SlaveHandshake | EpochReport] = []
    for chunk in chunks:
        try:
            found += parser.feed(chunk)
        except RemoteProtocolError:
            return found, True
    return found, False


def from_master(chunks: list[bytes]) -> tuple[list[MasterHandshake | EpochFrameHeader | tuple[int, bytes]], bool]:
    """The messages of a master, bodies joined, as (offset, bytes), and whether the bytes were refused."""
    parser = MasterMessageParser(body_size_max=BODY_SIZE_MAX)
    found: list[MasterHandshake | EpochFrameHeader | tuple[int, bytes]] = []
    for chunk in chunks:
        try:
            for event in parser.feed(chunk):
                if not isinstance(event, TransferBody):
                    found.append(event)
                    continue
                assert len(event.chunk)
                last = found[-1]
                if isinstance(last, tuple):
                    assert event.physical_offset == last[0] + len(last[1])
                    found[-1] = (last[0], last[1] + bytes(event.chunk))
                else:
                    assert isinstance(last, EpochFrameHeader)
                    assert event.physical_offset == last.physical_offset
                    found.append((event.physical_offset, bytes(event.chunk)))
        except RemoteProtocolError:
            return found, True
    return found, False


def epoch_file(data: bytes) -> None:
    """A history, which is the same written and read again, or a refusal."""
    try:
        entries = decode_epoch_file(data)
    except RemoteProtocolError:
        return
    assert decode_epoch_file(encode_epoch_file(entries)) == entries
    assert all(before < after for before, after in itertools.pairwise(entries))


def frame_seeds() -> list[bytes]:
    """Dialogues."""
    frames = [
        EpochFrameHeader(offset, size, 7, 5000, 4990).encode() + bytes(size)
        for offset, size in ((5000, 0), (5000, 100), (-1, 0))
    ]
    return [
        SlaveHandshake(3, syncs_from_last_file=True).encode() + EpochReport(5000).encode(),
        SlaveHandshake(2, is_learner=True).encode() + EpochReport(0).encode() * 2,
        MasterHandshake(0).encode() + frames[0],
        MasterHandshake(1 << 34, HISTORY).encode() + b"".join(frames),
        *frames,
    ]


WORDS = (
    *(EpochReport(offset).encode() for offset in (0, 5000, (1 << 63) - 1)),
    SlaveHandshake(1).encode(),
    MasterHandshake(5000, HISTORY[:1]).encode(),
    b"\x00\x00\x00\x01",
    b"\x00\x00\x00\x02",
    b"\x00\x00\x00\x0c",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
)

HARNESSES = {
    "auto_switch_frames": Harness(run=parsers, seeds=frame_seeds, words=WORDS),
    "epoch_file": Harness(
        run=epoch_file,
        seeds=lambda: [encode_epoch_file(HISTORY), encode_epoch_file([]), b"1\n0\n3-70\n"],
        words=(b"\n", b"-", b"1\n0\n", b"2\n0\n", b"9223372036854775807"),
    ),
}

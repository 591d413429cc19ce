"""Bodies compressed as RocketMQ's clients do it, and what is done about those that can't be undone."""

import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from importlib import import_module

import pytest

from ha.client.options import ClientOptions
from ha.errors import RemoteProtocolError
from ha.protocol.compression import (
    BODY_SIZE_MAX,
    Compression,
    compressed,
    inflated,
    inflated_begin,
    kind_of,
)

BODY = b"all work and no play " * 500
KINDS = [Compression.ZLIB, Compression.LZ4, Compression.ZSTD]
PACKAGES = {Compression.LZ4: "lz4.frame", Compression.ZSTD: "zstandard"}


def need(kind: Compression) -> None:
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_compression_round_trip(kind: Compression) -> None:
    need(kind)
    smaller, flags = compressed(BODY, kind)
    assert len(smaller) < len(BODY)
    assert flags == {Compression.ZLIB: 0x301, Compression.LZ4: 0x101, Compression.ZSTD: 0x201}[kind]
    assert kind_of(flags) is kind
    assert inflated(smaller, kind, len(BODY)) == BODY


@pytest.mark.parametrize("kind", KINDS)
def test_body_that_does_not_get_shorter_is_unchanged(kind: Compression) -> None:
    need(kind)
    assert compressed(b"\x00\x91\x17", kind) == (b"\x00\x91\x17", 0)
    assert compressed(BODY, Compression.NONE) == (BODY, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["cut", "garbage"])
def test_undecompressable_body_is_a_remote_error(kind: Compression, harm: str) -> None:
    need(kind)
    smaller, _ = compressed(BODY, kind)
    broken = smaller[: len(smaller) // 2] if harm == "cut" else b"garbage" * 5
    with pytest.raises(RemoteProtocolError, match="inflate"):
        inflated(broken, kind, BODY_SIZE_MAX)


@pytest.mark.parametrize("kind", KINDS)
def test_size_limit_is_exact(kind: Compression) -> None:
    need(kind)
    smaller, _ = compressed(BODY, kind)
    with pytest.raises(RemoteProtocolError, match=f"inflates to more than {len(BODY) - 1} bytes"):
        inflated(smaller, kind, len(BODY) - 1)
    assert inflated_begin(smaller, kind, len(BODY) - 1) == (BODY[:-1], False)
    assert inflated_begin(smaller, kind, len(BODY)) == (BODY, True)
    begun = inflated_begin(smaller[:-1], kind, len(BODY) + 10)
    assert begun is not None
    assert BODY.startswith(begun[0])
    assert not begun[1]


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_body_with_all_bytes_of_its_content_is_truncated(kind: Compression) -> None:
    """Only its last byte is missing, which is of a checksum or an end mark; the content is as long as is accepted."""
    need(kind)
    whole = summed_zstd(BODY) if kind is Compression.ZSTD else compressed(BODY, kind)[0]
    assert inflated(whole, kind, len(BODY)) == BODY
    for size_max in (len(BODY), len(BODY) + 1, BODY_SIZE_MAX):
        with pytest.raises(RemoteProtocolError, match="does not inflate: it is truncated"):
            inflated(whole[:-1], kind, size_max)
    with pytest.raises(RemoteProtocolError, match=f"inflates to more than {len(BODY) - 1} bytes"):
        inflated(whole[:-1], kind, len(BODY) - 1)


def summed_zstd(body: bytes) -> bytes:
    """A frame that ends with a checksum of its content."""
    return bytes(pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(body))


def streamed_zstd(body: bytes) -> bytes:
    """As Java's ZstdOutputStream writes it: a frame that does not say how long its content is."""
    compressor = pytest.importorskip("zstandard").ZstdCompressor(level=5).compressobj()
    return bytes(compressor.compress(body) + compressor.flush())


def modest_zstd(body: bytes) -> bytes:
    """A frame whose header says that it holds 1 KB, whatever follows (RFC 8878: descriptor, window, size, blocks)."""
    magic, descriptor, window = 0xFD2FB528, 0x40, 0x60  # a size of 2 bytes, 256 less; a window of 4 MiB
    block_size = 1 << 17
    blocks = [struct.pack("<I", at_end | 1 << 1 | block_size << 3)[:3] + b"x" for at_end in (*[0] * 511, 1)]
    return struct.pack("<IBBH", magic, descriptor, window, 1024 - 256) + b"".join(blocks)


def lying_lz4(said_size: int) -> Callable[[bytes], bytes]:
    """Makes frames whose header says that they hold `said_size` bytes."""

    def make(body: bytes) -> bytes:
        compressor = pytest.importorskip("lz4.frame").LZ4FrameCompressor()
        return bytes(compressor.begin(source_size=said_size) + compressor.compress(body)) + bytes(4)  # the end mark

    return make


BOMBS: dict[str, tuple[Compression, Callable[[bytes], bytes]]] = {
    "zlib": (Compression.ZLIB, lambda body: zlib.compress(body, 9)),
    "lz4": (Compression.LZ4, lambda body: compressed(body, Compression.LZ4)[0]),
    "lz4 that says it is short": (Compression.LZ4, lying_lz4(1024)),
    "lz4 that says it is long": (Compression.LZ4, lying_lz4(1 << 40)),
    "zstd": (Compression.ZSTD, lambda body: compressed(body, Compression.ZSTD)[0]),
    "zstd of unknown size": (Compression.ZSTD, streamed_zstd),
    "zstd that says it is short": (Compression.ZSTD, modest_zstd),
}


@pytest.mark.parametrize(("kind", "make"), BOMBS.values(), ids=BOMBS)
def test_decompression_bomb_is_refused(kind: Compression, make: Callable[[bytes], bytes]) -> None:
    need(kind)
    bomb = make(bytes(64 << 20))
    assert len(bomb) < 1 << 19
    size_max = 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="inflate"):
            inflated(bomb, kind, size_max)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * size_max + len(bomb) + (1 << 17)


def test_excessive_zstd_window_is_refused() -> None:
    """The window is the decoder's own memory: a header of 6 bytes may ask for 3.75 TB of it (RFC 8878, 3.1.1.1.2)."""
    need(Compression.ZSTD)
    frame = struct.pack("<IBB", 0xFD2FB528, 0, (27 - 10) << 3) + b"\x03\x00\x10x"
    with pytest.raises(RemoteProtocolError, match="too much memory"):
        inflated(frame, Compression.ZSTD, BODY_SIZE_MAX)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_body_may_be_compressed(kind: Compression) -> None:
    need(kind)
    compressors: dict[Compression, Callable[[bytes], bytes]] = {Compression.ZLIB: zlib.compress}
    if kind in PACKAGES:
        compressors[kind] = import_module(PACKAGES[kind]).compress
    empty = compressors[kind](b"")
    assert inflated(empty, kind, BODY_SIZE_MAX) == b""


def test_compression_type_of_clients_with_only_zlib() -> None:
    assert kind_of(0x1) is Compression.ZLIB
    assert kind_of(0x300) is Compression.NONE
    assert inflated(zlib.compress(BODY), kind_of(0x1), BODY_SIZE_MAX) == BODY


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_missing_package(kind: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    with pytest.raises(ValueError, match="is not installed"):
        ClientOptions(compression=kind)
    assert inflated(b"whatever", kind, BODY_SIZE_MAX) is None

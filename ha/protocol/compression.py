"""Compresses and decompresses bodies as RocketMQ's clients do: with zlib, and with lz4 and zstd if their packages are
installed.

sysFlag says whether and how a body is compressed. Without a compression type in sysFlag, a compressed body is in zlib's
format, the only one that clients up to 4.9.2 support. lz4 means LZ4's frame format. Sources: ZlibCompressor,
Lz4Compressor, ZstdCompressor, MessageSysFlag, CompressionType.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any

from ha.errors import RemoteProtocolError
from ha.protocol.codes import SysFlag

BODY_SIZE_MAX = 4 * 1024 * 1024
"""Default maximum size of a body in bytes, after decompression (RocketMQ: maxMessageSize)"""
_ZSTD_WINDOW_MAX = 8 * 1024 * 1024
"""Maximum window size of a zstd frame in bytes, unless longer bodies are accepted: RFC 8878 recommends that encoders
don't exceed it and that decoders support it."""
_ZLIB_LEVEL = 5
"""Level of zlib and zstd compression: RocketMQ's default compressLevel."""


class Compression(Enum):
    """Compression types of a producer."""

    NONE = "none"
    ZLIB = "zlib"
    LZ4 = "lz4"
    """Needs the package lz4."""
    ZSTD = "zstd"
    """Needs the package zstandard."""


_FLAGS = {
    Compression.ZLIB: SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZLIB,
    Compression.LZ4: SysFlag.COMPRESSED | SysFlag.COMPRESSION_LZ4,
    Compression.ZSTD: SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZSTD,
}
_KIND_OF_FLAG = {SysFlag.COMPRESSION_LZ4: Compression.LZ4, SysFlag.COMPRESSION_ZSTD: Compression.ZSTD}
_MODULES = {Compression.LZ4: "lz4.frame", Compression.ZSTD: "zstandard"}


def check_installed(compression: Compression) -> None:
    """Raises ValueError if `compression` needs a package that is not installed."""
    if compression in _MODULES and _module(compression) is None:
        package = _MODULES[compression].partition(".")[0]
        raise ValueError(f"compression {compression.value} needs the package {package}, which is not installed")


def compressed(body: bytes, compression: Compression) -> tuple[bytes, int]:
    """Returns the compressed body and its bits of sysFlag; `body` itself and 0 if compression doesn't make it shorter.

    The package of the compression type must be installed: call `check_installed` first.
    """
    if compression is Compression.NONE:
        return body, 0
    smaller = _COMPRESSORS[compression](body)
    return (smaller, _FLAGS[compression]) if len(smaller) < len(body) else (body, 0)


def flags_of(compression: Compression) -> int:
    """Returns the bits of sysFlag for a compression type."""
    return _FLAGS.get(compression, 0)


def kind_of(sys_flag: int) -> Compression:
    """Returns the compression type of a record's body, from its sysFlag. An unknown type counts as zlib."""
    if not sys_flag & SysFlag.COMPRESSED:
        return Compression.NONE
    return _KIND_OF_FLAG.get(sys_flag & SysFlag.COMPRESSION_TYPE_MASK, Compression.ZLIB)


def inflated(body: bytes, compression: Compression, size_max: int) -> bytes | None:
    """Returns `body` decompressed; None if that needs a package that is not installed.

    Raises RemoteProtocolError if `body` is damaged or decompresses to more than `size_max` bytes. Decompression stops
    just above that size; the content size in a frame's header is not trusted."""
    begun = inflated_begin(body, compression, size_max + 1)
    if begun is None:
        return None
    whole, is_complete = begun
    if len(whole) > size_max:
        raise RemoteProtocolError(
            f"a {compression.value} body of {len(body)} bytes inflates to more than {size_max} bytes, "
            "the longest body that is accepted (maxMessageSize)"
        )
    if not is_complete:
        raise RemoteProtocolError(f"a {compression.value} body of {len(body)} bytes does not inflate: it is truncated")
    return whole


def inflated_begin(body: bytes, compression: Compression, size_max: int) -> tuple[bytes, bool] | None:
    """Returns up to `size_max` bytes of `body` decompressed, and whether that is all of it (False if `body` is
    truncated).

    None if that needs a package that is not installed. Raises RemoteProtocolError if `body` can't be decompressed."""
    if compression is Compression.NONE:
        return body[:size_max], len(body) <= size_max
    module = _module(compression)
    if compression in _MODULES and module is None:
        return None
    # One byte more than requested: a decoder whose output is full has not looked for the end yet.
    try:
        if compression is Compression.ZLIB:
            inflater = zlib.decompressobj()
            begin = inflater.decompress(body, size_max + 1)
            is_complete = inflater.eof
        elif compression is Compression.LZ4:
            decompressor = module.LZ4FrameDecompressor()
            begin = decompressor.decompress(body, max_length=size_max + 1)
            is_complete = decompressor.eof
        else:
            begin, is_complete = _zstd_begin(module, body, size_max + 1)
    except _errors_of(module) as error:
        raise RemoteProtocolError(f"a {compression.value} body does not inflate: {error}") from None
    return begin[:size_max], is_complete and len(begin) <= size_max


def _zstd_begin(module: Any, body: bytes, size_max: int) -> tuple[bytes, bool]:
    """Returns up to `size_max` bytes of the first frame in `body`, and whether that is all of it."""
    settings = {"max_window_size": max(_ZSTD_WINDOW_MAX, size_max)}
    source = _Source(body)
    begin: bytes = module.ZstdDecompressor(**settings).stream_reader(source, read_across_frames=False).read(size_max)
    if len(begin) == size_max or not source.ran_dry:
        return begin, len(begin) < size_max
    # The reader asks for more after a truncated frame, but also after an empty one. The content is known to be short.
    decompressor = module.ZstdDecompressor(**settings).decompressobj()
    decompressor.decompress(body)
    return begin, decompressor.eof


class _Source:
    """A file with `body` that records whether a read went beyond its end."""

    def __init__(self, body: bytes) -> None:
        self.ran_dry = False
        self._body = body
        self._at = 0

    def read(self, size: int) -> bytes:
        piece = self._body[self._at : self._at + size]
        self._at += len(piece)
        self.ran_dry |= not piece
        return piece


def _errors_of(module: Any) -> tuple[type[Exception], ...]:
    error = getattr(module, "ZstdError", None)
    return (zlib.error, RuntimeError) if error is None else (zlib.error, RuntimeError, error)


def _module(compression: Compression) -> Any:
    name = _MODULES.get(compression)
    if name is None:
        return None
    try:
        return import_module(name)
    except ImportError:
        return None


def _zlib(body: bytes) -> bytes:
    return zlib.compress(body, _ZLIB_LEVEL)


def _lz4(body: bytes) -> bytes:
    return bytes(_module(Compression.LZ4).compress(body))


def _zstd(body: bytes) -> bytes:
    return bytes(_module(Compression.ZSTD).ZstdCompressor(level=_ZLIB_LEVEL).compress(body))


_COMPRESSORS: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.ZLIB: _zlib,
    Compression.LZ4: _lz4,
    Compression.ZSTD: _zstd,
}

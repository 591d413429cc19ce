"""Bodies compressed as RocketMQ's clients do it, and what is done about those that can't be undone."""

from __future__ import annotations

import sys
import zlib

import pytest

from ha.errors import RemoteProtocolError
from ha.protocol.compression import Compression, check_installed, compressed, inflated, kind_of

BODY = b"all work and no play " * 500
KINDS = [Compression.ZLIB, Compression.LZ4, Compression.ZSTD]
PACKAGES = {Compression.LZ4: "lz4.frame", Compression.ZSTD: "zstandard"}


def need(kind: Compression) -> None:
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_compressed_comes_back(kind: Compression) -> None:
    need(kind)
    check_installed(kind)
    smaller, flags = compressed(BODY, kind)
    assert len(smaller) < len(BODY)
    assert flags == {Compression.ZLIB: 0x301, Compression.LZ4: 0x101, Compression.ZSTD: 0x201}[kind]
    assert kind_of(flags) is kind
    assert inflated(smaller, kind) == BODY


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_get_shorter_stays_as_it_is(kind: Compression) -> None:
    need(kind)
    assert compressed(b"\x00\x91\x17", kind) == (b"\x00\x91\x17", 0)
    assert compressed(BODY, Compression.NONE) == (BODY, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["cut", "garbage"])
def test_what_does_not_unfold_is_the_senders_fault(kind: Compression, harm: str) -> None:
    need(kind)
    smaller, _ = compressed(BODY, kind)
    broken = smaller[: len(smaller) // 2] if harm == "cut" else b"garbage" * 5
    with pytest.raises(RemoteProtocolError, match="inflate"):
        inflated(broken, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_unfolds_without_end_is_refused(kind: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    need(kind)
    monkeypatch.setattr("ha.protocol.compression.INFLATED_SIZE_MAX", 1000)
    with pytest.raises(RemoteProtocolError, match="1000 bytes"):
        inflated(compressed(BODY, kind)[0], kind)


def test_the_kind_of_clients_that_know_only_zlib() -> None:
    assert kind_of(0x1) is Compression.ZLIB
    assert kind_of(0x300) is Compression.NONE
    assert inflated(zlib.compress(BODY), kind_of(0x1)) == BODY


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_a_package_that_is_missing(kind: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    with pytest.raises(ValueError, match="is not installed"):
        check_installed(kind)
    assert inflated(b"whatever", kind) is None

"""Hashes of whole Arrow arrays are those of the plain codec, string by string."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ha.protocol.properties import java_hash
from ha.protocol.store_files import index_key, index_key_hash
from ha.spark.jobs.reindex.hash import as_signed, java_hashes, key_hashes

TEXTS = st.lists(st.none() | st.text(max_size=40) | st.text(alphabet="AZaz09#_", max_size=300), max_size=60)


def joined(prefix: str, keys: list[str]) -> list[int]:
    hashes, powers = java_hashes(pa.array(keys, pa.string()))
    before = np.uint32(java_hash(prefix) & 0xFFFFFFFF)
    found: list[int] = key_hashes(before * powers + hashes).tolist()
    return found


def test_known_values() -> None:
    """ "TagA" from RocketMQ's own consume queues; the others from the definition, by hand."""
    hashes, powers = java_hashes(pa.array(["TagA", "", None, "a", "ab"], pa.string()))
    assert as_signed(hashes).tolist() == [2598919, 0, 0, 97, 97 * 31 + 98]
    assert powers.tolist() == [31**4, 1, 1, 31, 31**2]


@given(TEXTS, st.integers(0, 5))
def test_it_is_the_plain_hash(texts: list[str | None], skipped: int) -> None:
    strings = pa.array(texts, pa.string()).slice(skipped)
    expected = [java_hash(text or "") for text in texts[skipped:]]
    assert as_signed(java_hashes(strings)[0]).tolist() == expected


@given(st.text(max_size=20), st.lists(st.text(max_size=40), max_size=20))
def test_a_joined_key_is_hashed_without_being_joined(topic: str, keys: list[str]) -> None:
    assert joined(topic + "#", keys) == [index_key_hash(index_key(topic, key)) for key in keys]


def test_the_hash_without_an_absolute_value_is_zero() -> None:
    """Java: Math.abs(Integer.MIN_VALUE) is negative; RocketMQ's index then takes 0."""
    text = "polygenelubricants"
    assert java_hash(text) == -(1 << 31)
    assert key_hashes(java_hashes(pa.array([text]))[0]).tolist() == [0]


def test_more_bytes_than_one_piece() -> None:
    texts = [f"key-{number:05d}-" + "x" * (number % 200) for number in range(20_000)]
    assert sum(map(len, texts)) > 2 << 20
    hashes, _ = java_hashes(pa.array(texts))
    assert as_signed(hashes).tolist() == [java_hash(text) for text in texts]

"""Property strings and Java hashes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import LocalProtocolError
from ha.protocol.properties import (
    DELAY_LEVELS_MS,
    decode_properties,
    delivery_time_ms,
    encode_properties,
    find_property,
    find_values,
    java_hash,
    property_mark,
    tags_code,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TagA", 2598919),
        ("中", 20013),
        ("polygenelubricants", -2147483648),
        ("", 0),
        ("a", 97),
        ("T1#ABC", -0x6DE586E4),
        ("T1#k0", 0x04B68D0B),
        ("T1#k1", 0x04B68D0C),
        ("topicA#k0", 0x171CBA56),
    ],
)
def test_hash_is_that_of_java(text: str, expected: int) -> None:
    assert java_hash(text) == expected


def slow_hash(text: str) -> int:
    """The definition, one UTF-16 unit after the other."""
    raw = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for at in range(0, len(raw), 2):
        value = (31 * value + int.from_bytes(raw[at : at + 2], "big")) % 2**32
    return value - 2**32 if value >= 2**31 else value


@given(st.text(max_size=700))
def test_hash_follows_its_definition(text: str) -> None:
    assert java_hash(text) == slow_hash(text)


@pytest.mark.parametrize("text", ["x" * 255, "x" * 256, "x" * 257, "é" * 1000, "😀" * 300, "\ud800" * 3])
def test_hash_of_long_and_wide_texts(text: str) -> None:
    assert java_hash(text) == slow_hash(text)


@given(st.text(max_size=300), st.text(max_size=300))
def test_hash_of_concatenated_texts(begin: str, end: str) -> None:
    assert java_hash(end, java_hash(begin)) == java_hash(begin + end)


@pytest.mark.parametrize("size", [0, 1, 254, 255, 256, 257, 600])
def test_hash_of_concatenated_texts_of_any_length(size: int) -> None:
    assert java_hash("y" * size, java_hash("topicA#")) == slow_hash("topicA#" + "y" * size)


def test_tags_code_is_the_hash_or_zero() -> None:
    assert tags_code("TagA") == 2598919
    assert tags_code(None) == tags_code("") == 0


def test_delay_levels_are_the_default_configuration() -> None:
    assert delivery_time_ms(1, 5) == 1005
    assert delivery_time_ms(18, 0) == delivery_time_ms(99, 0) == 7_200_000
    assert len(DELAY_LEVELS_MS) == 18
    assert delivery_time_ms(1, 5, ()) == 1005


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", {}),
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01b\x02c\x01d", {"a": "b", "c": "d"}),
        (b"a\x01b\x02\x02\x02c\x01d\x02", {"a": "b", "c": "d"}),
        (b"a\x01\x02b\x01c\x02", {"b": "c"}),
        (b"\x01a\x02b\x01c\x02", {"b": "c"}),
        (b"abc\x02b\x01c\x02", {"b": "c"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),
        (b"a\x01\xff\x02", {"a": "�"}),
        ("k\x01héllo 世界 😀\x02".encode(), {"k": "héllo 世界 😀"}),
    ],
)
def test_property_strings_are_read_as_java_reads_them(raw: bytes, expected: dict[str, str]) -> None:
    assert decode_properties(raw) == expected


def test_every_written_pair_ends_with_its_separator() -> None:
    assert encode_properties({"TAGS": "TagA", "KEYS": "k0"}) == b"TAGS\x01TagA\x02KEYS\x01k0\x02"
    assert encode_properties({"empty": "", "": "x"}) == b""


@pytest.mark.parametrize("properties", [{"a\x01": "b"}, {"a\x02": "b"}, {"a": "b\x02c"}, {"a": "\ud800"}])
def test_unreadable_properties_are_not_written(properties: dict[str, str]) -> None:
    with pytest.raises(LocalProtocolError):
        encode_properties(properties)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=12)


@given(st.dictionaries(texts, texts, max_size=8))
def test_properties_survive_the_round_trip(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties


@given(
    st.lists(st.sampled_from([b"TAGS", b"KEYS", b"\x01", b"\x02", b"a", b"\xff", b"XTAGS"]), max_size=12).map(b"".join)
)
def test_finding_one_property_equals_reading_all(raw: bytes) -> None:
    properties = decode_properties(raw)
    assert find_property(raw, b"TAGS") == properties.get("TAGS")
    assert find_property(raw, b"KEYS") == properties.get("KEYS")
    assert find_values(raw, (property_mark("KEYS"), property_mark("TAGS"))) == [
        properties.get(n) for n in ("KEYS", "TAGS")
    ]


def test_last_non_empty_value_of_equal_names_applies() -> None:
    raw = b"TAGS\x01a\x02TAGS\x01b\x02KEYS\x01k\x02TAGS\x01c\x02TAGS\x01\x02"
    assert find_property(raw[:-6], b"TAGS") == find_property(raw, b"TAGS") == decode_properties(raw)["TAGS"] == "c"
    assert find_values(raw, (property_mark("TAGS"),)) == find_values(raw[:-6], (property_mark("TAGS"),)) == ["c"]

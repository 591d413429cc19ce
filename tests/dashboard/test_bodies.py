"""Bytes of strangers as text."""

import pytest

from ha.admin.dashboard.bodies import (
    BODY_SHOWN_MAX,
    HEX_SHOWN_MAX,
    JSON_SHOWN_MAX,
    PREVIEW_LENGTH_MAX,
    ShownBody,
    in_line,
    preview_body,
    show_body,
)


def shown(body: bytes, *, is_cut: bool = False, as_hex: bool = False) -> ShownBody:
    return show_body(body, is_cut=is_cut, as_hex=as_hex)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b"", "empty", ""),
        ("Grüße\n\tan alle".encode(), "text", "Grüße\n\tan alle"),
        (b"\x00\x07\x1b[31m\x7f\r\n", "text", "␀␇␛[31m␡␍\n"),
        ("a\u202eb\u200bc\ufeff\u0085\u2066".encode(), "text", "a⟨U+202E⟩b⟨U+200B⟩c⟨U+FEFF⟩⟨U+0085⟩⟨U+2066⟩"),
        (b'{"a":1,"a":1e999,"b":[]}', "JSON", '{\n  "a": 1,\n  "a": 1e999,\n  "b": []\n}'),
        (b" [1, 2]", "JSON", "[\n  1,\n  2\n]"),
        ('{"a":"\u202e"}'.encode(), "JSON", '{\n  "a": "⟨U+202E⟩"\n}'),
        (rb'["Z\u00fcrich \ud83d\ude00 \u003cb\u003e"]', "JSON", '[\n  "Zürich 😀 <b>"\n]'),
        # What would end a string, hide or be no character stays as it is written.
        (rb'["\u0022\u005c\u000a\u007f \\u00fc \u202e"]', "JSON",
         '[\n  "\\u0022\\u005c\\u000a\\u007f \\\\u00fc ⟨U+202E⟩"\n]'),
        (b'{"a":', "text", '{"a":'),
        (b"17", "text", "17"),
        (b"\xff\x00A", "hex", "000000  ff 00 41                                          ·​·A".replace("\u200b", "")),
        (b"ABCDEFGHIJKLMNOP\x80", "hex", "000000  41 42 43 44 45 46 47 48  49 4a 4b 4c 4d 4e 4f 50  ABCDEFGHIJKLMNOP\n"
                                         "000010  80                                                ·"),
    ],
)  # fmt: skip
def test_kinds(body: bytes, kind: str, text: str) -> None:
    assert shown(body) == ShownBody(kind, text, len(body))


def test_json_nested_beyond_all_measure_is_text() -> None:
    assert shown(b"[" * BODY_SHOWN_MAX).kind == "text"


def test_json_that_indentation_would_make_too_long_is_text() -> None:
    """At a depth of 900, each of 15,000 numbers would be on a line of 1,800 blanks."""
    body = b"[" * 900 + b"1," * 15_000 + b"1" + b"]" * 900
    assert len(body) < BODY_SHOWN_MAX
    assert shown(body) == ShownBody("text", body.decode(), len(body))
    flat = shown(b"[" + b"1," * 15_000 + b"1]")
    assert flat.kind == "JSON"
    assert len(flat.text) < JSON_SHOWN_MAX


def test_a_cut_goes_through_no_character() -> None:
    body = "ü€😀".encode() * 100
    for end in range(1, 40):
        part = body[:end]
        expected = part.decode("utf-8", "ignore")
        assert shown(part, is_cut=True) == ShownBody("text", expected, len(expected.encode()))
    assert shown(b"a\xffb", is_cut=True).kind == "hex"
    assert shown(b"\xe2\x82").kind == "hex"  # nothing was cut off: it is no UTF-8


def test_json_that_was_cut_is_shown_as_it_is() -> None:
    assert shown(b"[1,2]", is_cut=True) == ShownBody("text", "[1,2]", 5)


def test_a_dump_is_bounded() -> None:
    dump = shown(bytes(BODY_SHOWN_MAX), as_hex=True)
    assert dump.shown_size == HEX_SHOWN_MAX
    assert len(dump.text.splitlines()) == HEX_SHOWN_MAX // 16
    assert shown(b"text", as_hex=True).kind == "hex"


def test_in_a_line_there_are_no_lines() -> None:
    assert in_line("a\nb\tc\u2028") == "a␊b␉c⟨U+2028⟩"


@pytest.mark.parametrize(
    ("begin", "is_cut", "line"),
    [
        (b"", False, ""),
        (b"one\n  two\tthree", False, "one two three"),
        ("ü€".encode()[:3], True, "ü…"),
        (rb'{"city": "Z\u00fcrich"}', False, '{"city": "Zürich"}'),
        (b"\x00<script>\xe2\x80\xae", False, "␀<script>⟨U+202E⟩"),
        (b"\xff" * 3, False, "ff ff ff"),
        (b"\xff" * 17, False, "ff " * 16 + "…"),
        (b"x" * 500, False, "x" * PREVIEW_LENGTH_MAX + "…"),
    ],
)
def test_bodies_in_lists(begin: bytes, is_cut: bool, line: str) -> None:
    assert preview_body(begin, is_cut=is_cut) == line

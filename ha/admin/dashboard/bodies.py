"""Converts untrusted bytes to text that is safe to display.

Templates escape markup. This module makes characters visible that a browser would hide or interpret: control
characters, and marks that change the writing direction or have no width.
"""

from __future__ import annotations

import re

import msgspec

BODY_SHOWN_MAX = 32 * 1024
"""Maximum number of bytes of a body that the message page shows."""
HEX_SHOWN_MAX = 8 * 1024
"""Maximum number of bytes of a body shown as a hex dump, which is five times as long as the body."""
JSON_SHOWN_MAX = 256 * 1024
"""Maximum bytes of a body as indented JSON. Deep nesting can make this a thousand times as long as the body."""
PREVIEW_LENGTH_MAX = 120
"""Maximum characters of a body's preview in a list of messages."""
_ROW = 16
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|.)", re.DOTALL
)

_KEPT = frozenset("\n\t")
_INVISIBLE = (
    *range(0x80, 0xA0),
    0xAD,
    0x61C,
    0x180E,
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2060, 0x2070),
    0xFEFF,
    *range(0xFFF9, 0xFFFC),
    *range(0xE0000, 0xE0080),
)
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT}
    | {0x7F: "\u2421"}
    | {code: f"⟨U+{code:04X}⟩" for code in _INVISIBLE}
)
_VISIBLE_IN_LINE = _VISIBLE | {ord("\n"): "\u240a", ord("\t"): "\u2409"}


class ShownBody(msgspec.Struct, frozen=True):
    """A message body as its page shows it. `kind`: JSON, text, hex or empty; `shown_size`: number of bytes that `text`
    represents."""

    kind: str
    text: str
    shown_size: int


def in_line(text: str) -> str:
    """Returns the text with its control characters, including line ends and tabs, made visible."""
    return text.translate(_VISIBLE_IN_LINE)


def show_body(body: bytes, *, is_cut: bool, as_hex: bool) -> ShownBody:
    """Formats a body as indented JSON (up to JSON_SHOWN_MAX bytes), UTF-8 text or a hex dump. `is_cut`: whether
    `body` is only the beginning of a body, which is never shown as JSON."""
    if not body:
        return ShownBody("empty", "", 0)
    text = None if as_hex else _text(body, is_cut=is_cut)
    if text is None:
        return ShownBody("hex", _hex_dump(body[:HEX_SHOWN_MAX]), min(len(body), HEX_SHOWN_MAX))
    if not is_cut and body.lstrip()[:1] in (b"{", b"["):
        try:
            # Formatted without decoding, which would change numbers and repeated keys.
            indented = msgspec.json.format(body, indent=2)
        except (msgspec.DecodeError, RecursionError):
            indented = b""
        if 0 < len(indented) <= JSON_SHOWN_MAX:
            return ShownBody("JSON", _decode_escapes(indented.decode()).translate(_VISIBLE), len(body))
    return ShownBody("text", text.translate(_VISIBLE), len(text.encode()))


def preview_body(begin: bytes, *, is_cut: bool) -> str:
    """Formats the beginning of a body as one line: text with single spaces, or the first bytes as hex."""
    text = _text(begin, is_cut=is_cut)
    if text is None:
        return f"{begin[:_ROW].hex(' ')}{' …' if is_cut or len(begin) > _ROW else ''}"
    if text.lstrip()[:1] in ("{", "["):
        text = _decode_escapes(text)
    line = in_line(" ".join(text.split()))
    if is_cut or len(line) > PREVIEW_LENGTH_MAX:
        line = f"{line[:PREVIEW_LENGTH_MAX]}…"
    return line


def _decode_escapes(json: str) -> str:
    """Replaces the escapes of characters in JSON, except those of control characters, quotes and backslashes."""
    return _ESCAPE.sub(_decode_escape, json)


def _decode_escape(match: re.Match[str]) -> str:
    high, low, single = match.groups()
    if high is not None:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    code = int(single, 16) if single is not None else 0
    is_kept = code < 0x20 or code in (0x22, 0x5C, 0x7F) or 0xD800 <= code < 0xE000
    return match[0] if is_kept else chr(code)


def _text(body: bytes, *, is_cut: bool) -> str | None:
    """Decodes UTF-8, without an incomplete character at the cut; None for other bytes."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        if is_cut and error.start >= len(body) - 3 and error.reason == "unexpected end of data":
            return body[: error.start].decode()
        return None


def _hex_dump(body: bytes) -> str:
    rows = []
    for start in range(0, len(body), _ROW):
        row = body[start : start + _ROW]
        seen = "".join(chr(byte) if 0x20 <= byte < 0x7F else "·" for byte in row)
        rows.append(f"{start:06x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  {seen}")
    return "\n".join(rows)

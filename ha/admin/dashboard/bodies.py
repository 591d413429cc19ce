"""Converts untrusted bytes to text that is safe to display.

Templates escape markup. This module makes characters visible that a browser would hide or interpret: control
characters, and marks that change the writing direction or have no width.
"""

from __future__ import annotations

import msgspec

BODY_SHOWN_MAX = 32 * 1024
"""Maximum bytes of a body on its page."""
HEX_SHOWN_MAX = 8 * 1024
"""The same for a hex dump, which is five times as long."""
_ROW = 16

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
    """A body for its page. `kind`: JSON, text, hex or empty; `shown_size`: number of bytes that `text` represents."""

    kind: str
    text: str
    shown_size: int


def in_line(text: str) -> str:
    """Returns the text with visible control characters, including line ends and tabs."""
    return text.translate(_VISIBLE_IN_LINE)


def show_body(body: bytes, *, is_cut: bool, as_hex: bool) -> ShownBody:
    """Formats a body, or its beginning if it `is_cut`, as indented JSON, UTF-8 text or a hex dump."""
    if not body:
        return ShownBody("empty", "", 0)
    text = None if as_hex else _text(body, is_cut=is_cut)
    if text is None:
        return ShownBody("hex", _hex_dump(body[:HEX_SHOWN_MAX]), min(len(body), HEX_SHOWN_MAX))
    if not is_cut and body.lstrip()[:1] in (b"{", b"["):
        try:
            # Formatted without decoding, which would change numbers and repeated keys.
            return ShownBody("JSON", msgspec.json.format(body, indent=2).decode().translate(_VISIBLE), len(body))
        except (msgspec.DecodeError, RecursionError):
            pass
    return ShownBody("text", text.translate(_VISIBLE), len(text.encode()))


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

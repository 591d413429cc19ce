"""Decodes HTTP/2 header blocks (RFC 7541). Sans-IO: bytes in, names and values out.

Does not encode: the few headers that a gRPC server sends are literals (frames.py), which need no dynamic table. The
package `hpack` took seven times as long to decode (75 µs instead of 10 for the headers of a send), which is more than
the rest of a send took; tests compare the results of both.
"""

from __future__ import annotations

from collections import deque

from ha.errors import RemoteProtocolError

Header = tuple[bytes, bytes]

TABLE_SIZE_MAX = 4096
"""Maximum size in bytes of the dynamic table that a peer may use; the default of SETTINGS_HEADER_TABLE_SIZE."""

ENTRY_OVERHEAD = 32
"""Bytes that RFC 7541 adds to the size of each header (section 4.1)."""

_STATIC_NAMES = """
:authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https :status=200 :status=204
:status=206 :status=304 :status=400 :status=404 :status=500 accept-charset accept-encoding=gzip,_deflate accept-language
accept-ranges accept access-control-allow-origin age allow authorization cache-control content-disposition
content-encoding content-language content-length content-location content-range content-type cookie date etag expect
expires from host if-match if-modified-since if-none-match if-range if-unmodified-since last-modified link location
max-forwards proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie
strict-transport-security transfer-encoding user-agent vary via www-authenticate
"""
"""The static table (RFC 7541, appendix A), in order; "_" stands for a space."""

_CODE_LENGTHS = """
13 23 28*7 24 30 28*2 30 28*8 30 28*9 6 10*2 12 13 6 8 11 10*2 8 11 8 6*3 5*3 6*7 7 8 15 6 12 10 13 6 7*22 8 7 8 13 19
13 14 6 15 5 6 5 6 5 6*3 5 7*2 6*3 5 6 7 6 5*2 6 7*5 15 11 14 13 28 20 22 20*2 22*3 23 22 23*5 24 23 24*2 22 23 24
23*4 21 22 23 22 23*2 24 22 21 20 22*2 23*2 21 23 22*2 24 21 22 23*2 21*2 22 21 23 22 23*2 20 22*3 23 22*2 23 26*2 20
19 22 23 22 25 26*3 27*2 26 24 25 19 21 26 27*2 26 27 24 21*2 26*2 28 27*3 20 24 20 21 22 21*2 23 22*2 25*2 24*2 26 23
26 27 26*2 27*5 28 27*5 26 30
"""
"""Length in bits of the Huffman code of each symbol from 0 to 256 (appendix B); `28*7` stands for seven lengths of 28.
The code is canonical, so the lengths define it."""

_END_OF_STRING = 256


def _static_table() -> list[Header]:
    entries = []
    for word in _STATIC_NAMES.split():
        name, _, value = word.partition("=")
        entries.append((name.encode(), value.replace("_", " ").encode()))
    return entries


def _huffman_codes() -> dict[tuple[int, int], int]:
    """Returns the symbol of each (length, code)."""
    lengths: list[int] = []
    for word in _CODE_LENGTHS.split():
        length_text, _, times = word.partition("*")
        lengths += [int(length_text)] * int(times or 1)
    codes: dict[tuple[int, int], int] = {}
    code = previous = 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths)):
        code <<= length - previous
        previous = length
        codes[length, code] = symbol
        code += 1
    return codes


_STATIC = _static_table()
_CODES = _huffman_codes()
_STATES: list[tuple[int, int]] = [(0, 0)]
"""States of the decoder between two bytes: the length and bits of the incomplete code."""
_STATE_OF = {(0, 0): 0}
_STEPS: dict[int, tuple[int, bytes] | None] = {}
"""Decoder steps by state * 256 + byte: the next state and the symbols that are complete; None for an invalid code.
Filled on use.
"""


def _step(state: int, byte: int) -> tuple[int, bytes] | None:
    length, code = _STATES[state]
    symbols = bytearray()
    for shift in range(7, -1, -1):
        length, code = length + 1, code << 1 | byte >> shift & 1
        symbol = _CODES.get((length, code))
        if symbol == _END_OF_STRING:
            return None
        if symbol is not None:
            symbols.append(symbol)
            length = code = 0
    following = (length, code)
    if following not in _STATE_OF:
        _STATE_OF[following] = len(_STATES)
        _STATES.append(following)
    return _STATE_OF[following], bytes(symbols)


def decode_huffman(data: bytes) -> bytes:
    """Decodes a Huffman-coded string. Raises RemoteProtocolError if a code or the padding is invalid."""
    state, parts, steps = 0, [], _STEPS
    for byte in data:
        key = state << 8 | byte
        if key in steps:
            step = steps[key]
        else:
            step = steps[key] = _step(state, byte)
        if step is None:
            raise RemoteProtocolError("HPACK: the end-of-string symbol in a string")
        state, symbols = step
        parts.append(symbols)
    length, code = _STATES[state]
    if length > 7 or code != (1 << length) - 1:  # padding is the start of the end-of-string symbol
        raise RemoteProtocolError("HPACK: wrong padding of a Huffman code")
    return b"".join(parts)


class HeaderDecoder:
    """The decoder of one connection, with its dynamic table. Unusable after an error."""

    def __init__(self, list_size_max: int) -> None:
        """`list_size_max`: maximum size of a header list in bytes, counting ENTRY_OVERHEAD more for each header."""
        self._list_size_max = list_size_max
        self._entries: deque[Header] = deque()
        self._size = 0
        self._size_max = TABLE_SIZE_MAX

    def decode(self, block: bytes) -> list[Header] | None:
        """Returns the headers of a whole block, in order; None if they exceed `list_size_max` (the decoder stays
        usable).

        Raises RemoteProtocolError if the block is malformed.
        """
        headers: list[Header] = []
        position, end, size = 0, len(block), 0
        may_resize = True
        while position < end:
            first = block[position]
            if first & 0x80:
                index = first & 0x7F
                position += 1
                if index == 0x7F:
                    index, position = _read_integer(block, position, index)
                header = self._entry(index)
            elif first & 0xE0 == 0x20:
                table_size, position = self._integer(block, position, 0x1F)
                if not may_resize or table_size > TABLE_SIZE_MAX:
                    raise RemoteProtocolError(f"HPACK: table size {table_size} not allowed here")
                self._size_max = table_size
                self._evict(0)
                continue
            else:
                is_indexed = first & 0x40
                index, position = self._integer(block, position, 0x3F if is_indexed else 0x0F)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, position = self._string(block, position)
                value, position = self._string(block, position)
                header = (name, value)
                if is_indexed:
                    self._add(header)
            may_resize = False
            size += len(header[0]) + len(header[1]) + ENTRY_OVERHEAD
            if size <= self._list_size_max:
                headers.append(header)
        return headers if size <= self._list_size_max else None

    def _entry(self, index: int) -> Header:
        if 0 < index <= 61:
            return _STATIC[index - 1]
        try:
            return self._entries[index - 62] if index else self._entries[len(self._entries)]
        except IndexError:
            raise RemoteProtocolError(f"HPACK: no header {index}") from None

    def _add(self, header: Header) -> None:
        size = len(header[0]) + len(header[1]) + ENTRY_OVERHEAD
        self._evict(size)
        if size <= self._size_max:
            self._entries.appendleft(header)
            self._size += size

    def _evict(self, needed: int) -> None:
        entries = self._entries
        while entries and self._size + needed > self._size_max:
            name, value = entries.pop()
            self._size -= len(name) + len(value) + ENTRY_OVERHEAD

    @staticmethod
    def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
        value = block[position] & mask
        position += 1
        return (value, position) if value < mask else _read_integer(block, position, value)

    @staticmethod
    def _string(block: bytes, position: int) -> tuple[bytes, int]:
        try:
            first = block[position]
        except IndexError:
            raise RemoteProtocolError("HPACK: a truncated block") from None
        length = first & 0x7F
        position += 1
        if length == 0x7F:
            length, position = _read_integer(block, position, length)
        end = position + length
        if end > len(block):
            raise RemoteProtocolError("HPACK: a truncated string")
        data = block[position:end]
        return (decode_huffman(data) if first & 0x80 else data), end


def _read_integer(block: bytes, position: int, prefix: int) -> tuple[int, int]:
    """Returns an integer whose prefix has all bits set, and the position after it. Raises RemoteProtocolError
    if it is truncated or has more than 28 bits."""
    value, shift = prefix, 0
    while shift < 28:
        try:
            byte = block[position]
        except IndexError:
            raise RemoteProtocolError("HPACK: a truncated integer") from None
        position += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, position
        shift += 7
    raise RemoteProtocolError("HPACK: an integer of more than 28 bits")

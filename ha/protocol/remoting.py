"""Remoting frames: requests and responses between clients, brokers and name servers.

    0  4  length of everything after this field
    4  4  header encoding << 24 | header length h; encoding 0 JSON, 1 ROCKETMQ
    8  h  header
       b  body

JSON header: code, flag, language (name), opaque, version, remark (absent if null), extFields (string to string, absent
if null), serializeTypeCurrentRPC. ROCKETMQ header: code int16, language int8, version int16, opaque int32, flag int32,
remark (int32 length + UTF-8), ext (int32 size, then per field int16 length + name, int32 length + value).
flag: bit 0 response, bit 1 oneway. A response carries its request's opaque.
Sources: RemotingCommand, RocketMQSerializable; leniency towards the C++ and Go clients as noted below.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Annotated, Any

import msgspec

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.codes import VERSION_DEFAULT, LanguageCode

FRAME_SIZE_MAX = 16_777_216
"""RocketMQ's maximum frame size in bytes, including the length field"""
HEADER_SIZE_MAX = 0xFFFFFF
"""Maximum header size in bytes that the second field can hold"""
EXT_FIELD_COUNT_MAX = 256
"""Maximum number of ext fields of a command; RocketMQ's commands have fewer than 30, including those added by hooks"""
SERIALIZE_JSON = 0
SERIALIZE_ROCKETMQ = 1
FLAG_RESPONSE = 1
FLAG_ONEWAY = 2

BODY_COPIED_MAX = 16_384
"""Maximum size in bytes of a body that is copied out of the received chunk, as a view of it would keep the whole chunk
in memory"""
LENGTHS = Struct(">ii")
_LENGTH = Struct(">i")
_BINARY_FIXED = Struct(">hbhiii")
_INT16 = Struct(">h")
_INT32 = Struct(">i")
LANGUAGE_BY_NAME = {language.name: language for language in LanguageCode}
_NAME_BY_LANGUAGE = {int(language): language.name for language in LanguageCode}
_LANGUAGES = {int(language): language for language in LanguageCode}


class RemotingCommand(msgspec.Struct):
    """One frame. `opaque` is an int32 that pairs responses with requests; `body` stays valid as long as it is held."""

    code: int
    opaque: int = 0
    flag: int = 0
    language: LanguageCode = LanguageCode.PYTHON
    version: int = VERSION_DEFAULT
    remark: str | None = None
    ext_fields: dict[str, str] = {}
    body: bytes | memoryview = b""
    serialize_type: int = SERIALIZE_JSON

    @property
    def opaques(self) -> Sequence[int]:
        """The opaques of all requests that this command stands for; `opaque` is the first of them."""
        return (self.opaque,)

    @property
    def is_response(self) -> bool:
        """Whether this is a response."""
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether this is a request without a response."""
        return bool(self.flag & FLAG_ONEWAY)

    def reply(
        self,
        code: int,
        remark: str | None = None,
        ext_fields: dict[str, str] | None = None,
        body: bytes | memoryview = b"",
    ) -> RemotingCommand:
        """Returns the response to this request: same opaque, same header encoding (the C++ client reads only JSON)."""
        return RemotingCommand(
            code,
            self.opaque,
            FLAG_RESPONSE,
            LanguageCode.PYTHON,
            VERSION_DEFAULT,
            remark,
            {} if ext_fields is None else ext_fields,
            body,
            self.serialize_type,
        )


class _OutgoingHeader(msgspec.Struct, gc=False):
    """A JSON header in RocketMQ's key order; UNSET keys are omitted."""

    code: int
    extFields: dict[str, str] | msgspec.UnsetType  # noqa: N815
    flag: int
    language: str
    opaque: int
    remark: str | msgspec.UnsetType
    serializeTypeCurrentRPC: str  # noqa: N815
    version: int


_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class IncomingHeader(msgspec.Struct, gc=False, kw_only=True):
    """The fields of a JSON header, except extFields, with the types that Java and Go clients send."""

    code: _Int32
    language: str = "OTHER"
    version: _Int32 = 0
    opaque: _Int32 = 0
    flag: _Int32 = 0
    remark: str | None = None


class _IncomingHeader(IncomingHeader, gc=False):
    extFields: dict[str, str] | None = None  # noqa: N815


class _LooseHeader(msgspec.Struct):
    """A JSON header as other JSON libraries write it: numbers and booleans in extFields, numbers as strings, null for
    any field except `code`."""

    code: _Int32
    language: str | int | None = None
    version: _Int32 | None = None
    opaque: _Int32 | None = None
    flag: _Int32 | None = None
    remark: Any = None
    extFields: dict[str, Any] | None = None  # noqa: N815


JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for a header that is not JSON or has wrong types"""

_encode_header = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(_IncomingHeader).decode


def encode_command(command: RemotingCommand) -> bytes:
    """Returns the whole frame of `command`.

    Raises LocalProtocolError if the frame exceeds 16 MiB, a string can't be encoded as UTF-8, or a value does not fit
    the ROCKETMQ header (for example, a code above 32767).
    """
    body = command.body
    serialize_type = command.serialize_type
    try:
        header = _encode_json(command) if serialize_type == SERIALIZE_JSON else _encode_binary(command)
    except (struct.error, UnicodeEncodeError, OverflowError) as error:
        raise LocalProtocolError(f"command {command.code} can't be encoded: {error}") from None
    header_size = len(header)
    length = 4 + header_size + len(body)
    if length + 4 > FRAME_SIZE_MAX:
        raise LocalProtocolError(f"frame of {length + 4} bytes; the maximum is {FRAME_SIZE_MAX}")
    return b"".join((LENGTHS.pack(length, serialize_type << 24 | header_size), header, body))


class CommandTemplate:
    """Encodes commands without a body that differ in a few values of their JSON header, at a fraction of the cost of
    `encode_command`.

    The template is an encoded sample command in which placeholders stand for these values.
    """

    def __init__(self, sample: RemotingCommand, marks: Sequence[tuple[bytes, bytes]]) -> None:
        """`marks`: for each placeholder, in header order, its bytes, which must occur exactly once in the encoded
        sample, and the % conversion of its values."""
        assert sample.serialize_type == SERIALIZE_JSON
        assert not sample.body
        rest = _encode_json(sample).replace(b"%", b"%%")
        parts = []
        for mark, conversion in marks:
            assert rest.count(mark) == 1, (mark, rest)
            before, _, rest = rest.partition(mark)
            parts += [before, conversion]
        self._format = b"".join((*parts, rest))

    def encode(self, *values: int | bytes) -> bytes:
        """Returns the whole frame with `values` in place of the placeholders. `json_text` encodes values that are text.

        The frame size is not checked.
        """
        header = self._format % values
        size = len(header)
        return LENGTHS.pack(4 + size, size) + header

    def encode_each(self, values: Sequence[int]) -> bytes:
        """Returns one frame for each of `values` (at least one), joined. The template must have one placeholder, for a
        number."""
        least = min(values)
        if least < 0 or len(str(least)) != len(str(max(values))):
            return b"".join(map(self.encode, values))
        size = len(self._format % least)
        frame = LENGTHS.pack(4 + size, size).replace(b"%", b"%%") + self._format
        return frame * len(values) % tuple(values)


json_text: Callable[[str], bytes] = _encode_header
"""Encodes a string for a JSON header, including the quotes."""


def _encode_json(command: RemotingCommand) -> bytes:
    remark = command.remark
    return _encode_header(
        _OutgoingHeader(
            command.code,
            command.ext_fields or msgspec.UNSET,
            command.flag,
            _NAME_BY_LANGUAGE[command.language],
            command.opaque,
            msgspec.UNSET if remark is None else remark,
            "JSON",
            command.version,
        )
    )


def _encode_binary(command: RemotingCommand) -> bytes:
    remark = command.remark.encode() if command.remark else b""
    parts = [
        _BINARY_FIXED.pack(command.code, command.language, command.version, command.opaque, command.flag, len(remark)),
        remark,
        b"",
    ]
    for name, value in command.ext_fields.items():
        raw_name, raw_value = name.encode(), value.encode()
        parts += (_INT16.pack(len(raw_name)), raw_name, _INT32.pack(len(raw_value)), raw_value)
    parts[2] = _INT32.pack(sum(map(len, parts[3:])))
    return b"".join(parts)


class RemotingParser:
    """Parses remoting frames from chunks of any size.

    Between calls it buffers at most one incomplete frame, less than `frame_size_max` bytes. A frame is refused as soon
    as its lengths exceed `frame_size_max` or `header_size_max`, and if it has more than EXT_FIELD_COUNT_MAX ext fields.
    """

    def __init__(self, *, frame_size_max: int = FRAME_SIZE_MAX, header_size_max: int = HEADER_SIZE_MAX) -> None:
        self._frame_size_max = frame_size_max
        self._header_size_max = header_size_max
        self._buffer = bytearray()
        self._needed = 4
        self.frame_count = 0
        """Number of complete frames that were parsed"""

    @property
    def is_between_frames(self) -> bool:
        """Whether all frames received so far are complete."""
        return not self._buffer

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[RemotingCommand]:
        """Parses `chunk` and returns the commands that it completes, in order.

        Bodies are copies, or views of immutable bytes, so the chunk may be reused. Raises RemoteProtocolError if the
        bytes are not remoting frames or exceed a limit; complete frames before the invalid one in this chunk are then
        lost, and the parser must not be used again.
        """
        if self._buffer:
            self._buffer += chunk
            if len(self._buffer) < self._needed:
                return []
            data = bytes(self._buffer)
            self._buffer = bytearray()
        else:
            data = chunk if type(chunk) is bytes else bytes(chunk)
        commands: list[RemotingCommand] = []
        usual, position, usual_count = self._read_usual(data)
        commands += usual
        end = len(data)
        length_max, header_size_max = self._frame_size_max - 4, self._header_size_max
        decode_json = self._decode_json
        self._needed = 4
        while end - position >= 8:  # the minimum size of a frame
            length, marks = LENGTHS.unpack_from(data, position)
            if not 4 <= length <= length_max:
                raise _length_refused(length, self._frame_size_max)
            frame_end = position + 4 + length
            if frame_end > end:
                self._needed = 4 + length
                _check_header_size(marks & 0xFFFFFF, header_size_max)
                break
            body_at = position + 8 + (marks & 0xFFFFFF)
            if body_at > frame_end:
                raise RemoteProtocolError(f"remoting header of {marks & 0xFFFFFF} bytes in a frame of {length}")
            if marks & 0xFFFFFF > header_size_max:
                _check_header_size(marks & 0xFFFFFF, header_size_max)
            body: bytes | memoryview
            if frame_end - body_at <= BODY_COPIED_MAX:
                body = data[body_at:frame_end]
            else:
                body = memoryview(data)[body_at:frame_end]
            header = data[position + 8 : body_at]
            if marks >> 24 == SERIALIZE_JSON:
                command = decode_json(header, body)
            elif marks >> 24 == SERIALIZE_ROCKETMQ:
                command = _decode_binary(header, body)
            else:
                raise RemoteProtocolError(f"remoting header encoding {marks >> 24}")
            commands.append(command)
            position = frame_end
        else:
            if end - position >= 4:
                (length,) = _LENGTH.unpack_from(data, position)
                if not 4 <= length <= length_max:
                    raise _length_refused(length, self._frame_size_max)
                self._needed = 8  # to check the header size before the whole frame is buffered
        if position < end:
            self._buffer += data[position:]
        self.frame_count += usual_count + len(commands) - len(usual)
        return commands

    def _read_usual(self, data: bytes) -> tuple[Sequence[RemotingCommand], int, int]:
        """Returns the commands at the start of `data` that a subclass can parse faster, the position after their
        frames, and the number of these frames."""
        return (), 0, 0

    def _decode_json(self, header: bytes, body: bytes | memoryview) -> RemotingCommand:
        try:
            h = _decode_header(header)
        except JSON_ERRORS:
            return _decode_loose(header, body)
        ext_fields = h.extFields or {}
        _check_field_count(len(ext_fields))
        return RemotingCommand(
            h.code,
            h.opaque,
            h.flag,
            LANGUAGE_BY_NAME.get(h.language, LanguageCode.OTHER),
            h.version,
            h.remark,
            ext_fields,
            body,
        )


def _length_refused(length: int, frame_size_max: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"remoting frame of {length} bytes; the maximum is {frame_size_max}")


def _check_field_count(count: int) -> None:
    if count > EXT_FIELD_COUNT_MAX:
        raise RemoteProtocolError(f"command with more than {EXT_FIELD_COUNT_MAX} ext fields")


def _check_header_size(size: int, size_max: int) -> None:
    if size > size_max:
        raise RemoteProtocolError(f"remoting header of {size} bytes; the maximum is {size_max}")


def _decode_loose(header: bytes, body: bytes | memoryview) -> RemotingCommand:
    """Decodes a JSON header as leniently as the Java side. Raises RemoteProtocolError if it is not a command.

    Accepted in addition to JSON: raw control characters in strings, bad UTF-8 and lone surrogates (both become U+FFFD),
    numbers and booleans as ext values ("3", "true"), numbers given as strings, null for an absent key.
    """
    try:
        loaded = json.loads(header.decode("utf-8", "replace"), strict=False)
        h = msgspec.convert(loaded, _LooseHeader, strict=False)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise RemoteProtocolError(f"the remoting header is not a command: {error}") from None
    if isinstance(h.language, str):
        language = LANGUAGE_BY_NAME.get(h.language, LanguageCode.OTHER)
    else:
        language = _LANGUAGES.get(h.language, LanguageCode.OTHER) if h.language is not None else LanguageCode.OTHER
    fields = h.extFields or {}
    _check_field_count(len(fields))
    ext_fields = {_valid_text(name): _ext_text(value) for name, value in fields.items() if value is not None}
    remark = None if h.remark is None else _ext_text(h.remark)
    return RemotingCommand(h.code, h.opaque or 0, h.flag or 0, language, h.version or 0, remark, ext_fields, body)


def _ext_text(value: Any) -> str:
    if isinstance(value, str):
        return _valid_text(value)
    try:
        return _valid_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"an ext field can't be read: {error}") from None


def _valid_text(text: str) -> str:
    """Returns `text` with lone surrogates, which can't be encoded, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _decode_binary(header: bytes, body: bytes | memoryview) -> RemotingCommand:
    size = len(header)
    try:
        code, language, version, opaque, flag, remark_size = _BINARY_FIXED.unpack_from(header)
        remark_end = _BINARY_FIXED.size + remark_size
        (ext_size,) = _INT32.unpack_from(header, remark_end) if remark_size >= 0 else (-1,)
        position = remark_end + 4
        ext_end = position + ext_size
        if ext_size < 0 or ext_end > size:
            raise RemoteProtocolError(f"remark of {remark_size} and ext of {ext_size} bytes in a header of {size}")
        ext_fields: dict[str, str] = {}
        count = 0
        while position < ext_end:
            count += 1
            _check_field_count(count)
            (name_size,) = _INT16.unpack_from(header, position)
            name_end = position + 2 + name_size
            (value_size,) = _INT32.unpack_from(header, name_end) if name_size >= 0 else (-1,)
            value_end = name_end + 4 + value_size
            if value_size < 0 or value_end > ext_end:
                raise RemoteProtocolError(f"ext name of {name_size} and value of {value_size} bytes don't fit")
            name = str(header[position + 2 : name_end], "utf-8", "replace")
            ext_fields[name] = str(header[name_end + 4 : value_end], "utf-8", "replace")
            position = value_end
    except struct.error:
        raise RemoteProtocolError(f"ROCKETMQ header of {size} bytes is truncated") from None
    remark = str(header[_BINARY_FIXED.size : remark_end], "utf-8", "replace") if remark_size else None
    return RemotingCommand(
        code,
        opaque,
        flag,
        _LANGUAGES.get(language, LanguageCode.OTHER),
        version,
        remark,
        ext_fields,
        body,
        SERIALIZE_ROCKETMQ,
    )

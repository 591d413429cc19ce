"""Frames of a port that is sent messages: the ext fields of a usual send are read straight into their struct.

A send is by far the most frequent request, and making a dict of its thirteen strings first would double the time.
Only what `RemotingParser` and `parse_header` would read the same way is read so: the code comes first, as RocketMQ's
clients write it, and there is no ext field but those of the struct, each of a fitting type. Anything else, a signed
request among it, becomes the command that `RemotingParser` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from ha.protocol.codes import LanguageCode
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.headers import SendMessageRequest, SendMessageRequestV2, parse_header
from ha.protocol.remoting import (
    BODY_COPIED_MAX,
    JSON_ERRORS,
    LANGUAGE_BY_NAME,
    LENGTHS,
    IncomingHeader,
    RemotingCommand,
    RemotingParser,
)


class SendCommand(RemotingCommand, kw_only=True, gc=False):
    """A send whose ext fields are in `request` and not in `ext_fields`, which is empty."""

    request: SendMessageRequest


class OnlyLong(SendMessageRequest, forbid_unknown_fields=True, gc=False):
    """The fields under their long names and no other."""


class OnlyShort(SendMessageRequestV2, forbid_unknown_fields=True, gc=False):
    """The fields under their one-letter names and no other."""


class _LongHeader(IncomingHeader, gc=False):
    code: Literal[10]  # of two codes in one header the last counts
    extFields: OnlyLong  # noqa: N815


class _ShortHeader(IncomingHeader, gc=False):
    code: Literal[310, 320]
    extFields: OnlyShort  # noqa: N815


_decode_long: Callable[[bytes], _LongHeader | _ShortHeader] = msgspec.json.Decoder(_LongHeader, strict=False).decode
_decode_short: Callable[[bytes], _LongHeader | _ShortHeader] = msgspec.json.Decoder(_ShortHeader, strict=False).decode
_DECODERS = {b'{"code":310,': _decode_short, b'{"code":320,': _decode_short, b'{"code":10,"': _decode_long}
"""By the first twelve bytes of the header."""


def read_send(header: bytes, body: bytes | memoryview) -> SendCommand | None:
    """The send that a JSON header and a body make, or None if it is no usual one."""
    decode = _DECODERS.get(header[:12])
    if decode is None:
        return None
    try:
        h = decode(header)
    except JSON_ERRORS:
        return None
    return SendCommand(
        h.code,
        h.opaque,
        h.flag,
        LANGUAGE_BY_NAME.get(h.language, LanguageCode.OTHER),
        h.version,
        h.remark,
        body=body,
        request=h.extFields,
    )


@with_compiled_twin
def read_sends(data: bytes, length_max: int, header_size_max: int) -> tuple[list[SendCommand], int]:
    """The usual sends that `data` begins with, and where the first frame begins that is none, or is not whole."""
    commands: list[SendCommand] = []
    position, end = 0, len(data)
    while end - position >= 8:
        length, header_size = LENGTHS.unpack_from(data, position)
        body_at, frame_end = position + 8 + header_size, position + 4 + length
        # A header in another encoding seems to have a size below 0, or one too large.
        if not (4 <= length <= length_max and 0 <= header_size <= header_size_max and body_at <= frame_end <= end):
            break
        body: bytes | memoryview
        if frame_end - body_at <= BODY_COPIED_MAX:
            body = data[body_at:frame_end]
        else:
            body = memoryview(data)[body_at:frame_end]
        command = read_send(data[position + 8 : body_at], body)
        if command is None:
            break
        commands.append(command)
        position = frame_end
    return commands, position


class SendParser(RemotingParser):
    """A `RemotingParser` that makes a `SendCommand` of a usual 10, 310 or 320 with a JSON header."""

    def _read_usual(self, data: bytes) -> tuple[Sequence[RemotingCommand], int]:
        return read_sends(data, self._frame_size_max - 4, self._header_size_max)

    def _decode_json(self, header: bytes, body: bytes | memoryview) -> RemotingCommand:
        command = read_send(header, body)
        return super()._decode_json(header, body) if command is None else command


def send_request(command: RemotingCommand) -> SendMessageRequest:
    """The ext fields of a send, whichever parser has read it. RemoteProtocolError names what is missing or wrong."""
    if type(command) is SendCommand:
        return command.request
    return parse_header(SendMessageRequest, command.ext_fields)

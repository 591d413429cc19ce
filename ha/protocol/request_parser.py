"""Parses frames of the most frequent requests, with their ext fields directly as a struct.

These are sends, pops, and acknowledgements of popped messages. A dict of a send's thirteen strings would double the
parsing time. Such a request is *usual* if the code comes first in its JSON header, as in RocketMQ's clients, and it has
only the ext fields of the struct, with the right types; `RemotingParser` and `parse_header` would then return the same
values. All other frames, including signed requests, are parsed by `RemotingParser`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.codes import LanguageCode
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.headers import SendMessageRequest, SendMessageRequestV2, parse_header
from ha.protocol.pop import AckMessageRequest, PopMessageRequest, parse_handle
from ha.protocol.remoting import (
    BODY_COPIED_MAX,
    JSON_ERRORS,
    LANGUAGE_BY_NAME,
    LENGTHS,
    IncomingHeader,
    RemotingCommand,
    RemotingParser,
)

ACK_COUNT_MAX = 64
"""Maximum number of acknowledgements in an `AckCommand`, so that other requests are not delayed"""


class SendCommand(RemotingCommand, kw_only=True, gc=False):
    """A send whose ext fields are in `request` and not in `ext_fields`, which is empty."""

    request: SendMessageRequest


class AckedPop(NamedTuple):
    """Values shared by the acknowledgements of messages that were popped together, from ext fields and receipt
    handles."""

    group: str
    topic: str
    """The topic that the messages were read from"""
    queue_id: int
    pop_time_ms: int
    is_order: bool


class AckCommand(RemotingCommand, kw_only=True, gc=False):
    """Successive ACK_MESSAGE (200051) requests on a connection, for messages that were popped together.

    They differ only in opaque and queue offset: request `opaques[i]` acknowledges the message at `offsets[i]`.
    """

    popped: AckedPop
    offsets: list[int]
    opaques: list[int]

    def is_continued_by(self, other: AckCommand) -> bool:
        """Returns whether `other` can join these acknowledgements: it differs only in offset and opaque, and there is
        room."""
        return (
            (self.popped, self.flag, self.language, self.version, self.remark)
            == (other.popped, other.flag, other.language, other.version, other.remark)
            and not self.body
            and not other.body
            and len(self.offsets) < ACK_COUNT_MAX
        )

    def alone(self, number: int) -> AckCommand:
        """Returns acknowledgement `number` as a separate command."""
        opaque = self.opaques[number]
        return msgspec.structs.replace(self, opaque=opaque, opaques=[opaque], offsets=[self.offsets[number]])


class PopCommand(RemotingCommand, kw_only=True, gc=False):
    """A POP_MESSAGE (200050) request whose ext fields are in `request` and not in `ext_fields`, which is empty."""

    request: PopMessageRequest


UsualCommand = SendCommand | AckCommand | PopCommand


class OnlyLong(SendMessageRequest, forbid_unknown_fields=True, gc=False):
    """Ext fields of a send under their long names. Any other field is an error."""


class OnlyShort(SendMessageRequestV2, forbid_unknown_fields=True, gc=False):
    """Ext fields of a send under their one-letter names. Any other field is an error."""


class OnlyAck(AckMessageRequest, forbid_unknown_fields=True, gc=False):
    """Ext fields of an acknowledgement. Any other field is an error."""

    broker_name: str | None = msgspec.field(default=None, name="bname")


class OnlyPop(PopMessageRequest, forbid_unknown_fields=True, gc=False):
    """Ext fields of a pop. Any other field is an error."""

    broker_name: str | None = msgspec.field(default=None, name="bname")


class _LongHeader(IncomingHeader, gc=False):
    code: Literal[10]  # if a header has two codes, the last one applies
    extFields: OnlyLong  # noqa: N815


class _ShortHeader(IncomingHeader, gc=False):
    code: Literal[310, 320]
    extFields: OnlyShort  # noqa: N815


class _AckHeader(IncomingHeader, gc=False):
    code: Literal[200051]
    extFields: OnlyAck  # noqa: N815


class _PopHeader(IncomingHeader, gc=False):
    code: Literal[200050]
    extFields: OnlyPop  # noqa: N815


_Decode = Callable[[bytes], _LongHeader | _ShortHeader | _AckHeader | _PopHeader]
_decode_short: _Decode = msgspec.json.Decoder(_ShortHeader, strict=False).decode
_DECODERS: dict[bytes, _Decode] = {
    b"10": msgspec.json.Decoder(_LongHeader, strict=False).decode,
    b"310": _decode_short,
    b"320": _decode_short,
    b"200050": msgspec.json.Decoder(_PopHeader, strict=False).decode,
    b"200051": msgspec.json.Decoder(_AckHeader, strict=False).decode,
}
"""Decoder of the JSON header, by request code"""
_CODE = re.compile(rb'\{"code":(\d+),')


def read_request(header: bytes, body: bytes | memoryview) -> UsualCommand | None:
    """Returns the request with this JSON header and this body; None if it is not a usual one."""
    begin = _CODE.match(header)
    decode = None if begin is None else _DECODERS.get(begin[1])
    if decode is None:
        return None
    try:
        h = decode(header)
        language = LANGUAGE_BY_NAME.get(h.language, LanguageCode.OTHER)
        fields = h.code, h.opaque, h.flag, language, h.version, h.remark
        if isinstance(h, _AckHeader):
            popped, offsets = _acked_pop(h.extFields), [h.extFields.offset]
            return AckCommand(*fields, body=body, popped=popped, offsets=offsets, opaques=[h.opaque])
        if isinstance(h, _PopHeader):
            return PopCommand(*fields, body=body, request=h.extFields)
    except (*JSON_ERRORS, RemoteProtocolError):
        return None
    return SendCommand(*fields, body=body, request=h.extFields)


@with_compiled_twin
def read_requests(data: bytes, length_max: int, header_size_max: int) -> tuple[list[UsualCommand], int, int]:
    """Returns the usual requests at the start of `data`, the position of the first other or incomplete frame, and the
    number of frames before it."""
    commands: list[UsualCommand] = []
    position, end, count = 0, len(data), 0
    while end - position >= 8:
        length, header_size = LENGTHS.unpack_from(data, position)
        body_at, frame_end = position + 8 + header_size, position + 4 + length
        # In another encoding, the first byte of the header size is not 0, so the size is negative or too large.
        if not (4 <= length <= length_max and 0 <= header_size <= header_size_max and body_at <= frame_end <= end):
            break
        body: bytes | memoryview
        if frame_end - body_at <= BODY_COPIED_MAX:
            body = data[body_at:frame_end]
        else:
            body = memoryview(data)[body_at:frame_end]
        command = read_request(data[position + 8 : body_at], body)
        if command is None:
            break
        last = commands[-1] if commands else None
        if isinstance(command, AckCommand) and isinstance(last, AckCommand) and last.is_continued_by(command):
            last.offsets += command.offsets
            last.opaques += command.opaques
        else:
            commands.append(command)
        position = frame_end
        count += 1
    return commands, position, count


class RequestParser(RemotingParser):
    """A `RemotingParser` that returns usual sends as `SendCommand`, usual pops as `PopCommand`, and usual ACK_MESSAGE
    (200051) requests as `AckCommand`, if their headers are JSON."""

    def _read_usual(self, data: bytes) -> tuple[Sequence[RemotingCommand], int, int]:
        return read_requests(data, self._frame_size_max - 4, self._header_size_max)

    def _decode_json(self, header: bytes, body: bytes | memoryview) -> RemotingCommand:
        command = read_request(header, body)
        return super()._decode_json(header, body) if command is None else command


def send_request(command: RemotingCommand) -> SendMessageRequest:
    """Returns the ext fields of a send from either parser. Raises RemoteProtocolError if a field is missing or invalid;
    the error names the field."""
    if type(command) is SendCommand:
        return command.request
    return parse_header(SendMessageRequest, command.ext_fields)


def pop_request(command: RemotingCommand) -> PopMessageRequest:
    """Returns the ext fields of a pop from either parser. Raises RemoteProtocolError if a field is missing or invalid;
    the error names the field."""
    if type(command) is PopCommand:
        return command.request
    return parse_header(PopMessageRequest, command.ext_fields)


def ack_command(command: RemotingCommand) -> AckCommand:
    """Returns acknowledgements from either parser. Raises RemoteProtocolError if a field is missing or invalid, or the
    receipt handle is invalid."""
    if type(command) is AckCommand:
        return command
    request = parse_header(AckMessageRequest, command.ext_fields)
    return AckCommand(
        command.code,
        command.opaque,
        command.flag,
        command.language,
        command.version,
        command.remark,
        body=command.body,
        serialize_type=command.serialize_type,
        popped=_acked_pop(request),
        offsets=[request.offset],
        opaques=[command.opaque],
    )


def _acked_pop(request: AckMessageRequest) -> AckedPop:
    handle = parse_handle(request.extra_info)
    return AckedPop(request.consumer_group, request.topic, request.queue_id, handle.pop_time_ms, handle.is_order)

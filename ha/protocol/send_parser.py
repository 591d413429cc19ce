"""Frames of a port that is sent messages: the ext fields of a usual send are read straight into their struct.

A send is by far the most frequent request, and making a dict of its thirteen strings first would double the time.
Only what `RemotingParser` and `parse_header` would read the same way is read so: the code comes first, as RocketMQ's
clients write it, and there is no ext field but those of the struct, each of a fitting type. Anything else, a signed
request among it, becomes the command that `RemotingParser` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from ha.protocol.codes import LanguageCode
from ha.protocol.headers import SendMessageRequest, SendMessageRequestV2, parse_header
from ha.protocol.remoting import JSON_ERRORS, LANGUAGE_BY_NAME, IncomingHeader, RemotingCommand, RemotingParser


class SendCommand(RemotingCommand, kw_only=True, gc=False):
    """A send whose ext fields are in `request` and not in `ext_fields`, which is empty."""

    request: SendMessageRequest


class _OnlyLong(SendMessageRequest, forbid_unknown_fields=True, gc=False):
    """The fields under their long names and no other."""


class _OnlyShort(SendMessageRequestV2, forbid_unknown_fields=True, gc=False):
    """The fields under their one-letter names and no other."""


class _LongHeader(IncomingHeader, gc=False):
    code: Literal[10]  # of two codes in one header the last counts
    extFields: _OnlyLong  # noqa: N815


class _ShortHeader(IncomingHeader, gc=False):
    code: Literal[310, 320]
    extFields: _OnlyShort  # noqa: N815


_decode_long: Callable[[bytes], _LongHeader | _ShortHeader] = msgspec.json.Decoder(_LongHeader, strict=False).decode
_decode_short: Callable[[bytes], _LongHeader | _ShortHeader] = msgspec.json.Decoder(_ShortHeader, strict=False).decode
_DECODERS = {b'{"code":310,': _decode_short, b'{"code":320,': _decode_short, b'{"code":10,"': _decode_long}
"""By the first twelve bytes of the header."""


class SendParser(RemotingParser):
    """A `RemotingParser` that makes a `SendCommand` of a usual 10, 310 or 320 with a JSON header."""

    def _decode_json(self, header: bytes, body: bytes | memoryview) -> RemotingCommand:
        decode = _DECODERS.get(header[:12])
        if decode is not None:
            try:
                h = decode(header)
            except JSON_ERRORS:
                pass
            else:
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
        return super()._decode_json(header, body)


def send_request(command: RemotingCommand) -> SendMessageRequest:
    """The ext fields of a send, whichever parser has read it. RemoteProtocolError names what is missing or wrong."""
    if type(command) is SendCommand:
        return command.request
    return parse_header(SendMessageRequest, command.ext_fields)

"""The signature that RocketMQ 5's gRPC clients put into the metadata of each call.

    x-mq-date-time: 20261127T023400Z
    authorization:  MQv2-HMAC-SHA1 Credential=<access key>[/region/service], SignedHeaders=x-mq-date-time,
                    Signature=<hex of HMAC-SHA1(secret key, the value of x-mq-date-time)>

The signature covers only the time, not the call: an attacker who overhears it can make any call in the client's name,
at any later time, because no server checks the time (clients send local time as UTC). Sources:
DefaultAuthenticationContextBuilder, the clients of Java, Python and Go.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from typing import NamedTuple

from ha.errors import RemoteProtocolError
from ha.protocol.acl import SigningKey

AUTHORIZATION = "authorization"
DATE_TIME = "x-mq-date-time"
HEADER_SIZE_MAX = 4096
"""Maximum length in characters of the `authorization` header and of the `x-mq-date-time` header."""
_HEX = re.compile(r"([0-9A-Fa-f]{40})?")


class GrpcSignature(NamedTuple):
    """The access key that a call claims, the signed content, and the signature (`digest`). All fields are empty without
    the authorization header."""

    access_key: str = ""
    content: bytes = b""
    digest: bytes = b""

    def is_by(self, key: SigningKey) -> bool:
        """Returns whether the signature was made with `key`; takes constant time."""
        return hmac.compare_digest(key.digest(self.content), self.digest)


def read_signature(metadata: Mapping[str, str]) -> GrpcSignature:
    """Returns the signature in a call's metadata (names in lower case).

    Raises RemoteProtocolError if the signature is malformed; the error does not quote it.
    """
    authorization, date_time = metadata.get(AUTHORIZATION, ""), metadata.get(DATE_TIME, "")
    if not authorization:
        return GrpcSignature()
    if not date_time:
        raise RemoteProtocolError("datetime is null.")
    if len(authorization) > HEADER_SIZE_MAX or len(date_time) > HEADER_SIZE_MAX:
        raise RemoteProtocolError(f"{AUTHORIZATION} and {DATE_TIME} have at most {HEADER_SIZE_MAX} characters")
    _, space, rest = authorization.partition(" ")
    if not space:
        raise RemoteProtocolError("authentication header is incorrect.")
    access_key, digest = "", b""
    for item in rest.split(","):
        name, equals, value = item.strip().partition("=")
        if not equals:
            raise RemoteProtocolError(f"{AUTHORIZATION} is not a list of name=value")
        if name == "Credential":
            access_key = value.partition("/")[0]  # the Python client without credentials sends an empty one
        elif name == "Signature":
            if not _HEX.fullmatch(value):
                raise RemoteProtocolError("Signature is not a SHA-1 in hexadecimal digits")
            digest = bytes.fromhex(value)
    try:
        return GrpcSignature(access_key, date_time.encode(), digest)
    except UnicodeEncodeError:
        raise RemoteProtocolError(f"{DATE_TIME} is not text") from None

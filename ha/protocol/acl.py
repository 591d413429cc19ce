"""Signs requests and verifies signatures as RocketMQ's plain ACL does.

A signed request has the ext fields AccessKey (the signer), SecurityToken (optional) and

    Signature = base64(HMAC-SHA1(secret key, content))
    content   = the values of all ext fields except Signature, sorted by name, then the body

Names are compared by UTF-16 code units, as Java's String does; values are the strings as transmitted, in UTF-8 without
separators. Clients up to version 4.9.3 don't sign `_UNIQUE_KEY_QUERY`. The signature contains no time, so a captured
request can be replayed unless TLS protects it. Sources: AclClientRPCHook, AclSigner, AclUtils.combineRequestContent,
PlainAccessValidator, DefaultAuthenticationContextBuilder.
"""

from __future__ import annotations

import hmac
from binascii import b2a_base64

from ha.errors import LocalProtocolError
from ha.protocol.remoting import RemotingCommand

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
SECURITY_TOKEN = "SecurityToken"
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
"""An ext field that clients up to 4.9.3 add after signing; later ones sign it."""
VERSION_QUERIES_UNSIGNED_MAX = 399
"""The ordinal of V4_9_3, the last version whose clients don't sign _UNIQUE_KEY_QUERY"""

_UNSIGNED = frozenset({SIGNATURE})
_UNSIGNED_BEFORE = frozenset({SIGNATURE, UNIQUE_KEY_QUERY})


class SigningKey:
    """A secret key prepared for signing; its text is not kept."""

    __slots__ = ("_keyed",)

    def __init__(self, secret_key: str) -> None:
        self._keyed = hmac.new(secret_key.encode(), digestmod="sha1")

    def __repr__(self) -> str:
        return "<SigningKey>"

    def signature(self, command: RemotingCommand) -> bytes:
        """Returns the base64 value of Signature. Raises UnicodeEncodeError if a string can't be encoded as UTF-8."""
        fields = command.ext_fields
        names = sorted(fields)
        if not "".join(names).isascii():
            names.sort(key=_utf16)
        unsigned = _UNSIGNED if command.version > VERSION_QUERIES_UNSIGNED_MAX else _UNSIGNED_BEFORE
        content = "".join([fields[name] for name in names if name not in unsigned]).encode()
        return b2a_base64(self.digest(content, command.body), newline=False)

    def digest(self, content: bytes, body: bytes | memoryview = b"") -> bytes:
        """Returns the HMAC-SHA1 of `content` and `body`."""
        signing = self._keyed.copy()
        signing.update(content)
        signing.update(body)
        return signing.digest()

    def has_signed(self, command: RemotingCommand) -> bool:
        """Returns whether the Signature of `command` was made with this key; compares in constant time.

        Raises UnicodeEncodeError if a string can't be encoded as UTF-8, which does not happen with parsed frames.
        """
        claimed = command.ext_fields.get(SIGNATURE, "").encode()
        return hmac.compare_digest(self.signature(command), claimed)


class AclCredentials:
    """Credentials of a client, or of a broker as a client: access key, secret key, optional security token."""

    __slots__ = ("_key", "_security_token", "access_key")

    def __init__(self, access_key: str, secret_key: str, security_token: str | None = None) -> None:
        """Raises ValueError if a key is empty. Brokers accept only keys of more than six characters."""
        if not access_key or not secret_key:
            raise ValueError("credentials need a non-empty access key and secret key")
        self.access_key = access_key
        self._key = SigningKey(secret_key)
        self._security_token = security_token

    def __repr__(self) -> str:
        return f"AclCredentials({self.access_key!r}, ***)"

    def sign(self, command: RemotingCommand) -> None:
        """Sets the signature fields of `command`, replacing existing ones. Raises LocalProtocolError if a string can't
        be encoded as UTF-8."""
        if self._security_token is not None:
            command.ext_fields[SECURITY_TOKEN] = self._security_token
        sign(command, self.access_key, self._key)


def sign(command: RemotingCommand, access_key: str, key: SigningKey) -> None:
    """Sets access key and signature of `command`, replacing existing ones. Raises LocalProtocolError if a string can't
    be encoded as UTF-8."""
    command.ext_fields[ACCESS_KEY] = access_key
    try:
        command.ext_fields[SIGNATURE] = key.signature(command).decode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"command {command.code} can't be signed: {error.reason}") from None


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be", "surrogatepass")

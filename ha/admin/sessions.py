"""Checks adminToken, and issues session cookies to browsers after a login with it.

    halog_NAME = EXPIRY.NONCE.PROOF
    EXPIRY in seconds since 1970, PROOF = HMAC-SHA256(key, "session:EXPIRY.NONCE") as hex

Key and NAME are derived from the token, so valid sessions are not stored. Browsers send a cookie to every port of its
host. So nodes on one host accept each other's cookies if they have the same token; with other tokens NAME differs, and
they don't overwrite each other's. A new token ends all sessions. A logout ends one, on the node that receives it, until
that node restarts: ended sessions are remembered in memory only. The cookie is hidden from scripts, and is not sent for
requests from other sites. It permits reading; the actions of the dashboard also need a form token of the same session
(`form_token`).

A form token is built in the same way, but its PROOF also covers the session that it belongs to. It is valid until
EXPIRY or `use_form`.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from hashlib import sha256

SESSION_S = 12 * 3600
FORM_S = 3600
ENDED_COUNT_MAX = 4096
"""Maximum number of logged-out sessions, and of used form tokens, that are remembered; beyond it the earliest ones are
forgotten, and are valid again until they expire."""
_NAME_LENGTH = 8


class AdminKey:
    """Recognizes adminToken without storing it. `token`: None if none is configured."""

    def __init__(self, token: str | None = None) -> None:
        self._digest = None if token is None else sha256(token.encode()).digest()
        self.sessions = None if self._digest is None else Sessions(self._digest)
        """Sessions of browsers; None if no token is configured."""

    @property
    def is_set(self) -> bool:
        """Whether a token is configured."""
        return self._digest is not None

    def matches(self, token: bytes) -> bool:
        """Returns whether `token` is the configured one."""
        return self._digest is not None and hmac.compare_digest(sha256(token).digest(), self._digest)


class _Ended:
    """Cookie values or form tokens that are no longer valid, oldest first; at most ENDED_COUNT_MAX."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, value: str) -> bool:
        return value in self._values

    def add(self, value: str) -> None:
        self._values[value] = None
        if len(self._values) > ENDED_COUNT_MAX:
            self._values.popitem(last=False)


class Sessions:
    """Issues and checks cookies and form tokens. `digest`: SHA-256 of the token."""

    def __init__(self, digest: bytes) -> None:
        self._key = hmac.digest(digest, b"halog session key", sha256)
        self.cookie_name = "halog_" + hmac.digest(digest, b"halog session name", sha256).hex()[:_NAME_LENGTH]
        self._logged_out = _Ended()
        self._used_forms = _Ended()

    def issue(self, now_s: float | None = None) -> str:
        """Returns a new cookie value that is valid for SESSION_S."""
        return self._issue("session", SESSION_S, now_s)

    def is_valid(self, value: str, now_s: float | None = None) -> bool:
        """Returns whether a cookie value was issued with this token, has not expired and was not logged out here."""
        return self._is_issued("session", value, now_s) and value not in self._logged_out

    def end(self, value: str) -> None:
        """Ends a session on this node until the node restarts. Does nothing if `value` is not a valid cookie value."""
        if self._is_issued("session", value, None):
            self._logged_out.add(value)

    def form_token(self, session: str, now_s: float | None = None) -> str:
        """Returns a token that is valid for FORM_S, for a form shown in `session` (a cookie value, or a nonce for the
        login form)."""
        return self._issue(f"form of {session}", FORM_S, now_s)

    def is_form_valid(self, session: str, token: str, now_s: float | None = None) -> bool:
        """Returns whether a form token was issued for this session, has not expired and was not used on this node."""
        return self._is_issued(f"form of {session}", token, now_s) and token not in self._used_forms

    def use_form(self, token: str) -> None:
        """Makes a form token invalid on this node."""
        self._used_forms.add(token)

    def _issue(self, purpose: str, life_s: int, now_s: float | None) -> str:
        signed = f"{int((time.time() if now_s is None else now_s) + life_s)}.{secrets.token_hex(8)}"
        return f"{signed}.{self._proof(purpose, signed)}"

    def _is_issued(self, purpose: str, value: str, now_s: float | None) -> bool:
        signed, _, proof = value.rpartition(".")
        expiry = signed.partition(".")[0]
        if not (expiry.isascii() and expiry.isdecimal() and len(expiry) <= 12):
            return False
        is_ours = proof.isascii() and hmac.compare_digest(self._proof(purpose, signed), proof)
        return is_ours and (time.time() if now_s is None else now_s) < int(expiry)

    def _proof(self, purpose: str, signed: str) -> str:
        return hmac.digest(self._key, f"{purpose}:{signed}".encode("utf-8", "surrogateescape"), sha256).hex()


def session_label(value: str) -> str:
    """Returns the NONCE of a cookie value, which identifies the session in log lines without revealing its proof; "?"
    if the value is malformed."""
    return value.split(".")[1] if value.count(".") == 2 else "?"

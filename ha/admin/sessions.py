"""Checks adminToken, and issues session cookies to browsers after a login with it.

    halog_NAME = EXPIRY.PROOF      EXPIRY in seconds since the epoch, PROOF = HMAC-SHA256(key, EXPIRY) as hex

Key and NAME are derived from the token, so nothing is stored: nodes with the same token accept each other's cookies,
which browsers send to every port of a host, and nodes with other tokens don't overwrite them. A new token ends all
sessions. The cookie gives read access only (credentials.py), is hidden from scripts, and is not sent for requests from
other sites.
"""

from __future__ import annotations

import hmac
import time
from hashlib import sha256

SESSION_S = 12 * 3600
_NAME_LENGTH = 8


class AdminKey:
    """Recognises adminToken without storing it. `token` None: there is none."""

    def __init__(self, token: str | None = None) -> None:
        self._digest = None if token is None else sha256(token.encode()).digest()
        self.sessions = None if self._digest is None else Sessions(self._digest)
        """Sessions of browsers; None without a token."""

    @property
    def is_set(self) -> bool:
        """Whether a token is configured."""
        return self._digest is not None

    def matches(self, token: bytes) -> bool:
        """Whether `token` is the configured one."""
        return self._digest is not None and hmac.compare_digest(sha256(token).digest(), self._digest)


class Sessions:
    """Issues and checks cookies. `digest`: SHA-256 of the token."""

    def __init__(self, digest: bytes) -> None:
        self._key = hmac.digest(digest, b"halog session key", sha256)
        self.cookie_name = "halog_" + hmac.digest(digest, b"halog session name", sha256).hex()[:_NAME_LENGTH]

    def issue(self, now_s: float | None = None) -> str:
        """Returns a cookie value that is valid for SESSION_S."""
        expiry = str(int((time.time() if now_s is None else now_s) + SESSION_S))
        return f"{expiry}.{self._proof(expiry)}"

    def is_valid(self, value: str, now_s: float | None = None) -> bool:
        """Whether a cookie value was issued with this token and has not expired."""
        expiry, _, proof = value.partition(".")
        if not (expiry.isascii() and expiry.isdecimal() and len(expiry) <= 12):
            return False
        is_ours = hmac.compare_digest(self._proof(expiry).encode(), proof.encode())
        return is_ours and (time.time() if now_s is None else now_s) < int(expiry)

    def _proof(self, expiry: str) -> str:
        return hmac.digest(self._key, expiry.encode(), sha256).hex()

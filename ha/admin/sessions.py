"""What is kept of adminToken, and a browser's way to show it once: a form, and then a cookie that counts for a while.

    halog_NAME = EXPIRY.PROOF      EXPIRY in seconds since the epoch, PROOF = HMAC-SHA256(key, EXPIRY) as hex

Key and NAME come from the token: nodes with the same token know each other's cookies, which browsers send to every port
of a host, nodes with others don't overwrite them, and nothing has to be remembered. Another token ends all sessions.
The cookie opens pages for reading only (credentials.py), scripts don't see it, and no other site's page makes a browser
send it.
"""

from __future__ import annotations

import hmac
import time
from hashlib import sha256

SESSION_S = 12 * 3600
_NAME_LENGTH = 8


class AdminKey:
    """Knows adminToken when it sees it, and keeps nothing that it could be read from. `token` None: there is none."""

    def __init__(self, token: str | None = None) -> None:
        self._digest = None if token is None else sha256(token.encode()).digest()
        self.sessions = None if self._digest is None else Sessions(self._digest)
        """Of browsers that have shown the token; None without one"""

    @property
    def is_set(self) -> bool:
        """Whether there is a token."""
        return self._digest is not None

    def fits(self, token: bytes) -> bool:
        """Whether it is the token."""
        return self._digest is not None and hmac.compare_digest(sha256(token).digest(), self._digest)


class Sessions:
    """Makes and checks cookies. `digest`: SHA-256 of the token."""

    def __init__(self, digest: bytes) -> None:
        self._key = hmac.digest(digest, b"halog session key", sha256)
        self.cookie_name = "halog_" + hmac.digest(digest, b"halog session name", sha256).hex()[:_NAME_LENGTH]

    def issue(self, now_s: float | None = None) -> str:
        """A cookie's value that counts for SESSION_S from now on."""
        expiry = str(int((time.time() if now_s is None else now_s) + SESSION_S))
        return f"{expiry}.{self._proof(expiry)}"

    def is_valid(self, value: str, now_s: float | None = None) -> bool:
        """Whether a value was issued with this token, and counts still."""
        expiry, _, proof = value.partition(".")
        if not (expiry.isascii() and expiry.isdecimal() and len(expiry) <= 12):
            return False
        is_ours = hmac.compare_digest(self._proof(expiry).encode(), proof.encode())
        return is_ours and (time.time() if now_s is None else now_s) < int(expiry)

    def _proof(self, expiry: str) -> str:
        return hmac.digest(self._key, expiry.encode(), sha256).hex()

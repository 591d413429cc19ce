"""An SSL context that is replaced when its files change, so that new certificates don't need a restart.

`refresh` checks whether a file has changed (time, size, inode), and if so loads all of them. If that fails, for example
because a file is half-written or the key does not match yet, the old context stays in use, and every further `refresh`
tries again; the same failure is logged only once. Existing connections keep their context.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from collections.abc import Callable

import msgspec

from ha.errors import CertificateUnusable

from .certificate import earliest_end_ms
from .files import TlsFiles, read_pem

logger = logging.getLogger(__name__)

EXPIRY_WARNING_MS = 30 * 86_400_000
"""Time before the expiry of a certificate, in ms, at which it begins to be reported: in the status, and once a day in
the log."""
DAY_MS = 86_400_000

_Fingerprints = tuple[tuple[int, int, int] | None, ...]


class CredentialStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one certificate for the status page. Times are in ms since the epoch."""

    certificate: str
    expires_at_ms: int | None
    """Earliest expiry in the file, including intermediate certificates; None if it has no certificate."""
    is_expiring: bool
    """Whether the certificate is expired, or expires within 30 days."""
    loaded_at_ms: int
    error: str
    """Why the current files can't be used, in which case the previous ones stay in use; "" if they are used."""


class Credentials:
    """The current context for a set of files.

    The constructor and `refresh` block while they read the files. The constructor raises CertificateUnusable if a file
    can't be used.
    """

    def __init__(
        self,
        role: str,
        files: TlsFiles,
        make: Callable[[TlsFiles], ssl.SSLContext],
        *,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        """`make` creates a context from `files`; `role` ("server", "client", …) identifies the credentials in the log;
        `wall_clock_ms` returns the time in ms since the epoch."""
        self.role = role
        self.files = files
        self._make = make
        self._wall_clock_ms = wall_clock_ms
        self._seen = self._fingerprints()
        self._error = ""
        self._warned_at_ms = -DAY_MS
        self.context, self._expires_at_ms = self._load()
        """The context for new connections."""
        self._loaded_at_ms = wall_clock_ms()
        self._warn_about_exposed_key()

    def refresh(self) -> bool:
        """Loads the files if one has changed, or the last attempt failed; returns whether the context was replaced.

        Also logs, once a day, that the certificate expires within EXPIRY_WARNING_MS or has expired.
        """
        changed = self._refresh()
        self._warn_about_expiry()
        return changed

    def status(self) -> CredentialStatus:
        """Returns the current state."""
        return CredentialStatus(
            certificate=self.files.certificate,
            expires_at_ms=self._expires_at_ms,
            is_expiring=self._is_expiring(),
            loaded_at_ms=self._loaded_at_ms,
            error=self._error,
        )

    def _refresh(self) -> bool:
        seen = self._fingerprints()
        if seen == self._seen and not self._error:  # a file may become readable without a change of its contents
            return False
        self._seen = seen  # before the files are read, so that a change in the meantime is noticed
        try:
            context, expires_at_ms = self._load()
        except CertificateUnusable as error:
            if str(error) != self._error:
                logger.error("tls.reload_failed role=%s reason=%r fallback=previous", self.role, str(error))
            self._error = str(error)
            return False
        self.context, self._expires_at_ms = context, expires_at_ms
        self._error = ""
        self._loaded_at_ms = self._wall_clock_ms()
        self._warned_at_ms = -DAY_MS
        logger.info("tls.reloaded role=%s files=%s", self.role, ",".join(self.files.paths))
        self._warn_about_exposed_key()
        return True

    def _load(self) -> tuple[ssl.SSLContext, int | None]:
        context = self._make(self.files)
        if not self.files.certificate:
            return context, None
        try:
            return context, earliest_end_ms(read_pem(self.files.certificate))
        except ValueError as error:
            raise CertificateUnusable(self.files.certificate, str(error)) from None

    def _fingerprints(self) -> _Fingerprints:
        return tuple(_fingerprint(path) for path in self.files.paths)

    def _is_expiring(self) -> bool:
        return self._expires_at_ms is not None and self._expires_at_ms - self._wall_clock_ms() < EXPIRY_WARNING_MS

    def _warn_about_expiry(self) -> None:
        now = self._wall_clock_ms()
        if self._expires_at_ms is None or not self._is_expiring() or abs(now - self._warned_at_ms) < DAY_MS:
            return  # abs: the clock may have been set back
        self._warned_at_ms = now
        days = (self._expires_at_ms - now) / DAY_MS
        logger.warning(
            "tls.certificate_%s role=%s file=%s days=%.1f",
            "expiring" if days > 0 else "expired",
            self.role,
            self.files.certificate,
            days,
        )

    def _warn_about_exposed_key(self) -> None:
        key = self.files.key or self.files.certificate
        if not key or self.files.key_password is not None:
            return
        try:
            mode = os.stat(key).st_mode
        except OSError:
            return
        if mode & stat.S_IROTH:
            logger.warning("tls.key_file_exposed role=%s file=%s mode=%04o", self.role, key, stat.S_IMODE(mode))


def _fingerprint(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)

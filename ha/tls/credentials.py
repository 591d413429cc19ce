"""A context that follows its files: new files serve new connections, without a restart.

`refresh` looks whether any of the files has changed (time, size, inode) and makes a new context of all of them. Only a
context that could be made takes the old one's place, in one assignment; a certificate whose key has not been replaced
yet, or a half-written file, is told once and tried again when something changes. Connections keep the context that they
were made with.
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
"""So long before its end a certificate is warned of, once a day and in the status."""
DAY_MS = 86_400_000

_Look = tuple[tuple[int, int, int] | None, ...]


class CredentialStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a status page shows of one side's certificate; times are ms since the epoch."""

    certificate: str
    expires_at_ms: int | None
    """None without a certificate of one's own. The first end in the file, for intermediate ones end, too."""
    is_expiring: bool
    """In less than 30 days, or already."""
    loaded_at_ms: int
    error: str
    """Why the files as they are now can't be used; those from before are in force then. "" if they are."""


class Credentials:
    """The context that is in force, of files that may change. Making one and `refresh` block; CertificateUnusable."""

    def __init__(
        self,
        role: str,
        files: TlsFiles,
        make: Callable[[TlsFiles], ssl.SSLContext],
        *,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        """`make` builds a context of `files`; `role` ("server", "client", …) names it in the log."""
        self.role = role
        self.files = files
        self._make = make
        self._wall_clock_ms = wall_clock_ms
        self._seen = self._look()
        self._error = ""
        self._warned_at_ms = -DAY_MS
        self.context, self._expires_at_ms = self._load()
        """The context that new connections are to be made with."""
        self._loaded_at_ms = wall_clock_ms()
        self._warn_of_open_key()

    def refresh(self) -> bool:
        """Make a new context if a file has changed and they can be used; tell whether. Warns of an expiry."""
        changed = self._refresh()
        self._warn_of_expiry()
        return changed

    def status(self) -> CredentialStatus:
        """Return what is in force."""
        return CredentialStatus(
            certificate=self.files.certificate,
            expires_at_ms=self._expires_at_ms,
            is_expiring=self._is_expiring(),
            loaded_at_ms=self._loaded_at_ms,
            error=self._error,
        )

    def _refresh(self) -> bool:
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen  # taken before the files are read: what changes meanwhile is seen next time
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
        self._warn_of_open_key()
        return True

    def _load(self) -> tuple[ssl.SSLContext, int | None]:
        context = self._make(self.files)
        if not self.files.certificate:
            return context, None
        try:
            return context, earliest_end_ms(read_pem(self.files.certificate))
        except ValueError as error:
            raise CertificateUnusable(self.files.certificate, str(error)) from None

    def _look(self) -> _Look:
        return tuple(_fingerprint(path) for path in self.files.paths)

    def _is_expiring(self) -> bool:
        return self._expires_at_ms is not None and self._expires_at_ms - self._wall_clock_ms() < EXPIRY_WARNING_MS

    def _warn_of_expiry(self) -> None:
        now = self._wall_clock_ms()
        if self._expires_at_ms is None or not self._is_expiring() or now - self._warned_at_ms < DAY_MS:
            return
        self._warned_at_ms = now
        days = (self._expires_at_ms - now) / DAY_MS
        logger.warning(
            "tls.certificate_%s role=%s file=%s days=%.1f",
            "expiring" if days > 0 else "expired",
            self.role,
            self.files.certificate,
            days,
        )

    def _warn_of_open_key(self) -> None:
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

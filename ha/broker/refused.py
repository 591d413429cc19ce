"""The exception by which a handler refuses a well-formed request, and the checks that raise it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trio.lowlevel import RunVar

from ha.acl import AclGuard, AclRefusal
from ha.broker.limited_log import LimitedLog
from ha.broker.standing import Standing
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection
from ha.store.files import is_passing

logger = logging.getLogger(__name__)

REJECT_REMARK = "[REJECTREQUEST]system busy, start flow control for a while"


class RefusedError(Exception):
    """A check of one request failed. `code` and `remark` become its answer."""

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


def refuse_if(fault: str, code: ResponseCode = ResponseCode.SYSTEM_ERROR) -> None:
    """Raises RefusedError with the remark `fault`, unless it is empty."""
    if fault:
        raise RefusedError(code, fault)


def refuse_on_slave(standing: Standing, remark: str) -> None:
    """Raises RefusedError (SYSTEM_ERROR, `remark`) on a slave."""
    refuse_if(remark if standing.is_slave else "")


def check_stores(standing: Standing) -> None:
    """Raises RefusedError while this broker may not store messages."""
    refusal = standing.why_not_stored()
    if refusal:
        raise RefusedError(standing.refusal_code, f"{REJECT_REMARK} ({refusal})")


def check_right(
    guard: AclGuard | None, connection: RemotingConnection, command: RemotingCommand, topic: str, right: int
) -> None:
    """Raises RefusedError if access control is enabled and the account of an admitted request lacks `right` on `topic`.

    Needed for a topic that the request does not name, so that admission could not check it.
    """
    if guard is not None:
        try:
            guard.check(connection, command, topic, right)
        except AclRefusal as refusal:
            raise RefusedError(refusal.code, refusal.remark) from None


@contextmanager
def refused_if_unreadable() -> Iterator[None]:
    """Raises RefusedError if the block, which only reads, raises OSError: with SYSTEM_BUSY for a temporary error, such
    as too many open files (`is_passing`), otherwise with SYSTEM_ERROR. Logs the latter, with the file's path, which
    clients are not told."""
    try:
        yield
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        if is_passing(error):
            raise RefusedError(ResponseCode.SYSTEM_BUSY, reason) from error
        _limited_log().write("broker.read_failed reason=%r", str(error), key=str(error))
        raise RefusedError(ResponseCode.SYSTEM_ERROR, f"the disk can't read: {reason}") from error


_log_of_run: RunVar[LimitedLog] = RunVar("_log_of_run")
"""One for each run of Trio, as the rate limit uses Trio's clock"""


def _limited_log() -> LimitedLog:
    try:
        return _log_of_run.get()
    except LookupError:
        log = LimitedLog(logger)
        _log_of_run.set(log)
        return log

"""Every exception that halog raises on purpose.

    HalogError
    ├── ConfigError            the operator's mistake: a key or value that can't be used (exit 78)
    ├── StoreError             something about the store directory
    │   ├── CorruptLog         bytes on disk are damaged beyond automatic recovery (exit 65)
    │   ├── DamagedBytes       a range of the log is damaged and not healed yet; the rest is served
    │   ├── StoreLocked        another process has this store open (exit 69)
    │   ├── DiskFull           no room for the next file; what is stored stays readable
    │   ├── DiskFailed         a write or sync failed; what it covered is in doubt, so the node stops (exit 74)
    │   └── StoreUnreadable    a reader was pointed at something that is no store, or that it may not read
    ├── AddressInUse           a port that the configuration names is taken (exit 69)
    ├── ProtocolError
    │   ├── LocalProtocolError   our own code tried to send what the protocol forbids: a bug
    │   ├── RemoteProtocolError  the peer sent what the protocol forbids: its connection ends, nothing else does
    │   └── HandshakeFailed      no TLS came about with this peer: its connection ends, nothing else does
    ├── CertificateUnusable    a file with a certificate, key or CAs can't be used
    ├── OffsetGone             the physical offset asked for is no longer (or not yet) in the log
    ├── RecordsGone            records that a reader planned to read were deleted, or are another log's now
    ├── OptionError            an option of the data source or of a job can't be used
    ├── ArchiveError           something is wrong with an archive
    │   ├── ArchiveConflict    another archiver works on it or came first; nothing was changed
    │   └── ArchiveDamaged     its files and its manifest disagree, or it is another log's (exit 65)
    ├── SinkFailed             Spark's sink could not store or commit a batch; the next attempt goes on from there
    ├── RestoreFailed          a message could not be put back into a topic; what was, is found again next time
    ├── AgreementError         what the members of a group agree on (all in ha/failover/agreement.py)
    │   ├── AgreementUnavailable   no answer in time: whether a change was made may be unknown
    │   ├── Outdated               what the change was made for is not so any more; carries what is
    │   ├── LeaseLost              the lease has ended, and the keys with it
    │   └── BrokerIdTaken          another process's lease holds the member's key
    ├── BodyUnreadable         a received message's body can't be inflated; raised where the body is asked for
    ├── RetryLater             raised by a consumer's handler: this message has to come again
    └── ClientError            the SDK could not do what it was asked; names the place that it asked
        ├── BrokerError          a broker or name server answered with a code that is an error
        │   └── RouteNotFound      no name server knows the topic
        ├── RequestTimedOut      no answer in time: whether the request was carried out is not known
        └── ConnectionFailed     not made, or lost; a request already sent may have been carried out
            └── NameServersUnreachable   none of the configured name servers could be reached

Expected conditions (a slave that lags, a flush that is late) are values of `ha.protocol.codes.PutStatus`.
Each class carries its facts as fields, so that nobody has to parse a message.
"""

from __future__ import annotations

from pathlib import Path


class HalogError(Exception):
    """The root; catching it catches everything that halog itself raises."""


class ConfigError(HalogError):
    """A configuration key or value is wrong. `key` is RocketMQ's spelling; `accepted` says what would do.

    `others` are further mistakes found at the same time; the message has one line for each.
    """

    def __init__(self, key: str, reason: str, accepted: str, *, others: tuple[ConfigError, ...] = ()) -> None:
        super().__init__("\n".join([f"{key}: {reason}; accepted: {accepted}", *map(str, others)]))
        self.key = key
        self.reason = reason
        self.accepted = accepted
        self.others = others


class StoreError(HalogError):
    """Something is wrong with the store directory."""


class CorruptLog(StoreError):
    """Bytes of `file` from `position` (bytes from its start) on can't be what a broker wrote. Nothing was deleted."""

    def __init__(self, file: Path, position: int, reason: str) -> None:
        super().__init__(f"{file} is damaged at byte {position}: {reason}; nothing was deleted")
        self.file = file
        self.position = position
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptLog], tuple[Path, int, str]]:
        return CorruptLog, (self.file, self.position, self.reason)


class DamagedBytes(StoreError):
    """Bytes [`begin`, `end`) of the log (physical offsets) are not what was written and must not be used.

    A read of what lies before or behind them succeeds. They may be healed at any time. `is_hopeless`: no peer that is
    known has them.
    """

    def __init__(self, begin: int, end: int, reason: str, *, is_hopeless: bool = False) -> None:
        super().__init__(f"bytes [{begin}, {end}) of the log are damaged: {reason}")
        self.begin = begin
        self.end = end
        self.reason = reason
        self.is_hopeless = is_hopeless


class StoreLocked(StoreError):
    """Another process has the store open. Stop it, or give this one a storePathRootDir of its own."""

    def __init__(self, lock_file: Path) -> None:
        super().__init__(f"{lock_file} is locked by another process; stop it or choose another storePathRootDir")
        self.lock_file = lock_file


class DiskFull(StoreError):
    """`file` could not be allocated at `size_bytes`. Nothing was written; free space and the next put goes on.

    `reason`: of the system, where it is another one (no file could be opened).
    """

    def __init__(self, file: Path, size_bytes: int, reason: str = "") -> None:
        why = f"; the system says: {reason}" if reason else ""
        super().__init__(f"no space left for {file} ({size_bytes} bytes); free space and puts go on{why}")
        self.file = file
        self.size_bytes = size_bytes
        self.reason = reason


class DiskFailed(StoreError):
    """The disk refused a write or a sync of `file`. What was not yet flushed is in doubt, so the node must stop."""

    def __init__(self, file: Path, operation: str, reason: str) -> None:
        super().__init__(f"{operation} of {file} failed: {reason}")
        self.file = file
        self.operation = operation
        self.reason = reason

    def __reduce__(self) -> tuple[type[DiskFailed], tuple[Path, str, str]]:
        return DiskFailed, (self.file, self.operation, self.reason)


class StoreUnreadable(StoreError):
    """`path` is not a store directory, or can't be read. Nothing was changed."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} can't be read as a store: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[StoreUnreadable], tuple[Path, str]]:
        return StoreUnreadable, (self.path, self.reason)


class ArchiveError(HalogError):
    """Something is wrong with the archive at `archive`."""

    def __init__(self, archive: Path, reason: str) -> None:
        super().__init__(f"archive {archive}: {reason}")
        self.archive = archive
        self.reason = reason

    def __reduce__(self) -> tuple[type[ArchiveError], tuple[Path, str]]:
        return type(self), (self.archive, self.reason)


class ArchiveConflict(ArchiveError):
    """Another archiver works on the same broker's part of the archive or came first. Nothing was changed."""


class ArchiveDamaged(ArchiveError):
    """Files of the archive and its manifest disagree, or the archive is another log's. Nothing was changed."""


class AddressInUse(HalogError):
    """`host:port`, named by configuration key `key`, can't be listened on."""

    def __init__(self, key: str, host: str, port: int, reason: str) -> None:
        super().__init__(f"{key}: can't listen on {host}:{port}: {reason}")
        self.key = key
        self.host = host
        self.port = port
        self.reason = reason


class ProtocolError(HalogError):
    """Bytes on a connection and the protocol disagree."""


class LocalProtocolError(ProtocolError):
    """Our side tried to send something that the protocol forbids: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids. The only error that untrusted bytes may raise."""


class HandshakeFailed(ProtocolError):
    """TLS did not come about: the peer was late, spoke something else, or one side didn't trust the other."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"TLS handshake failed: {reason}")
        self.reason = reason


class CertificateUnusable(HalogError):
    """The PEM file at `path` can't be used. What was in force stays so."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class OffsetGone(HalogError):
    """Physical offset `asked` lies outside [`min_offset`, `max_offset`] of the log (all in bytes)."""

    def __init__(self, asked: int, min_offset: int, max_offset: int) -> None:
        super().__init__(f"physical offset {asked} is not in the log, which holds [{min_offset}, {max_offset})")
        self.asked = asked
        self.min_offset = min_offset
        self.max_offset = max_offset


class RecordsGone(HalogError):
    """Records [`first`, `end`) of `what` (queue offsets of a queue, physical offsets of a log) are not there any more.

    Reading goes on behind them when told to (failOnDataLoss=false).
    """

    def __init__(self, what: str, first: int, end: int, reason: str) -> None:
        super().__init__(
            f"{what}: offsets {first} to {end - 1} are gone: {reason}; "
            "set failOnDataLoss to false to go on without them, or begin at what is still there"
        )
        self.what = what
        self.first = first
        self.end = end
        self.reason = reason

    def __reduce__(self) -> tuple[type[RecordsGone], tuple[str, int, int, str]]:
        return RecordsGone, (self.what, self.first, self.end, self.reason)


class OptionError(HalogError):
    """Option `option` of the data source, its sink or a job can't be used; `accepted` says what would do."""

    def __init__(self, option: str, reason: str, accepted: str) -> None:
        super().__init__(f"{option}: {reason}; accepted: {accepted}")
        self.option = option
        self.reason = reason
        self.accepted = accepted

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, str, str]]:
        return OptionError, (self.option, self.reason, self.accepted)


class SinkFailed(HalogError):
    """Spark's sink could not store or commit a batch. What was stored is found again by the next attempt."""


class RestoreFailed(HalogError):
    """The message at `place` could not be restored. Those before it in its queue were; run the restore again."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason

    def __reduce__(self) -> tuple[type[RestoreFailed], tuple[str, str]]:
        return RestoreFailed, (self.place, self.reason)


class ClientError(HalogError):
    """The SDK could not do what it was asked. What it may retry by itself, it has retried."""


class BrokerError(ClientError):
    """The server at `address` answered `code` (RocketMQ's ResponseCode) with `remark`; nothing was carried out."""

    def __init__(self, address: str, code: int, remark: str) -> None:
        super().__init__(f"{address} answered {code}: {remark or 'no remark'}")
        self.address = address
        self.code = code
        self.remark = remark


class RouteNotFound(BrokerError):
    """No name server knows a broker for `topic`: no broker has registered it, or all that had are gone."""

    def __init__(self, topic: str, address: str, code: int, remark: str) -> None:
        super().__init__(address, code, remark)
        self.topic = topic


class RequestTimedOut(ClientError):
    """No answer from `address` within `timeout_s`. A send may have been stored: sending again may store it twice."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(f"no answer from {address} within {timeout_s:g} s")
        self.address = address
        self.timeout_s = timeout_s


class ConnectionFailed(ClientError):
    """The connection to `address` could not be made, or ended before the answer. A send may have been stored."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"connection to {address}: {reason}")
        self.address = address
        self.reason = reason


class NameServersUnreachable(ConnectionFailed):
    """None of the configured name servers answered; `address` lists them all."""


class AgreementError(HalogError):
    """The service on which the members of a group agree could not do what it was asked."""


class BodyUnreadable(HalogError):
    """The body of the message `message_id` can't be inflated: it is damaged, or longer than the bound. The message's
    other fields can be read, and `stored_body` has the bytes as the broker stores them."""

    def __init__(self, message_id: str, reason: str) -> None:
        super().__init__(f"the body of message {message_id}: {reason}")
        self.message_id = message_id
        self.reason = reason

    def __reduce__(self) -> tuple[type[BodyUnreadable], tuple[str, str]]:
        return BodyUnreadable, (self.message_id, self.reason)


class RetryLater(HalogError):
    """Raise it in a consumer's handler to have the message delivered again after `delay_level` (RocketMQ's levels).

    0: what the broker finds right for the number of deliveries; -1: never, it becomes a dead letter.
    """

    def __init__(self, delay_level: int = 0) -> None:
        super().__init__(f"to be delivered again, delay level {delay_level}")
        self.delay_level = delay_level

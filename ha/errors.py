"""halog's exceptions. Those that never leave a package are defined in the package.

    HalogError
    ├── ConfigError            invalid configuration key or value (exit 78)
    ├── StoreError             problem with the store directory
    │   ├── CorruptLog         bytes on disk are damaged beyond automatic recovery (exit 65)
    │   ├── DamagedBytes       a range of the log is damaged and not repaired yet; the rest is readable
    │   ├── StoreLocked        another process has this store open (exit 69)
    │   ├── DiskFull           no space, or too many open files; stored messages stay readable
    │   ├── DiskFailed         a write or sync failed; its data may be lost, so the node stops (exit 74)
    │   └── StoreUnreadable    the path is not a store, or can't be read
    ├── AddressInUse           halog can't listen on a configured port (exit 69)
    ├── ProtocolError
    │   ├── LocalProtocolError   halog was about to violate the protocol: a bug, or input of a client
    │   ├── RemoteProtocolError  the peer violated the protocol: only its connection is closed
    │   └── HandshakeFailed      the TLS handshake failed: only its connection is closed
    ├── CertificateUnusable    a file with a certificate, key or CAs can't be used
    ├── OffsetGone             the requested physical offset is not, or no longer, in the log
    ├── RecordsGone            records of a planned read were deleted, or the log was replaced
    ├── OptionError            invalid option of the Spark data source, its sink or a job
    ├── ArchiveError           problem with an archive
    │   ├── ArchiveConflict    another archiver is active or has changed the archive or its table
    │   └── ArchiveDamaged     its files don't match its manifest, or it is of another log (exit 65)
    ├── SinkFailed             Spark's sink could not store or commit a batch; a retry skips the stored rows
    ├── RestoreFailed          a message could not be restored; a retry continues from there
    ├── AgreementError         a call to a failover group's etcd failed (subclasses in ha/failover/agreement.py)
    │   ├── AgreementUnavailable   no response in time: a change may have been made
    │   ├── Outdated               the expected state has changed; carries the current state
    │   ├── LeaseLost              the lease has ended, and the keys attached to it are gone
    │   └── BrokerIdTaken          another live lease holds the member's key
    ├── BodyUnreadable         a message's body can't be decompressed; raised when the body is read
    ├── RetryLater             raised by a consumer's handler to redeliver the message
    └── ClientError            an operation of the SDK failed
        ├── BrokerError          a broker or name server returned an error code
        │   └── RouteNotFound      no name server knows the topic
        ├── ReceiptExpired       a popped message is no longer this consumer's
        ├── RequestTimedOut      no response in time: the request may have been executed
        └── ConnectionFailed     not established, or lost; a request may have been executed
            ├── NameServersUnreachable   none of the configured name servers could be reached
            └── NoMaster                 no master with writable queues of the topic is registered

Expected conditions (a lagging slave, a slow flush) are values of `ha.protocol.codes.PutStatus`.
Details are fields of the exceptions, so that callers need not parse messages.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, ClassVar


class HalogError(Exception):
    """Base class of halog's exceptions, which can be pickled, for Spark. Mistakes in the calling program raise Python's
    own, such as ValueError."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[HalogError], args: tuple[Any, ...], fields: dict[str, Any]) -> HalogError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(HalogError):
    """A configuration key or value is invalid. `accepted` says what is accepted.

    `key` is the key as RocketMQ spells it, or the command-line option or environment variable that is wrong. `others`
    has further errors found at the same time; the message has one line for each.
    """

    def __init__(self, key: str, reason: str, accepted: str, *, others: tuple[ConfigError, ...] = ()) -> None:
        super().__init__("\n".join([f"{key}: {reason}; accepted: {accepted}", *map(str, others)]))
        self.key = key
        self.reason = reason
        self.accepted = accepted
        self.others = others


class StoreError(HalogError):
    """A problem with the store directory."""


class CorruptLog(StoreError):
    """`file` is damaged from byte `position` on. Nothing was deleted."""

    def __init__(self, file: Path, position: int, reason: str) -> None:
        super().__init__(f"{file} is damaged at byte {position}: {reason}; nothing was deleted")
        self.file = file
        self.position = position
        self.reason = reason


class DamagedBytes(StoreError):
    """Bytes [`begin`, `end`) of the log (physical offsets) are damaged and must not be used.

    Bytes before and after them can be read. Repair attempts continue; `is_hopeless`: several have failed, so consumers
    skip these bytes.
    """

    def __init__(self, begin: int, end: int, reason: str, *, is_hopeless: bool = False) -> None:
        super().__init__(f"bytes [{begin}, {end}) of the log are damaged: {reason}")
        self.begin = begin
        self.end = end
        self.reason = reason
        self.is_hopeless = is_hopeless


class StoreLocked(StoreError):
    """Another process has the store, or its commitlog, open. Stop it, or set a different storePathRootDir and
    storePathCommitLog."""

    def __init__(self, lock_file: Path) -> None:
        super().__init__(
            f"{lock_file} is locked by another process; stop it, or set another storePathRootDir and storePathCommitLog"
        )
        self.lock_file = lock_file


class DiskFull(StoreError):
    """`file` can't be created or written now, because the disk is full or too many files are open.

    Stored messages stay readable, and the operation can be repeated later. `size_bytes`: the size needed; 0 if unknown.
    `reason`: the system's error; "" if not given.
    """

    def __init__(self, file: Path, size_bytes: int, error: OSError | None = None) -> None:
        size = f" ({size_bytes} bytes)" if size_bytes else ""
        why = f"; the system says: {error}" if error is not None else ""
        if error is not None and error.errno in (errno.EMFILE, errno.ENFILE):
            text = f"too many files are open to write {file}; close some or raise the limit, and puts go on"
        else:
            text = f"no space left for {file}{size}; free space and puts go on"
        super().__init__(text + why)
        self.file = file
        self.size_bytes = size_bytes
        self.reason = "" if error is None else str(error)


class DiskFailed(StoreError):
    """`operation` ("write", "sync", …) failed on `file`. Unflushed data may be lost, so the node must stop."""

    def __init__(self, file: Path, operation: str, reason: str) -> None:
        super().__init__(f"{operation} of {file} failed: {reason}")
        self.file = file
        self.operation = operation
        self.reason = reason


class StoreUnreadable(StoreError):
    """`path` is not a store directory, or can't be read. Nothing was changed."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} can't be read as a store: {reason}")
        self.path = path
        self.reason = reason


class ArchiveError(HalogError):
    """A problem with the archive at `archive`."""

    def __init__(self, archive: Path, reason: str) -> None:
        super().__init__(f"archive {archive}: {reason}")
        self.archive = archive
        self.reason = reason


class ArchiveConflict(ArchiveError):
    """Another archiver or erasure is active on the same part of an archive, or has changed that part or the table in
    the meantime. Either nothing was changed, or only the Delta or Iceberg table was not, which the next run updates."""


class ArchiveDamaged(ArchiveError):
    """The archive's files don't match its manifest, or the archive is of another log. Nothing was changed."""


class AddressInUse(HalogError):
    """halog can't listen on `host:port`, which the configuration key `key` sets."""

    def __init__(self, key: str, host: str, port: int, reason: str) -> None:
        super().__init__(f"{key}: can't listen on {host}:{port}: {reason}")
        self.key = key
        self.host = host
        self.port = port
        self.reason = reason


class ProtocolError(HalogError):
    """Data on a connection violates the protocol."""


class LocalProtocolError(ProtocolError):
    """halog refused to send or store data that would violate the protocol. The cause is a bug or a client's input."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids. The only error that untrusted bytes may raise."""


class HandshakeFailed(ProtocolError):
    """The TLS handshake failed: for example, it timed out, the peer sent plaintext, or a certificate was rejected."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"TLS handshake failed: {reason}")
        self.reason = reason


class CertificateUnusable(HalogError):
    """The PEM file at `path` can't be used ("": a required file is not configured). After a failed reload, the previous
    files stay in use."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class OffsetGone(HalogError):
    """Nothing can be read at physical offset `asked`: the log holds [`min_offset`, `max_offset`) (all in bytes)."""

    def __init__(self, asked: int, min_offset: int, max_offset: int) -> None:
        super().__init__(f"physical offset {asked} is not in the log, which holds [{min_offset}, {max_offset})")
        self.asked = asked
        self.min_offset = min_offset
        self.max_offset = max_offset


class RecordsGone(HalogError):
    """Records [`first`, `end`) of `what` (queue offsets of a queue, physical offsets of a log) no longer exist.

    With failOnDataLoss=false, reading continues after them.
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


class OptionError(HalogError):
    """Option `option` of the Spark data source, its sink or a job is invalid; `accepted` says what is accepted."""

    def __init__(self, option: str, reason: str, accepted: str) -> None:
        super().__init__(f"{option}: {reason}; accepted: {accepted}")
        self.option = option
        self.reason = reason
        self.accepted = accepted


class SinkFailed(HalogError):
    """Spark's sink could not store or commit a batch. A retry skips the rows that were stored."""


class RestoreFailed(HalogError):
    """A restore failed at `place`, a message, queue or topic. Earlier messages of the same queue were restored; another
    run continues from there."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class ClientError(HalogError):
    """An operation of the SDK failed, after retries where they are safe."""


class BrokerError(ClientError):
    """The server at `address` answered `code` (RocketMQ's ResponseCode) with `remark`; the request was not executed.

    `hint` says what to do about it, if that is known. `was_sent`: whether an earlier attempt of the same send or
    recall, whose connection was lost, may have been executed.
    """

    def __init__(self, address: str, code: int, remark: str, hint: str = "") -> None:
        super().__init__(f"{address} answered {code}: {remark or 'no remark'}{hint and f'; {hint}'}")
        self.address = address
        self.hint = hint
        self.code = code
        self.remark = remark
        self.was_sent = False


class RouteNotFound(BrokerError):
    """No broker for `topic` is registered with the name servers."""

    def __init__(self, topic: str, address: str, code: int, remark: str) -> None:
        super().__init__(address, code, remark, f"create topic {topic}, or check its name")
        self.topic = topic


class ReceiptExpired(ClientError):
    """A SimpleConsumer no longer holds message `message_id`: its invisible time is over, or it was acknowledged or
    given back."""

    def __init__(self, message_id: str, reason: str) -> None:
        super().__init__(f"message {message_id} can no longer be acknowledged or changed: {reason}")
        self.message_id = message_id
        self.reason = reason


class RequestTimedOut(ClientError):
    """No response from `address` within `timeout_s`, which may be 0 or less if no time was left for the request. A send
    may have been stored; a retry may store it twice."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(f"no answer from {address} within {max(timeout_s, 0.001):.4g} s")
        self.address = address
        self.timeout_s = timeout_s


class ConnectionFailed(ClientError):
    """The connection to `address` failed, or was closed before the response. If no address is known, `address` is the
    topic, broker or queue in question.

    `was_sent`: whether it failed after the request may have been sent, so that a send may have been stored. For a send
    or recall with several attempts, whether that holds for any of them.
    """

    _text: ClassVar[str] = "{address}: {reason}"

    def __init__(self, address: str, reason: str, *, was_sent: bool = False) -> None:
        super().__init__(self._text.format(address=address, reason=reason))
        self.address = address
        self.reason = reason
        self.was_sent = was_sent


class NameServersUnreachable(ConnectionFailed):
    """None of the configured name servers responded. `address` lists them; `reason` says why each did not."""

    _text = "no name server can be reached: {reason}"


class NoMaster(ConnectionFailed):
    """No master with writable queues of `topic` is registered. `is_temporary`: a broker set of the topic currently has
    no master, so one may be elected soon."""

    _text = "topic {address}: {reason}"

    def __init__(self, topic: str, *, is_temporary: bool) -> None:
        super().__init__(topic, "no master that may be written to is registered")
        self.topic = topic
        self.is_temporary = is_temporary


class AgreementError(HalogError):
    """A call to etcd, the coordination service of a failover group, failed."""


class BodyUnreadable(HalogError):
    """The body of the message `message_id` can't be decompressed: it is damaged or exceeds the size limit.

    The message's other fields can be read; `stored_body` has the stored bytes.
    """

    def __init__(self, message_id: str, reason: str) -> None:
        super().__init__(f"the body of message {message_id}: {reason}")
        self.message_id = message_id
        self.reason = reason


class RetryLater(HalogError):
    """Raise this in a consumer's handler to redeliver the message after the delay of `delay_level` (RocketMQ's levels).

    0: the broker chooses the delay by the number of deliveries; -1: no redelivery, the message becomes a dead letter.
    With ORDERLY, any level except -1 retries the message after `suspend_s`.
    """

    def __init__(self, delay_level: int = 0) -> None:
        super().__init__(f"to be delivered again, delay level {delay_level}")
        self.delay_level = delay_level

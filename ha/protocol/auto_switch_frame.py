"""The HA protocol with epochs (AutoSwitchHAService of RocketMQ 5.1.1 and later), both directions.

Each message starts with a state. Slave to master:

    0   4  state 1 (HANDSHAKE)             0   4  state 2 (TRANSFER): a report, or the request if it is the first
    4   2  1: start at the last segment    4   8  slave max offset
    6   2  1: a learner, never in sync
    8   8  broker id
    (16 8  run id, if 2 is added to the field at 6: a halog extension, sent only to masters that support it)

Master to slave:

    0   4  state 1 (HANDSHAKE)             0   4  state 2 (TRANSFER)
    4   4  body size, 12 k                 4   4  body size n; 0 is a heartbeat
    8   8  master max offset               8   8  physical offset of the first body byte; -1: nothing sent yet
    16  4  last epoch, -1 if none          16  4  epoch
    20     k times, ascending:             20  8  physical offset at which that epoch starts
           epoch 4, start offset 8         28  8  confirm offset
                                           36  n  commitlog bytes, within one segment and one epoch

All big-endian and signed. A RocketMQ master that ends a frame at the end of an epoch puts the *next* epoch into it, so
a frame may lie before the start offset that it contains. A RocketMQ master parses a slave's handshake as soon as 12 of
its bytes have arrived, so a slave must send it with one call. Sources: AutoSwitchHAConnection, AutoSwitchHAClient;
checked against captures of 5.5.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from struct import Struct

import msgspec

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.epoch_file import EpochEntry
from ha.protocol.ha_frame import REPORT_SIZE, MasterStreamParser

EPOCH_COUNT_MAX = 1000
"""Maximum number of epochs in a master's handshake: RocketMQ slaves can't receive more."""
NO_EPOCH = -1
NOTHING_SENT = -1

_HANDSHAKE = 1
_TRANSFER = 2
_SLAVE_HANDSHAKE = Struct(">ihhq")
_REPORT = Struct(">iq")
_MASTER_HANDSHAKE = Struct(">iiqi")
_EPOCH = Struct(">iq")
_FRAME_HEADER = Struct(">iiqiqq")
FRAME_HEADER_SIZE = _FRAME_HEADER.size
_STATE_SIZE = 4
_LEARNER, _HAS_RUN_ID = 1, 2
_RUN_ID = Struct(">q")
_HANDSHAKE_BEGINS = tuple(
    _SLAVE_HANDSHAKE.pack(_HANDSHAKE, from_last, flags, 0)[:REPORT_SIZE] for from_last in (0, 1) for flags in range(4)
)
_LOWEST_REPORT = _HANDSHAKE << 32
"""The first eight bytes of the smallest handshake, read as a report of the default protocol"""


class SlaveHandshake(msgspec.Struct, frozen=True):
    """Identifies a slave. `broker_id`: the configured brokerId; of a RocketMQ slave, the ID that its controller
    assigned."""

    broker_id: int
    syncs_from_last_file: bool = False
    is_learner: bool = False
    run_id: int = 0
    """Distinguishes this process from others with the same broker id; 0: not sent, as by RocketMQ"""

    def encode(self) -> bytes:
        """Returns the handshake: 16 bytes, or 24 with a run id."""
        flags = self.is_learner * _LEARNER + bool(self.run_id) * _HAS_RUN_ID
        head = _SLAVE_HANDSHAKE.pack(_HANDSHAKE, self.syncs_from_last_file, flags, self.broker_id)
        return head + _RUN_ID.pack(self.run_id) if self.run_id else head


class EpochReport(msgspec.Struct, frozen=True, gc=False):
    """Reports the end of a slave's log. The first report on a connection is the slave's request, later ones are
    acknowledgements."""

    slave_max_offset: int

    def encode(self) -> bytes:
        """Returns the report, 12 bytes. Raises LocalProtocolError if the offset is negative."""
        if self.slave_max_offset < 0:
            raise LocalProtocolError(f"a report can't carry offset {self.slave_max_offset}")
        return _REPORT.pack(_TRANSFER, self.slave_max_offset)


class MasterHandshake(msgspec.Struct, frozen=True):
    """A master's history: the end of its log, and its epochs with their start offsets, ascending."""

    max_offset: int
    epochs: tuple[EpochEntry, ...] = ()

    def encode(self) -> bytes:
        """Returns the handshake with the newest epochs, at most EPOCH_COUNT_MAX: 20 bytes, and 12 for each epoch."""
        epochs = self.epochs[-EPOCH_COUNT_MAX:]
        last = epochs[-1].epoch if epochs else NO_EPOCH
        head = _MASTER_HANDSHAKE.pack(_HANDSHAKE, len(epochs) * _EPOCH.size, self.max_offset, last)
        return head + b"".join(_EPOCH.pack(entry.epoch, entry.start_offset) for entry in epochs)


class EpochFrameHeader(msgspec.Struct, frozen=True, gc=False):
    """The start of a frame; `body_size` bytes follow as `TransferBody` events, none after a heartbeat (0)."""

    physical_offset: int
    body_size: int
    epoch: int
    epoch_start_offset: int
    confirm_offset: int

    def encode(self) -> bytes:
        """Returns the 36 bytes before the body. Raises LocalProtocolError if an offset or the size is invalid."""
        if self.physical_offset < NOTHING_SENT or self.body_size < 0 or (self.body_size and self.physical_offset < 0):
            raise LocalProtocolError(f"a frame can't carry {self.body_size} bytes at offset {self.physical_offset}")
        return _FRAME_HEADER.pack(
            _TRANSFER,
            self.body_size,
            self.physical_offset,
            self.epoch,
            self.epoch_start_offset,
            self.confirm_offset,
        )


def speaks_epochs(received: bytes) -> bool | None:
    """Returns whether a slave whose first bytes are `received` speaks this protocol; None: more bytes are needed.

    In the default protocol, the first eight bytes of a handshake would be a valid report of an offset just above 4 GiB.
    The next eight bytes are a broker id in this protocol; in the default one they are another report, which can't be
    lower than the first. Slaves of both protocols send their first message with one call, so eight bytes followed by a
    pause are a report.
    """
    size = min(len(received), REPORT_SIZE)
    if not any(begin.startswith(received[:size]) for begin in _HANDSHAKE_BEGINS):
        return False
    if len(received) < _SLAVE_HANDSHAKE.size:
        return None
    broker_id: int = _SLAVE_HANDSHAKE.unpack_from(received)[3]
    return 0 <= broker_id < _LOWEST_REPORT


class SlaveMessageParser:
    """Parses handshakes and reports from a slave, and returns all of them in order. Buffers at most 23 bytes."""

    def __init__(self) -> None:
        self._received = b""

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[SlaveHandshake | EpochReport]:
        """Parses `chunk` and returns the messages that it completes.

        Raises RemoteProtocolError for an unknown state, unknown flags, a negative broker id or offset, or run id 0.
        """
        received = self._received + bytes(chunk)
        found: list[SlaveHandshake | EpochReport] = []
        at, end = 0, len(received)
        while end - at >= _STATE_SIZE:
            state = int.from_bytes(received[at : at + _STATE_SIZE], "big", signed=True)
            if state == _HANDSHAKE:
                if end - at < _SLAVE_HANDSHAKE.size:
                    break
                _, from_last, flags, broker_id = _SLAVE_HANDSHAKE.unpack_from(received, at)
                if from_last not in (0, 1) or not 0 <= flags <= _LEARNER | _HAS_RUN_ID or broker_id < 0:
                    raise RemoteProtocolError(f"handshake of broker {broker_id} with flags {from_last}, {flags}")
                size, run_id = _SLAVE_HANDSHAKE.size, 0
                if flags & _HAS_RUN_ID:
                    size += _RUN_ID.size
                    if end - at < size:
                        break
                    [run_id] = _RUN_ID.unpack_from(received, at + _SLAVE_HANDSHAKE.size)
                    if not run_id:
                        raise RemoteProtocolError(f"handshake of broker {broker_id} with run id 0")
                found.append(SlaveHandshake(broker_id, from_last == 1, bool(flags & _LEARNER), run_id))
                at += size
            elif state == _TRANSFER:
                if end - at < _REPORT.size:
                    break
                _, offset = _REPORT.unpack_from(received, at)
                if offset < 0:
                    raise RemoteProtocolError(f"slave reports offset {offset}")
                found.append(EpochReport(offset))
                at += _REPORT.size
            else:
                raise RemoteProtocolError(f"message from a slave with state {state}")
        self._received = received[at:]
        return found


class MasterMessageParser(MasterStreamParser[MasterHandshake | EpochFrameHeader]):
    """Parses handshakes and frames from a master. An incomplete handshake is buffered, up to 12 kB."""

    def _head_size(self, partial: bytes) -> int:
        if len(partial) < _STATE_SIZE:
            return _STATE_SIZE
        state = int.from_bytes(partial[:_STATE_SIZE], "big", signed=True)
        if state == _TRANSFER:
            return FRAME_HEADER_SIZE
        if state != _HANDSHAKE:
            raise RemoteProtocolError(f"message from a master with state {state}")
        if len(partial) < _MASTER_HANDSHAKE.size:
            return _MASTER_HANDSHAKE.size
        size: int = _MASTER_HANDSHAKE.unpack_from(partial)[1]
        if size % _EPOCH.size or not 0 <= size <= EPOCH_COUNT_MAX * _EPOCH.size:
            raise RemoteProtocolError(f"handshake of a master with {size} bytes of epochs")
        return _MASTER_HANDSHAKE.size + size

    def _parse_head(self, head: bytes) -> MasterHandshake | EpochFrameHeader:
        if int.from_bytes(head[:_STATE_SIZE], "big") == _HANDSHAKE:
            _, _, max_offset, last_epoch = _MASTER_HANDSHAKE.unpack_from(head)
            epochs = tuple(EpochEntry(*entry) for entry in _EPOCH.iter_unpack(head[_MASTER_HANDSHAKE.size :]))
            _check_history(max_offset, last_epoch, epochs)
            return MasterHandshake(max_offset, epochs)
        _, body_size, offset, epoch, epoch_start, confirm = _FRAME_HEADER.unpack(head)
        self._expect_body(offset, body_size, 0 if body_size else NOTHING_SENT)
        return EpochFrameHeader(offset, body_size, epoch, epoch_start, confirm)


def _check_history(max_offset: int, last_epoch: int, epochs: Sequence[EpochEntry]) -> None:
    """Raises RemoteProtocolError if an offset is negative, epochs don't ascend, start offsets descend, or the last
    epoch is not `last_epoch`."""
    is_ascending = all(
        before.epoch < after.epoch and before.start_offset <= after.start_offset
        for before, after in itertools.pairwise(epochs)
    )
    named = epochs[-1].epoch if epochs else NO_EPOCH
    if max_offset < 0 or not is_ascending or last_epoch != named or (epochs and epochs[0].start_offset < 0):
        raise RemoteProtocolError(f"invalid history: end {max_offset}, last epoch {last_epoch}, {epochs}")

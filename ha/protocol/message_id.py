"""The two ids of a message, both in upper-case hexadecimal.

    offset message id   store address 4 or 16 bytes | port int32 | physical offset int64           32 or 56 characters
    unique id           own address 4 or 16 | pid int16 | process hash int32 | ms since the start of the month int32
                        | counter int16                                                             32 or 56 characters

A broker returns the first in its answer to a send. The sender generates the second and stores it in the property
UNIQ_KEY; clients show it to users as the message id.
Sources: MessageDecoder.createMessageId, MessageClientIDSetter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct, pack

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.record import decode_host

_INT64 = Struct(">q")
_PROCESS = Struct(">Hi")


def encode_message_id(store_host: bytes, physical_offset: int) -> str:
    """Returns the offset message id; `store_host` as from `record.encode_host`."""
    return (store_host + _INT64.pack(physical_offset)).hex().upper()


def encode_message_ids(store_host: bytes, physical_offsets: Sequence[int]) -> str:
    """Returns the ids of messages (at least one) of one broker, joined with ',' as in the answer to a batch."""
    host = store_host.hex().upper()
    offsets = pack(f">{len(physical_offsets)}q", *physical_offsets).hex(",", _INT64.size).upper()
    return host + offsets.replace(",", "," + host)


def decode_message_id(message_id: str) -> tuple[str, int, int]:
    """Returns (host, port, physical offset) of an offset message id. Raises RemoteProtocolError if it is invalid."""
    try:
        raw = bytes.fromhex(message_id)
    except ValueError:
        raw = b""
    if len(raw) not in (16, 28) or len(message_id) != 2 * len(raw):
        raise RemoteProtocolError(f"{message_id[:80]!r} is not an offset message id")
    host, port = decode_host(raw[:-8])
    return host, port, _INT64.unpack(raw[-8:])[0]


class UniqueIdGenerator:
    """Generates unique ids.

    `address`: packed IP address of this host; raises LocalProtocolError if it does not have 4 or 16 bytes.
    `process_hash`: any int32 that stays the same while the process runs. `wall_clock_ms` returns ms since the epoch;
    `month_ms` returns, for such a time, the starts of its local month and of the next. The counter wraps after 65536
    ids: ids repeat if more are generated within one ms.
    """

    def __init__(
        self,
        *,
        address: bytes,
        process_id: int,
        process_hash: int,
        wall_clock_ms: Callable[[], int],
        month_ms: Callable[[int], tuple[int, int]],
    ) -> None:
        if len(address) not in (4, 16):
            raise LocalProtocolError(f"an address has 4 or 16 bytes, not {len(address)}")
        self._prefix = (address + _PROCESS.pack(process_id & 0xFFFF, process_hash)).hex().upper()
        self._wall_clock_ms = wall_clock_ms
        self._month_ms = month_ms
        self._start_ms, self._end_ms = month_ms(wall_clock_ms())
        self._now_ms = -1
        self._stem = ""  # the ids of this millisecond without the counter
        self._counter = 0

    def next(self) -> str:
        """Returns the next id. If the clock was set back to before the start of the month, the id has the start of the
        month as its time."""
        stem, number = self._stem_now(), self._counter
        self._counter = (number + 1) & 0xFFFF
        return f"{stem}{number:04X}"

    def next_many(self, count: int) -> list[str]:
        """Returns the next `count` ids, all with the same time."""
        stem, first = self._stem_now(), self._counter
        end = first + count
        self._counter = end & 0xFFFF
        numbers = range(first, end) if end <= 0x10000 else [number & 0xFFFF for number in range(first, end)]
        return [stem + number for number in pack(f">{count}H", *numbers).hex(" ", 2).upper().split()]

    def _stem_now(self) -> str:
        now_ms = self._wall_clock_ms()
        if now_ms != self._now_ms:
            if now_ms >= self._end_ms:
                self._start_ms, self._end_ms = self._month_ms(now_ms)
            self._now_ms = now_ms
            self._stem = f"{self._prefix}{max(now_ms - self._start_ms, 0) & 0xFFFFFFFF:08X}"
        return self._stem


def unique_id_properties(unique_ids: Sequence[str]) -> list[bytes]:
    """Returns, for each of `unique_ids` (at least one), the UNIQ_KEY pair of a property string, with separators."""
    pairs = "\x02,UNIQ_KEY\x01".join(unique_ids)
    return f"UNIQ_KEY\x01{pairs}\x02".encode().split(b",")

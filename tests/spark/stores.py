"""Real stores on disk for the source's tests: created at once, or written by a thread while Spark reads.

Records are read back with the plain codec of ha.protocol, never with the code under test.
"""

import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.record import Message, MessageRecord, RecordHead, decode_record, scan_record
from ha.protocol.store_files import BROKER_FILE, BrokerFile
from ha.store.message_store import MessageStore, open_message_store, wall_clock_ms
from ha.store.options import StoreOptions
from tests.store.stores import dispatched

HOUR_MS = 3_600_000
ODD_TIMES_MS = [300_000_000_000_000, (1 << 63) - 5]
"""After the year 9999, with which Python's dates end; and beyond the range of a timestamp column"""
_STORE_TIME = struct.Struct(">q")


class KilledError(Exception):
    """Raised by a test where a process must die."""


def message(
    number: int, *, topic: str = "flights", queue_id: int | None = None, body: bytes | None = None, **properties: str
) -> Message:
    """A message with its number in the body; spread over four queues by default. Keys and tags repeat."""
    pairs = {"UNIQ_KEY": f"U{number:08d}", "KEYS": f"k{number} n{number % 7}", "TAGS": f"tag{number % 3}", **properties}
    return Message(
        topic=topic,
        queue_id=number % 4 if queue_id is None else queue_id,
        body=b"%08d" % number if body is None else body,
        properties="".join(f"{name}\x01{value}\x02" for name, value in pairs.items()).encode(),
        born_timestamp_ms=1_700_000_000_000 + number,
        flag=number,
    )


def flights_and_others(begin: int, end: int, *, padding: int) -> list[Message]:
    """Messages with their number in the body, every fifth one compressed, and as many of another topic."""
    found = []
    for number in range(begin, end):
        text = b"%08d" % number + bytes(padding)
        made = message(number, body=text if number % 5 else zlib.compress(text))
        made.sys_flag = 0 if number % 5 else SysFlag.COMPRESSED
        found += [made, message(number, topic="other", body=bytes(100))]
    return found


def store_options(root: Path, segment_size: int = 1 << 20, **changes: Any) -> StoreOptions:
    given: dict[str, Any] = {
        "root": root,
        "segment_size": segment_size,
        "queue_entry_count": 1000,
        "index_slot_count": 500,
        "index_entry_count": 2000,
        "message_size_max": 1 << 20,
        "hot_window_bytes": 1 << 20,
        "clean_first_s": 1e9,  # only when a test says so
        "reserved_h": 1.0,
        "delete_files_max": 1000,
        **changes,
    }
    return StoreOptions(**given)


async def _put(store: MessageStore, messages: Sequence[Message]) -> None:
    for begin in range(0, len(messages), 500):
        for result in await store.log.put(messages[begin : begin + 500]):
            assert result.status is PutStatus.PUT_OK, result
    await dispatched(store)


def make_store(
    path: Path,
    messages: Sequence[Message],
    segment_size: int = 1 << 20,
    clear: str = "",
    clock_ms: Callable[[], int] = wall_clock_ms,
    **changes: Any,
) -> Path:
    """Writes `messages` into the store at `path` (created if missing), closes it, and returns `path`.

    `clear`: topic whose messages are deleted then.
    """

    async def run() -> None:
        async with open_message_store(store_options(path, segment_size, **changes), wall_clock_ms=clock_ms) as store:
            await _put(store, messages)
            if clear:
                await store.clear_topics({clear: store.log.max_offset.value})

    trio.run(run)
    return path


class LiveStore:
    """A store written by a separate thread. Its methods return when queues and index are complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: queue.SimpleQueue[tuple[str, Sequence[Message]] | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[BaseException | int] = queue.SimpleQueue()

    def _ask(self, what: str, messages: Sequence[Message] = ()) -> int:
        self.requests.put((what, messages))
        reply = self.replies.get(timeout=60)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def put(self, messages: Sequence[Message]) -> None:
        """Appends."""
        self._ask("put", messages)

    def clean(self) -> int:
        """Makes retention delete all it may: every segment but the last. Returns how many."""
        return self._ask("clean")

    async def _serve(self, options: StoreOptions) -> None:
        skew_ms = 0
        async with open_message_store(options, wall_clock_ms=lambda: wall_clock_ms() + skew_ms) as store:
            self.replies.put(0)
            while True:
                request = await trio.to_thread.run_sync(self.requests.get)
                if request is None:
                    return
                what, messages = request
                try:
                    if what == "put":
                        await _put(store, messages)
                        self.replies.put(len(messages))
                    else:
                        skew_ms = 2 * HOUR_MS
                        deleted = await store.retention.clean(at_any_hour=True)
                        skew_ms = 0
                        self.replies.put(deleted)
                except Exception as error:
                    self.replies.put(error)


@contextmanager
def live_store(path: Path, segment_size: int = 1 << 20, **changes: Any) -> Iterator[LiveStore]:
    """Opens the store at `path` for writing while the block runs."""
    live = LiveStore(path)

    def run() -> None:
        try:
            trio.run(live._serve, store_options(path, segment_size, **changes))
        except BaseException as error:
            live.replies.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    reply = live.replies.get(timeout=60)
    if isinstance(reply, BaseException):
        raise reply
    try:
        yield live
    finally:
        live.requests.put(None)
        thread.join(60)
        assert not thread.is_alive()


def records_of(path: Path) -> list[MessageRecord]:
    """Every record of the log in physical order, read with the plain codec."""
    found = []
    for file in sorted((path / "commitlog").iterdir()):
        raw = file.read_bytes()
        position = 0
        while position < len(raw):
            head = scan_record(raw, position, len(raw))
            if not isinstance(head, RecordHead):
                break
            record = decode_record(raw, position)
            found.append(record)
            position += record.total_size
    return found


def set_store_time(store: Path, number: int, time_ms: int) -> None:
    """Overwrites the store time of a record of the log's first segment; no CRC covers it."""
    log = min((store / "commitlog").iterdir())
    raw = bytearray(log.read_bytes())
    _STORE_TIME.pack_into(raw, records_of(store)[number].physical_offset + 56, time_ms)
    log.write_bytes(raw)


def named(store: Path, name: str) -> Path:
    """`store` as a broker with this name leaves it."""
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / BROKER_FILE).write_bytes(msgspec.json.encode(BrokerFile(name)))
    return store

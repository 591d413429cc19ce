"""Store directories written byte by byte as the format says, so that any oddity can be put into one."""

from pathlib import Path
from shutil import rmtree

from ha.protocol.properties import find_property, tags_code
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_filler, encode_record
from ha.protocol.store_files import ENTRY, ENTRY_SIZE, segment_name

STORE_HOST = encode_host("10.1.2.3", 10911)
QUEUE_FILE_ENTRIES = 50


class StoreWriter:
    """Appends records to segments of `segment_size` bytes and their entries to queues of small files."""

    def __init__(self, root: Path, *, segment_size: int = 16 * 1024, first_offset: int = 0) -> None:
        self.root = root
        self.segment_size = segment_size
        self.offset = first_offset
        self.next_queue_offset: dict[tuple[str, int], int] = {}
        self.offsets: list[int] = []
        self.queued: dict[tuple[str, int], list[int]] = {}
        (root / "commitlog").mkdir(parents=True)
        (root / "consumequeue").mkdir()

    def put(
        self,
        message: Message,
        *,
        store_ms: int = 1_700_000_000_000,
        store_host: bytes = STORE_HOST,
        is_queued: bool = True,
    ) -> int:
        """Store one message; returns its physical offset."""
        key = (message.topic, message.queue_id)
        queue_offset = self.next_queue_offset.get(key, 0)
        room = self.segment_size - self.offset % self.segment_size
        raw = encode_record(
            message, queue_offset=queue_offset, physical_offset=0, store_timestamp_ms=store_ms, store_host=store_host
        )
        if len(raw) + 8 > room:
            self.write_log(self.offset, encode_filler(room))
            self.offset += room
        raw = encode_record(
            message,
            queue_offset=queue_offset,
            physical_offset=self.offset,
            store_timestamp_ms=store_ms,
            store_host=store_host,
        )
        at = self.offset
        self.write_log(at, raw)
        self.offset += len(raw)
        self.offsets.append(at)
        if is_queued:
            code = tags_code(find_property(message.properties, b"TAGS"))
            self.write_entry(message.topic, message.queue_id, queue_offset, ENTRY.pack(at, len(raw), code))
            self.next_queue_offset[key] = queue_offset + 1
            self.queued.setdefault(key, []).append(at)
        return at

    def delete_topic(self, topic: str) -> None:
        """Delete a topic as RocketMQ does: at once, and a new topic of that name begins at queue offset 0."""
        rmtree(self.root / "consumequeue" / topic, ignore_errors=True)
        for key in [key for key in self.next_queue_offset if key[0] == topic]:
            del self.next_queue_offset[key]

    def write_log(self, offset: int, raw: bytes) -> None:
        """Put bytes into the commitlog at a physical offset."""
        start = offset - offset % self.segment_size
        _write(self.root / "commitlog" / segment_name(start), self.segment_size, offset - start, raw)

    def write_entry(
        self, topic: str, queue_id: int, queue_offset: int, raw: bytes, folder: str = "consumequeue"
    ) -> None:
        """Put an entry into a queue at a position counted in entries of its size."""
        size = len(raw)
        start = queue_offset - queue_offset % QUEUE_FILE_ENTRIES
        directory = self.root / folder / topic / str(queue_id)
        directory.mkdir(parents=True, exist_ok=True)
        file_size = QUEUE_FILE_ENTRIES * size
        _write(directory / segment_name(start * size), file_size, (queue_offset - start) * size, raw)

    def blank_entry(self, topic: str, queue_id: int, queue_offset: int) -> None:
        """Put an entry that stands for no message."""
        self.write_entry(topic, queue_id, queue_offset, ENTRY.pack(0, 0x7FFFFFFF, 0))


def _write(path: Path, size: int, position: int, raw: bytes) -> None:
    if not path.exists():
        with path.open("wb") as created:
            created.truncate(size)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(raw)


__all__ = ["ENTRY_SIZE", "QUEUE_FILE_ENTRIES", "STORE_HOST", "StoreWriter"]

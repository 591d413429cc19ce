"""A cluster's files and history, written by hand for the checkers' own tests, and ways to damage them.

Writes the formats from their description, as the checkers read them; uses no code of halog.
"""

import zlib
from struct import Struct

from tests.checkers.history import Answered, Converged, Crashed, History, Promise, Sent, make_body
from tests.checkers.records import CRC_MASK, FILLER_SIZE, MAGIC_FILLER, MAGIC_V1
from tests.checkers.store import StoreImage

SEGMENT = 4096
MASTER = "m"
_HEAD = Struct(">iIiiiqqiq8sq8siqi")
_FILLER = Struct(">iI")
_ENTRY = Struct(">qiq")


def encode(topic: str, queue_id: int, queue_offset: int, physical_offset: int, store_ms: int, body: bytes) -> bytes:
    """One V1 record whose only property is a key."""
    properties = b"UNIQ_KEY\x01%d\x02" % physical_offset
    name = topic.encode()
    size = _HEAD.size + len(body) + 1 + len(name) + 2 + len(properties)
    crc = zlib.crc32(body) & CRC_MASK
    host = bytes(8)
    head = _HEAD.pack(
        size, MAGIC_V1, crc, queue_id, 0, queue_offset, physical_offset, 0, 1, host, store_ms, host, 0, 0, len(body)
    )
    return head + body + bytes([len(name)]) + name + len(properties).to_bytes(2, "big") + properties


class Cluster:
    """A master and its slaves, each a dict of files; `put` writes to all of `on` and reports `status` to the client."""

    def __init__(self, *slaves: str, is_sync_flush: bool = False, copies: int = 1) -> None:
        self.names = [MASTER, *slaves]
        self.files: dict[str, dict[str, bytearray]] = {name: {} for name in self.names}
        self.ends = dict.fromkeys(self.names, 0)
        self.history = History()
        self.history.add(Promise(MASTER, is_sync_flush=is_sync_flush, copies=copies))
        self.now_s = 0.0
        self.queue_offsets: dict[tuple[str, int], int] = {}

    def put(
        self,
        status: str = "PUT_OK",
        *,
        topic: str = "T",
        queue_id: int = 0,
        size: int = 260,
        on: tuple[str, ...] | None = None,
        queue_offset: int | None = None,
        entry: bool = True,
    ) -> bytes:
        """Sends, stores and answers one message; returns its body id."""
        seq = len(self.history.answers)
        body_id = b"p-%d" % seq
        self.now_s += 1.0
        self.history.add(Sent(self.now_s, "p", seq, topic, queue_id, body_id))
        nodes = self.names if on is None else on
        if queue_offset is None:
            queue_offset = self.queue_offsets.get((topic, queue_id), 0)
        self.queue_offsets[topic, queue_id] = queue_offset + 1
        at = self.ends[nodes[0]] if nodes else -1
        for name in nodes:
            at = self._room(name, size + 130)
            raw = encode(topic, queue_id, queue_offset, at, 1000 + seq, make_body(body_id, size))
            self.write(name, at, raw)
            self.ends[name] = at + len(raw)
            if entry:
                code = _ENTRY.pack(at, len(raw), 0)
                queue = self.files[name].setdefault(f"consumequeue/{topic}/{queue_id}/{0:020d}", bytearray(2000))
                queue[queue_offset * 20 : queue_offset * 20 + 20] = code
        self.now_s += 0.1
        self.history.add(Answered(self.now_s, "p", seq, status, queue_offset, at, MASTER))
        return body_id

    def _room(self, name: str, size: int) -> int:
        at = self.ends[name]
        left = SEGMENT - at % SEGMENT
        if size + FILLER_SIZE > left:
            self.write(name, at, _FILLER.pack(left, MAGIC_FILLER))
            at += left
        return at

    def write(self, name: str, offset: int, raw: bytes) -> None:
        """Writes bytes into a node's commitlog."""
        start = offset - offset % SEGMENT
        segment = self.files[name].setdefault(f"commitlog/{start:020d}", bytearray(SEGMENT))
        segment[offset - start : offset - start + len(raw)] = raw

    def cut(self, name: str, offset: int) -> None:
        """Removes everything from a physical offset on from a node's log."""
        for path in list(self.files[name]):
            folder, _, file = path.partition("/")
            if folder == "commitlog":
                keep = max(0, offset - int(file))
                self.files[name][path][keep:] = bytes(SEGMENT - min(keep, SEGMENT))
            elif folder == "consumequeue":
                queue = self.files[name][path]
                for at in range(0, len(queue), 20):
                    if _ENTRY.unpack_from(queue, at)[0] >= offset:
                        queue[at : at + 20] = bytes(20)
        self.ends[name] = min(self.ends[name], offset)

    def crash(self, name: str, kind: str) -> None:
        """Adds a crash to the history."""
        self.now_s += 1.0
        self.history.add(Crashed(self.now_s, name, kind))  # type: ignore[arg-type]

    def converged(self) -> None:
        """Adds to the history that all nodes are equal."""
        self.now_s += 1.0
        self.history.add(Converged(self.now_s, tuple(self.names), self.ends[MASTER]))

    def images(self) -> dict[str, StoreImage]:
        """Every node's files."""
        return {name: StoreImage(files, SEGMENT, name=name) for name, files in self.files.items()}

    def image(self, name: str = MASTER) -> StoreImage:
        """One node's files."""
        return self.images()[name]

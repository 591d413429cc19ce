"""Stores consumer positions: a CLUSTERING group's at the brokers, a BROADCASTING member's in a local file.

Sources: RemoteBrokerOffsetStore, LocalFileOffsetStore (same file format).
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from ha.client.connections import Connections
from ha.client.messages import MessageQueue
from ha.client.queue_requests import QueueRequests
from ha.errors import ClientError, RemoteProtocolError
from ha.protocol.group_requests import decode_queue_offsets, encode_queue_offsets

_log = logging.getLogger(__name__)


class Positions(Protocol):
    """Stores a position for each queue: the queue offset of the first message not yet consumed."""

    async def load(self, queue: MessageQueue) -> int | None:
        """Returns the saved position of `queue`; None if there is none. Raises ClientError, RemoteProtocolError."""

    def place_of(self, queue: MessageQueue) -> str:
        """Returns the name of the place (a broker set or a file) where the position of `queue` is saved."""

    @property
    def loss_count(self) -> int:
        """Counter that grows when saved positions may have been lost, so that they have to be saved again."""

    async def save(self, offsets: Mapping[MessageQueue, int], on_saved: Callable[[MessageQueue], None]) -> None:
        """Saves `offsets`, by queue; `place_of` must be the same for all of these queues. Calls `on_saved` with each
        queue that was saved. Failures are logged. `offsets` may be empty."""


class BrokerPositions:
    """A group's positions, stored by the brokers."""

    def __init__(self, requests: QueueRequests, connections: Connections) -> None:
        self._requests = requests
        self._connections = connections
        self._failing: set[MessageQueue] = set()

    async def load(self, queue: MessageQueue) -> int | None:
        """Requests the position from the broker (see `Positions.load`)."""
        return await self._requests.committed_offset(queue)

    def place_of(self, queue: MessageQueue) -> str:
        """Returns the name of the queue's broker set, which also stores the position."""
        return queue.broker_name

    @property
    def loss_count(self) -> int:
        """Number of connections opened so far: each may lead to a broker that lacks the positions saved last, because
        it was killed or has just become the master."""
        return self._connections.opened_count

    async def save(self, offsets: Mapping[MessageQueue, int], on_saved: Callable[[MessageQueue], None]) -> None:
        """Commits `offsets` at the brokers: for each topic, one first and then the others concurrently.

        A RocketMQ broker creates a group's table for a topic at the first commit, in one of many threads and without a
        lock (ConsumerOffsetManager.commitOffset). If concurrent commits find no table, each creates one, and the last
        table replaces the others: their offsets are lost, although each commit is answered with SUCCESS. A killed
        broker may have lost the table, so every save has to do this."""
        by_topic: dict[str, list[MessageQueue]] = defaultdict(list)
        for queue in offsets:
            by_topic[queue.topic].append(queue)

        async def save_one(queue: MessageQueue) -> None:
            try:
                await self._requests.commit(queue, offsets[queue])
            except (ClientError, RemoteProtocolError) as error:
                if queue not in self._failing:
                    self._failing.add(queue)
                    _log.warning("client.commit_failed queue=%s offset=%d reason=%r", queue, offsets[queue], str(error))
            else:
                self._failing.discard(queue)
                on_saved(queue)

        async def save_topic(queues: list[MessageQueue]) -> None:
            first, *others = queues
            await save_one(first)
            async with anyio.create_task_group() as tasks:
                for queue in others:
                    tasks.start_soon(save_one, queue)

        async with anyio.create_task_group() as tasks:
            for queues in by_topic.values():
                tasks.start_soon(save_topic, queues)


class FilePositions:
    """One member's positions in a file that is replaced atomically."""

    def __init__(self, file: Path | None) -> None:
        """`file`: where the positions are stored; None: in memory only."""
        self._file = file
        self._offsets: dict[MessageQueue, int] = {}
        self._written: dict[MessageQueue, int] = {}
        """What the file holds; `_offsets` is ahead of it after a failed save."""

    async def open(self) -> None:
        """Reads the file, if there is one. Raises OSError, and RemoteProtocolError for an invalid file."""
        if self._file is not None:
            table = await anyio.to_thread.run_sync(_read, self._file)
            self._offsets = {MessageQueue(*queue): offset for queue, offset in table.items()}
            self._written = dict(self._offsets)

    async def load(self, queue: MessageQueue) -> int | None:
        """Returns the position that was last passed to `save`, or else that of the file (see `Positions.load`)."""
        return self._offsets.get(queue)

    def place_of(self, queue: MessageQueue) -> str:
        """Returns the path of the file, which holds the positions of all queues."""
        return str(self._file)

    @property
    def loss_count(self) -> int:
        """Always 0, because a file loses no saved positions."""
        return 0

    async def save(self, offsets: Mapping[MessageQueue, int], on_saved: Callable[[MessageQueue], None]) -> None:
        """Adds `offsets` to the saved ones, and writes the file if it lacks any of them, including those of earlier
        saves that failed."""
        self._offsets.update(offsets)
        if self._file is not None and self._offsets != self._written:
            known = dict(self._offsets)
            table = {(queue.topic, queue.broker_name, queue.queue_id): offset for queue, offset in known.items()}
            try:
                await anyio.to_thread.run_sync(_replace, self._file, encode_queue_offsets(table))
            except OSError as error:
                _log.error("client.positions_not_saved file=%s reason=%r", self._file, error.strerror)
                return
            self._written = known
        for queue in offsets:
            on_saved(queue)


def _read(file: Path) -> dict[tuple[str, str, int], int]:
    try:
        return decode_queue_offsets(file.read_bytes())
    except FileNotFoundError:
        return {}
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"position file {file}: {error}") from None


def _replace(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Stores consumer positions: a group's at the brokers, a BROADCASTING member's in a local file.

Source: RemoteBrokerOffsetStore, LocalFileOffsetStore (same file format).
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from ha.client.messages import MessageQueue
from ha.client.queue_requests import QueueRequests
from ha.errors import ClientError, RemoteProtocolError
from ha.protocol.group_requests import decode_queue_offsets, encode_queue_offsets

_log = logging.getLogger(__name__)


class Positions(Protocol):
    """Queue offsets by queue: the first message not yet consumed."""

    async def load(self, queue: MessageQueue) -> int | None:
        """Returns the saved position of `queue`; None if there is none. ClientError."""

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """Saves `offsets` and returns the queues for which that succeeded. Logs failures instead of raising."""


class BrokerPositions:
    """A group's positions, stored by the brokers."""

    def __init__(self, requests: QueueRequests) -> None:
        self._requests = requests
        self._failing: set[MessageQueue] = set()

    async def load(self, queue: MessageQueue) -> int | None:
        """As in Positions."""
        return await self._requests.committed_offset(queue)

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """As in Positions. For each topic and broker set, commits one offset first and then the others concurrently.

        A RocketMQ broker creates a group's table for a topic at the first commit, in one of many threads and without a
        lock. If concurrent commits all find no table, the last one's replaces the others', although each is answered
        with SUCCESS (ConsumerOffsetManager.commitOffset). A killed broker may have lost the table, so this applies to
        every save."""
        by_table: dict[tuple[str, str], list[MessageQueue]] = defaultdict(list)
        for queue in offsets:
            by_table[queue.topic, queue.broker_name].append(queue)
        saved: set[MessageQueue] = set()
        async with anyio.create_task_group() as tasks:
            for queues in by_table.values():
                tasks.start_soon(self._save_table, queues, offsets, saved)
        return saved

    async def _save_table(
        self, queues: list[MessageQueue], offsets: Mapping[MessageQueue, int], saved: set[MessageQueue]
    ) -> None:
        first, *others = queues
        await self._save_one(first, offsets[first], saved)
        async with anyio.create_task_group() as tasks:
            for queue in others:
                tasks.start_soon(self._save_one, queue, offsets[queue], saved)

    async def _save_one(self, queue: MessageQueue, offset: int, saved: set[MessageQueue]) -> None:
        try:
            await self._requests.commit(queue, offset)
        except (ClientError, RemoteProtocolError) as error:
            if queue not in self._failing:
                self._failing.add(queue)
                _log.warning("client.commit_failed queue=%s offset=%d reason=%r", queue, offset, str(error))
            return
        self._failing.discard(queue)
        saved.add(queue)


class FilePositions:
    """One member's positions in a file that is replaced atomically."""

    def __init__(self, file: Path | None) -> None:
        """`file` None: in memory only."""
        self._file = file
        self._offsets: dict[MessageQueue, int] = {}
        self._writing = anyio.Lock()

    async def open(self) -> None:
        """Reads the file, if there is one. OSError; RemoteProtocolError for an invalid file."""
        if self._file is not None:
            table = await anyio.to_thread.run_sync(_read, self._file)
            self._offsets = {MessageQueue(*queue): offset for queue, offset in table.items()}

    async def load(self, queue: MessageQueue) -> int | None:
        """As in Positions."""
        return self._offsets.get(queue)

    async def save(self, offsets: Mapping[MessageQueue, int]) -> set[MessageQueue]:
        """As in Positions."""
        known = self._offsets
        known.update(offsets)
        if self._file is not None:
            async with self._writing:
                table = {(queue.topic, queue.broker_name, queue.queue_id): offset for queue, offset in known.items()}
                try:
                    await anyio.to_thread.run_sync(_replace, self._file, encode_queue_offsets(table))
                except OSError as error:
                    _log.error("client.positions_not_saved file=%s reason=%r", self._file, error.strerror)
                    return set()
        return set(offsets)


def _read(file: Path) -> dict[tuple[str, str, int], int]:
    try:
        return decode_queue_offsets(file.read_bytes())
    except FileNotFoundError:
        return {}


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

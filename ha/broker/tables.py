"""What a broker knows: its topics, groups and offsets, each with its file under config/, who is connected,
and what groups have pulled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ha.broker.clients import ClientRegistry
from ha.broker.config_file import ConfigFile
from ha.broker.delay_offsets import DelayOffsetTable
from ha.broker.groups import SubscriptionGroups
from ha.broker.offsets import ConsumerOffsetTable
from ha.broker.options import BrokerOptions
from ha.broker.throughput import GroupReads
from ha.broker.topics import Topics
from ha.broker.world import World

if TYPE_CHECKING:
    from ha.store.message_store import MessageStore


class Tables:
    """All of them. `load` before use."""

    def __init__(self, store: MessageStore, options: BrokerOptions, world: World) -> None:
        self._store = store
        self._options = options
        self._world = world
        self._files: list[ConfigFile] = []
        clock = world.wall_clock_ms
        self.topics = Topics(self._file("topics.json"), options, wall_clock_ms=clock, queues=store.queues)
        self.groups = SubscriptionGroups(self._file("subscriptionGroup.json"), options, wall_clock_ms=clock)
        self.offsets = ConsumerOffsetTable(
            self._file("consumerOffset.json"), options, taken_file=self._file("takenOffsets.json")
        )
        self.delay_offsets = DelayOffsetTable(self._file("delayOffset.json"), wall_clock_ms=clock)
        self.clients = ClientRegistry(options)
        self.reads = GroupReads(key_count_max=options.offset_key_count_max)

    def _file(self, name: str) -> ConfigFile:
        world = self._world
        made = ConfigFile(self._options.config_dir / name, disk=world.disk, run_blocking=world.run_blocking)
        self._files.append(made)
        return made

    async def load(self) -> None:
        """Read the files. Raises CorruptLog, naming the file, if one can't be read."""
        await self.topics.load()
        await self.groups.load()
        await self.offsets.load()
        await self.delay_offsets.load(self._store.log.max_offset.value)

    async def save(self) -> None:
        """Write the offsets if some changed, and tables that a full disk has kept from being written, if it has room.

        The other tables are written when they change.
        """
        await self.offsets.save()
        for file in self._files:
            await file.catch_up()

"""Producers and consumers of a group: they ask the name server for the master."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import trio

from ha.protocol import java_json
from ha.protocol.bodies import ClusterInfo
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import GetMaxOffsetRequest, QueryConsumerOffsetRequest, UpdateConsumerOffsetRequest
from ha.protocol.remoting import RemotingCommand
from tests.checkers.consumer_offsets import Place
from tests.checkers.history import Answered
from tests.sim.machines import NAME_SERVER_PORT, address_of
from tests.sim.scenario import NAME_SERVER
from tests.sim.workload import RECONNECT_S, TOPIC, Client, Consumer, Lost, Producer

if TYPE_CHECKING:
    from tests.sim.groups.group import Group
    from tests.sim.groups.watch import GroupWatch
    from tests.sim.scenario import RunOptions
    from tests.sim.workload import Watcher

ELSEWHERE = frozenset({"SERVICE_NOT_AVAILABLE", "CODE_2", "CODE_1"})
"""Rejections after which a client looks for the master again"""
ELSEWHERE_S = 0.2
ROUND_S = 0.1
COMMIT_CHANCE = 0.4
SEEK_CHANCE = 0.02


class MasterFinder:
    """Asks the name server for the master. One request at a time."""

    def __init__(self, group: Group, name: str) -> None:
        self._client = Client(group, name)
        self._names = {address_of(each): each for each in group.machines}

    async def find(self) -> str:
        """Returns the master's name. Lost if the name server can't be reached, or knows of none."""
        client = self._client
        client.close()
        await client.connect(NAME_SERVER, NAME_SERVER_PORT)
        try:
            await client.send([RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO, opaque=1)])
            answer = await client.receive()
        finally:
            client.close()
        brokers = java_json.read_as(ClusterInfo, answer.body).broker_addr_table.values()
        for broker in brokers:
            address, _, _ = broker.broker_addrs.get(0, "").partition(":")
            if address:
                return self._names[address]
        raise Lost


class GroupProducer(Producer):
    """Sends to the current master."""

    def __init__(self, group: Group, watch: Watcher, name: str, options: RunOptions | None = None) -> None:
        super().__init__(group, options or group.options, watch, name)
        self._finder = MasterFinder(group, f"{name[0]}{10 + int(name[1:])}")
        self._is_refused = False

    async def _choose(self) -> str:
        return await self._finder.find()

    async def _burst(self, count: int) -> None:
        self._is_refused = False
        await super()._burst(count)
        if self._is_refused:
            await trio.sleep(ELSEWHERE_S)
            raise Lost

    def _answered(self, answered: Answered) -> None:
        self._is_refused = self._is_refused or answered.status in ELSEWHERE
        super()._answered(answered)


class GroupConsumer(Consumer):
    """Pulls every queue: from the master, and commits there; or, `wanders`, from any member.

    With `seeks` it occasionally asks the master for the end of a queue, and continues there.
    """

    def __init__(
        self, group: Group, watch: GroupWatch, name: str, *, wanders: bool = False, seeks: bool = False
    ) -> None:
        super().__init__(group, group.options, watch, name, "")
        self._group = group
        self._group_watch = watch
        self._wanders = wanders
        self._seeks = seeks
        self._finder = MasterFinder(group, f"c{10 + int(name[1:])}")
        self._numbers = itertools.count(1 << 20)
        self._committed: dict[int, int] = {}
        self.flags = 4

    async def run(self) -> None:
        """Pulls until cancelled."""
        chance = self._client.chance
        while True:
            try:
                if self._wanders:
                    self._node = chance.choice(list(self._group.machines))
                else:
                    self._node = await self._finder.find()
                await self._client.connect(self._node)
                if not self._wanders:
                    await self._ask_all()
                for _ in itertools.repeat(None, chance.randrange(3, 20)) if self._wanders else itertools.count():
                    for queue_id in self.next_offsets:
                        if not self._wanders and self._seeks and chance.random() < SEEK_CHANCE:
                            await self._seek(queue_id)
                        await self._pull(queue_id)
                        if not self._wanders and chance.random() < COMMIT_CHANCE:
                            await self._commit(queue_id)
                    await trio.sleep(ROUND_S)
            except Lost:
                await trio.sleep(RECONNECT_S * chance.uniform(0.5, 1.5))
            self._client.close()

    def _place(self, queue_id: int) -> Place:
        return Place(f"group-{self._name}", TOPIC, queue_id)

    async def _ask_all(self) -> None:
        """Asks the master for the committed offset of each queue."""
        watch = self._group_watch
        for queue_id in self.next_offsets:
            place = self._place(queue_id)
            least, asked_s = watch.offsets.least(place), trio.current_time()
            header = QueryConsumerOffsetRequest(consumer_group=place.group, topic=TOPIC, queue_id=queue_id)
            answer = await self._request(RequestCode.QUERY_CONSUMER_OFFSET, header.to_ext_fields())
            if answer.code == ResponseCode.SUCCESS:
                told = int(answer.ext_fields["offset"])
            elif answer.code == ResponseCode.QUERY_NOT_FOUND:
                told = 0
            else:
                continue  # the topic is not known there, or it is not the master
            watch.on_told(place, told, least, self._node, asked_s)

    async def _seek(self, queue_id: int) -> None:
        """Continues at the end of a queue, as a group does that starts there."""
        header = GetMaxOffsetRequest(topic=TOPIC, queue_id=queue_id)
        answer = await self._request(RequestCode.GET_MAX_OFFSET, header.to_ext_fields())
        if answer.code == ResponseCode.SUCCESS:
            self.next_offsets[queue_id] = max(self.next_offsets[queue_id], int(answer.ext_fields["offset"]))
            await self._commit(queue_id)

    async def _commit(self, queue_id: int) -> None:
        """Commits the pulled offset. Lost if that is impossible here."""
        watch, place, queue_offset = self._group_watch, self._place(queue_id), self.next_offsets[queue_id]
        if queue_offset <= self._committed.get(queue_id, 0):
            return
        self._committed[queue_id] = queue_offset
        watch.offsets.on_commit(place, queue_offset)
        asked_s = trio.current_time()
        header = UpdateConsumerOffsetRequest(
            consumer_group=place.group, topic=TOPIC, queue_id=queue_id, commit_offset=queue_offset
        )
        answer = await self._request(RequestCode.UPDATE_CONSUMER_OFFSET, header.to_ext_fields())
        if answer.code != ResponseCode.SUCCESS:
            raise Lost
        watch.on_committed(place, queue_offset, self._node, asked_s)

    async def _request(self, code: RequestCode, fields: dict[str, str]) -> RemotingCommand:
        await self._client.send([RemotingCommand(code, opaque=next(self._numbers), ext_fields=fields)])
        return await self._client.receive()

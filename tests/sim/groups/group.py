"""The members of one run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ha.config import Config
from ha.failover.agreement import Agreement, GroupRecord, GroupView
from ha.node import Node, open_node
from ha.node.member import STATE_FILE
from ha.replication.statistics import Condition
from tests.sim.groups.scenario import members_of
from tests.sim.groups.service import GroupService, MemberWay
from tests.sim.machines import NAME_SERVER_PORT, ROOT, Machines, address_of, common_config, open_name_server
from tests.sim.scenario import NAME_SERVER, GroupOptions
from tests.sim.workload import TOPIC

if TYPE_CHECKING:
    import trio

    from ha.node.platform import Platform
    from tests.sim.disk import SimDisk
    from tests.sim.groups.watch import GroupWatch
    from tests.sim.network import Network
    from tests.sim.process import Machine
    from tests.sim.world import World

SERVICE_URL = "http://service:2379"
"""Never contacted; it makes a node a member"""


def config_of(options: GroupOptions, name: str) -> Config:
    """Returns a member's configuration."""
    return Config(
        **common_config(options, name),
        broker_role="ASYNC_MASTER" if options.policy == "alone" else "SYNC_MASTER",
        broker_id=int(name[1:]),
        name_server_addresses=f"{address_of(NAME_SERVER)}:{NAME_SERVER_PORT}",
        flush_mode=options.flush,
        in_sync_replicas=options.ack_count if options.policy == "count" else None,
        min_in_sync_replicas=options.min_in_sync_replicas or None,
        all_ack_in_sync_state_set=options.policy == "all",
        slave_read_enable=True,
        etcd_endpoints=SERVICE_URL,
        lease_ttl_ms=options.lease_ttl_ms,
        slave_not_catch_up_ms_max=options.not_catch_up_ms,
    )


class KnownRecord(msgspec.Struct, frozen=True):
    """The part of a member's file `memberstate` that is used here."""

    group: GroupRecord | None = None


class Group(Machines):
    """The members, the name server, and the agreement service."""

    watch: GroupWatch

    def __init__(
        self, world: World, network: Network, options: GroupOptions, watch: GroupWatch, nursery: trio.Nursery
    ) -> None:
        super().__init__(world, network, options, watch, nursery)
        self.options = options
        self.service = GroupService(
            world.timers,
            world.chance("service"),
            lease_late_s=options.lease_late_s,
            clock_speed=options.clock_speed,
            on_change=self._agreed,
        )
        for name in members_of(options):
            self.machines[name] = self._add(name, partial(self._open_member, config_of(options, name)))
            self.excused[name].add("ConfigError")
            self.service.client(name)
            self.mend_link(name)
        self.name_server = self._add(NAME_SERVER, partial(open_name_server, address_of(NAME_SERVER)))
        self._duplicates: dict[int, Machine] = {}
        """Broker id -> machine of a second process with that id"""

    @asynccontextmanager
    async def _open_member(self, config: Config, platform: Platform) -> AsyncIterator[Node]:
        disk: SimDisk = platform.disk  # type: ignore[assignment]
        if disk.name in self.machines:
            disk.on_unlink = partial(self.watch.on_unlink, self.machines[disk.name])
        async with open_node(config, replace(platform, open_agreement=partial(self._agreement, disk))) as node:
            yield node

    def _agreement(self, disk: SimDisk, config: Config, *_: object) -> AbstractAsyncContextManager[Agreement]:
        return _given(MemberWay(self.service, disk.name, disk))

    def start_duplicate(self, name: str, *, with_copy: bool) -> bool:
        """Starts a second process with a member's broker id, on its own machine, with an empty or a copied store.

        Returns whether the service holds the first process's key, and there was no second one yet.
        """
        first = self.machines[name]
        config = config_of(self.options, name)
        id_ = config.broker_id
        if not first.is_running or id_ not in self.service.view().members:
            return False
        if id_ not in self._duplicates:
            own = f"d{id_}"
            config = msgspec.structs.replace(config, bind_address=address_of(own))
            self._duplicates[id_] = self._add(own, partial(self._open_member, config))
            self.excused[own].add("ConfigError")
            self.service.client(own)
            self.mend_link(own)
        second = self._duplicates[id_]
        if second.is_running:
            return False
        second.disk = second.disk.with_files_of(first.disk if with_copy else None)
        second.start()
        return True

    def end_duplicate(self, id_: int) -> None:
        """Kills the second process with a broker id, if it has not ended on its own."""
        second = self._duplicates.get(id_)
        if second is not None and second.is_running:
            second.kill()

    def end_duplicates(self) -> None:
        """Kills all second processes."""
        for id_ in self._duplicates:
            self.end_duplicate(id_)

    def _restart(self, machine: Machine, errors: set[str], *, is_excused: bool) -> None:
        if machine.name in self.machines:
            super()._restart(machine, errors, is_excused=is_excused)

    def _agreed(self, view: GroupView) -> None:
        for id_ in self._duplicates.keys() - view.members.keys():
            self.end_duplicate(id_)  # otherwise it would be the first one's lawful successor, with another store
        master, members = view.master, sorted(view.group.sync_state_set) if view.group is not None else []
        text = "nobody" if master is None else f"m{master.broker_id} in {master.epoch}"
        self.world.note(f"service: {text}, set {members}")
        self.watch.on_agreed(view)

    def empty_diverged(self) -> None:
        """Empty the stores of members that will not give up their log for the master's, as they ask the operator to."""
        for name, machine in self.machines.items():
            node = self.node(name)
            if node is None or node.ha_client is None:
                continue
            if node.ha_client.statistics().condition in (Condition.CONFIRMED_DIVERGED, Condition.NO_COMMON_EPOCH):
                self.world.note(f"operator: {name} is emptied")
                machine.kill()
                machine.disk.inodes.clear()
                self.start(machine)

    def known_records(self) -> list[GroupRecord]:
        """Returns the newest record of the group on each member's disk."""
        found = []
        for machine in self.machines.values():
            inode = machine.disk.inodes.get(ROOT / STATE_FILE)
            if inode is not None:
                record = msgspec.json.decode(bytes(inode.content), type=KnownRecord).group
                found += [] if record is None else [record]
        return found

    def mend_link(self, name: str) -> None:
        """Resets the delays and losses of a member's link to the service."""
        link, delay_s = self.service.links[name], self.options.service_delay_s
        link.delay_s = link.watch_delay_s = (delay_s / 4, delay_s)
        link.lost_request_share = link.lost_answer_share = 0.0

    @property
    def master_name(self) -> str | None:
        master = self.service.view().master
        return None if master is None else f"m{master.broker_id}"

    def queue_ends(self) -> dict[int, int]:
        first = next(iter(self.machines.values()))
        return {r.queue_id: r.queue_offset + 1 for r in self.image(first).records() if r.topic == TOPIC}


@asynccontextmanager
async def _given(agreement: Agreement) -> AsyncIterator[Agreement]:
    yield agreement

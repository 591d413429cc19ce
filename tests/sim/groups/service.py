"""The agreement service of one simulated group, and each member's client of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import trio

from ha.failover.agreement import AgreementUnavailable, GroupView, Lease
from tests.sim.agreement import SimAgreement, SimAgreementService, Snapshot

if TYPE_CHECKING:
    import random

    from tests.sim.disk import SimDisk
    from tests.sim.world import Timers

SNAPSHOTS_MAX = 4

ResultT = TypeVar("ResultT")


class GroupService(SimAgreementService):
    """Reports each change as it is made, and has its own clock."""

    def __init__(
        self,
        timers: Timers,
        chance: random.Random,
        *,
        lease_late_s: float,
        clock_speed: float,
        on_change: Callable[[GroupView], None],
    ) -> None:
        super().__init__(timers, chance)
        self.lease_late_s = (0.0, lease_late_s)
        self._clock_speed = clock_speed
        self._on_change = on_change
        self.snapshots: list[Snapshot] = []
        """States before each of the last changes of the group's record"""

    def change(self, puts: dict[str, tuple[object, int]], removals: tuple[str, ...] = ()) -> int:
        before = self.revision
        if "group" in puts:
            self.snapshots = [*self.snapshots[1 - SNAPSHOTS_MAX :], self.snapshot()]
        revision = super().change(puts, removals)
        if revision != before:
            self._on_change(self.history[-1])
        return revision

    def restore(self, snapshot: Snapshot, *, keeps_leases: bool = False) -> None:
        super().restore(snapshot, keeps_leases=keeps_leases)
        self._on_change(self.history[-1])

    def _extend(self, lease_id: int, lease: object) -> None:
        super()._extend(lease_id, lease)  # type: ignore[arg-type]
        if self._clock_speed != 1.0:
            now = trio.current_time()
            granted = self._leases[lease_id]
            ends_at = now + (granted.ends_at - now) / self._clock_speed
            granted.ends_at = self.timers.call_at(ends_at, self._end, lease_id)


class MemberWay(SimAgreement):
    """The client of one process of a member: requests after its death are never sent."""

    def __init__(self, service: GroupService, name: str, disk: SimDisk) -> None:
        service.client(name)
        super().__init__(service, name)
        self._disk = disk

    async def _ask(
        self,
        what: str,
        call: Callable[[], ResultT],
        timeout_s: float,
        lease: Lease | None = None,
        *,
        changes: bool = True,
    ) -> ResultT:
        if self._disk.is_dead:
            await trio.sleep(timeout_s)
            raise AgreementUnavailable(what, "the process is dead", outcome_unknown=changes)
        return await super()._ask(what, call, timeout_s, lease, changes=changes)

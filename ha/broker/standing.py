"""A broker's current role: master or slave, the term (epoch) it belongs to, and how long its lease lasts.

Without failover the role is fixed (`fixed_standing`). With failover, the election changes it through
`Broker.become_master` and `Broker.become_slave`; everything else only reads it. Two checks surround every put:

    before it is stored      `why_not_stored`
    before it is answered    `still_acknowledges(term)`: same term, lease still valid

Neither result may be cached: a process that was suspended for a minute must notice before its next answer that its
lease has ended, not after its next pass through the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from ha.broker.options import BrokerOptions, BrokerRole
from ha.protocol.codes import MASTER_ID, ResponseCode

FOREVER = math.inf
NEVER = -math.inf


class Standing:
    """The role of one broker. Read its attributes; change it only through its methods."""

    __slots__ = (
        "_changed",
        "_subscribers",
        "acknowledges_until",
        "broker_name",
        "can_be_replaced",
        "epoch",
        "is_slave",
        "member_id",
        "refusal",
        "revision",
    )

    def __init__(
        self, broker_name: str, member_id: int, *, is_slave: bool, is_elected: bool = False, epoch: int = 0
    ) -> None:
        """`member_id`: the broker's own, permanent id. `is_elected`: elections decide the role."""
        self.broker_name = broker_name
        self.is_slave = is_slave
        self.can_be_replaced = is_elected
        """Whether another broker can become master in this one's place. If not, the role never changes"""
        self.member_id = member_id
        self.epoch = epoch
        """The term: a master's own, or the highest that a slave knows; 0 without failover"""
        self.refusal = self._slave_refusal() if is_slave else ""
        """Why nothing may be stored, for remarks; "" if there is no reason other than an ended lease. `why_not_stored`
        also checks the lease"""
        self.acknowledges_until = NEVER if is_slave else FOREVER
        """End of the lease (Trio's clock), after which nothing is acknowledged; FOREVER on a master without failover,
        NEVER on a slave"""
        self.revision = 0
        """Incremented by each change, except the renewal of a lease"""
        self._changed = trio.lowlevel.ParkingLot()
        self._subscribers: list[Callable[[], None]] = []

    @property
    def broker_id(self) -> int:
        """Broker id under which to register at present: 0 for the master, `member_id` for a slave."""
        return self.member_id if self.is_slave else MASTER_ID

    @property
    def refusal_code(self) -> ResponseCode:
        """The response code for senders while nothing may be stored.

        A member of a failover group answers 14 (SERVICE_NOT_AVAILABLE), after which every client retries at another
        broker. Any other slave answers 2 (SYSTEM_BUSY) as in 5.x, which clients of 4.9 do not retry.
        """
        return ResponseCode.SERVICE_NOT_AVAILABLE if self.can_be_replaced else ResponseCode.SYSTEM_BUSY

    @property
    def has_lease(self) -> bool:
        """Whether this broker is the master at this moment."""
        return self.acknowledges_until == FOREVER or trio.current_time() < self.acknowledges_until

    def why_not_stored(self) -> str:
        """Returns the reason why nothing may be stored at this moment; "" if storing is allowed."""
        # The second comparison, before `has_lease`, is for speed: this is asked twice for each chunk of sends.
        if self.refusal or self.acknowledges_until == FOREVER or self.has_lease:
            return self.refusal
        return "this broker was the master, but its lease ended and it could not renew it"

    def still_acknowledges(self, term: int) -> bool:
        """Returns whether a put stored in `term` (an epoch) may be acknowledged at this moment."""
        return self.epoch == term and self.has_lease

    # ---- changes

    def become_master(self, epoch: int, acknowledges_until: float = FOREVER) -> None:
        """Starts storing and acknowledging puts, as master of the term `epoch` until the lease ends at
        `acknowledges_until` (Trio's clock)."""
        assert self.can_be_replaced
        assert self.is_slave
        assert epoch >= self.epoch, (epoch, self.epoch)
        self.is_slave, self.epoch = False, epoch
        self.refusal, self.acknowledges_until = "", acknowledges_until
        self._notify()

    def become_slave(self, epoch: int, reason: str = "") -> None:
        """Stops storing and acknowledging puts. `epoch` must not be lower than the current one. `reason`: why nothing
        may be stored, for remarks; by default that this broker is a slave."""
        assert self.can_be_replaced
        assert epoch >= self.epoch, (epoch, self.epoch)
        self.is_slave, self.epoch = True, epoch
        self.refusal, self.acknowledges_until = reason or self._slave_refusal(), NEVER
        self._notify()

    def extend(self, acknowledges_until: float) -> None:
        """Extends a master's lease to `acknowledges_until` (Trio's clock). Does nothing on a slave, which has none."""
        if not self.is_slave:
            self.acknowledges_until = acknowledges_until

    def stop_storing(self, reason: str) -> None:
        """Refuses new puts before a planned switchover, but keeps acknowledging those already stored."""
        assert not self.is_slave
        self.refusal = reason
        self._notify()

    def store_again(self) -> None:
        """Accepts puts again after a planned switchover was abandoned."""
        assert not self.is_slave
        self.refusal = ""
        self._notify()

    def _slave_refusal(self) -> str:
        return f"this is a SLAVE of {self.broker_name}; send to its master"

    def _notify(self) -> None:
        self.revision += 1
        for callback in self._subscribers:
            callback()
        self._changed.unpark_all()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Registers `callback`, called synchronously after every change; it must not block."""
        self._subscribers.append(callback)

    async def wait_changed(self, revision: int) -> None:
        """Waits until `revision` is no longer the current one."""
        while self.revision == revision:
            await self._changed.park()


def fixed_standing(options: BrokerOptions) -> Standing:
    """Returns the standing of a broker whose role is configured and never changes."""
    return Standing(options.broker_name, options.broker_id, is_slave=options.role is BrokerRole.SLAVE)

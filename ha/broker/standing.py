"""What a broker is now: its group's master or a slave, in which term, and until when what it acknowledges counts.

Without failover a standing never changes: `fixed_standing`. With failover whoever runs the elections changes it, by way
of `Broker.become_master` and `become_slave`; everybody else reads. Two questions are asked of it in the way of each
chunk of messages, and each costs a look at an attribute unless the broker is elected:

    before it is stored      `why_not_stored`
    before it is answered    `still_acknowledges(term)`: of the same term, and within it

Neither is ever answered from something that was asked earlier: a process that was stopped for a minute must find out
before its next answer, not after the next turn of a task.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from ha.broker.options import BrokerRole
from ha.protocol.codes import MASTER_ID, ResponseCode

if TYPE_CHECKING:
    from ha.broker.options import BrokerOptions

FOREVER = math.inf
NEVER = -math.inf


class Standing:
    """One broker's. Others read its attributes, and change them by its methods."""

    __slots__ = (
        "_changed",
        "_subscribers",
        "acknowledges_until",
        "broker_name",
        "epoch",
        "is_elected",
        "is_slave",
        "member_id",
        "refusal",
        "revision",
    )

    def __init__(
        self, broker_name: str, member_id: int, *, is_slave: bool, is_elected: bool = False, epoch: int = 0
    ) -> None:
        """`member_id`: the broker's own id, which it has for good. `is_elected`: the role comes of elections."""
        self.broker_name = broker_name
        self.is_slave = is_slave
        self.is_elected = is_elected
        """Whether the role may change: false, and nothing of this ever does"""
        self.member_id = member_id
        self.epoch = epoch
        """The term: of a master its own, of a slave the highest that it follows; 0 without failover"""
        self.refusal = self._slave_refusal() if is_slave else ""
        """Why nothing may be stored here now, for remarks; "" while it may"""
        self.acknowledges_until = NEVER if is_slave else FOREVER
        """Trio clock: from then on nothing is acknowledged"""
        self.revision = 0
        """Grows with each change; that a lease was renewed is none"""
        self._changed = trio.lowlevel.ParkingLot()
        self._subscribers: list[Callable[[], None]] = []

    @property
    def broker_id(self) -> int:
        """The id to register under now: 0 is the master."""
        return self.member_id if self.is_slave else MASTER_ID

    @property
    def refusal_code(self) -> ResponseCode:
        """What is answered to who sends here while nothing may be stored.

        An elected broker was the master a moment ago, or will be. Every client tries again elsewhere at 14, those of
        4.9 not at 2, which is what a slave of 5.x answers.
        """
        return ResponseCode.SERVICE_NOT_AVAILABLE if self.is_elected else ResponseCode.SYSTEM_BUSY

    def why_not_stored(self) -> str:
        """Why nothing may be stored here at this moment, in words; "" if it may."""
        if self.refusal or not self.is_elected or trio.current_time() < self.acknowledges_until:
            return self.refusal
        return "this broker was the master, but its lease ended and it could not renew it"

    def still_acknowledges(self, term: int) -> bool:
        """Whether what was stored in `term` (an epoch) may be acknowledged at this moment."""
        return self.epoch == term and not self.is_slave and trio.current_time() < self.acknowledges_until

    # ---- changes

    def become_master(self, epoch: int, acknowledges_until: float = FOREVER) -> None:
        """From now on this broker stores and acknowledges."""
        assert self.is_elected
        assert self.is_slave
        assert epoch >= self.epoch, (epoch, self.epoch)
        self.is_slave, self.epoch = False, epoch
        self.refusal, self.acknowledges_until = "", acknowledges_until
        self._tell()

    def become_slave(self, epoch: int, reason: str = "") -> None:
        """From now on this broker stores and acknowledges nothing. `epoch` is never lower than before."""
        assert self.is_elected
        assert epoch >= self.epoch, (epoch, self.epoch)
        self.is_slave, self.epoch = True, epoch
        self.refusal, self.acknowledges_until = reason or self._slave_refusal(), NEVER
        self._tell()

    def extend(self, acknowledges_until: float) -> None:
        """The master's lease was renewed; of a slave, which has none, this changes nothing."""
        if not self.is_slave:
            self.acknowledges_until = acknowledges_until

    def stop_storing(self, reason: str) -> None:
        """Admit nothing more, but go on acknowledging what is stored: before a planned switch."""
        assert not self.is_slave
        self.refusal = reason
        self._tell()

    def store_again(self) -> None:
        """The planned switch came to nothing: admit again."""
        assert not self.is_slave
        self.refusal = ""
        self._tell()

    def _slave_refusal(self) -> str:
        return f"this is a SLAVE of {self.broker_name}; send to its master"

    def _tell(self) -> None:
        self.revision += 1
        for callback in self._subscribers:
            callback()
        self._changed.unpark_all()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` at once after every change; it must not block."""
        self._subscribers.append(callback)

    async def wait_changed(self, revision: int) -> None:
        """Wait until something is no longer as it was in `revision`."""
        while self.revision == revision:
            await self._changed.park()


def fixed_standing(options: BrokerOptions) -> Standing:
    """The standing of a broker whose role is configured, and stays."""
    return Standing(options.broker_name, options.broker_id, is_slave=options.role is BrokerRole.SLAVE)

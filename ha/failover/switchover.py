"""A planned switch to another master, requested from any member: the request reaches the master through the service.

A request is for the term in which it is made. If nobody answers it, it ends with that term, so it can't remove a master
that the operator doesn't know of. The master hands over, or replaces the request by its refusal (master_term.py).
"""

from __future__ import annotations

import msgspec
import trio

from ha.failover.agreement import TIMEOUT_S, Agreement, AgreementUnavailable, GroupView, SwitchRequest
from ha.failover.known_group import KnownGroup


class SwitchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request for a switch."""

    is_done: bool
    """Whether the requested member is master or, if none was named, another member than before."""
    master_id: int | None
    """Broker id of the current master; None if there is none, or it is unknown."""
    epoch: int
    """Term of the last known master."""
    seconds: float
    """Seconds from the request until the outcome was known, or until the wait ended without one."""
    why_not: str = ""
    """Why the switch is not done; "" if it is."""
    is_known: bool = True
    """Whether this result is final. If not, the request may still be served until the master's term ends."""


def is_open(request: SwitchRequest | None) -> bool:
    """Returns whether there is a request that the master has not answered."""
    return request is not None and not request.refusal


class SwitchoverRequests:
    """Requests for a switch made through one member. Of two requests at the same time the later one counts."""

    def __init__(self, agreement: Agreement, known: KnownGroup) -> None:
        self._agreement = agreement
        self._known = known

    async def request(self, to: int | None, reason: str, *, wait_s: float) -> SwitchOutcome:
        """Requests that member `to` become master; None: any member except the current master. Returns the outcome,
        within about `wait_s` seconds.

        If this is cancelled, the request may still be served.
        """
        began = trio.current_time()
        try:
            with trio.move_on_after(wait_s):
                view, why_not = await self._request(to, reason, wait_s)
                return _outcome(view, began, why_not)
        except AgreementUnavailable as error:
            return _outcome(self._known.view, began, str(error), is_known=not error.outcome_unknown)
        unanswered = f"no answer within {wait_s:g} s; it may still be done in this term"
        return _outcome(self._known.view, began, unanswered, is_known=False)

    async def _request(self, to: int | None, reason: str, wait_s: float) -> tuple[GroupView, str]:
        """Makes the request and waits for the outcome. Returns the group afterwards, and the reason why the requested
        member is not master ("" if it is)."""
        timeout_s = min(wait_s / 2, TIMEOUT_S)
        latest = self._known.latest
        before = await self._agreement.view(timeout_s=timeout_s)
        self._known.update(before)
        if before.master is None or before.group is None:
            return before, "there is no master now: an election is under way, or nobody can be elected"
        if before.master.broker_id == to:
            return before, ""
        epoch = before.group.epoch
        request = SwitchRequest(to=to, reason=reason, epoch=epoch)
        revision = await self._agreement.request_switch(request, timeout_s=timeout_s)
        # Compares `switch_revision`: on the master, a view made by `KnownGroup.apply` may have a higher `revision` than
        # the request, and lack it nevertheless.
        answered: GroupView = await latest.wait_value(
            lambda now: now.switch_revision > revision or now.master_revision != before.master_revision
        )
        if answered.switch is not None and answered.switch.refused_revision == revision:
            return answered, answered.switch.refusal
        if answered.master_revision == before.master_revision:
            return answered, "another switch has been requested since"
        after: GroupView = await latest.wait_value(lambda now: now.master is not None and now.master.epoch > epoch)
        assert after.master is not None
        new = after.master.broker_id
        is_done = new != before.master.broker_id if to is None else new == to
        return after, "" if is_done else f"member {new} became master instead"


def _outcome(view: GroupView | None, began: float, why_not: str, *, is_known: bool = True) -> SwitchOutcome:
    return SwitchOutcome(
        is_done=not why_not,
        master_id=None if view is None or view.master is None else view.master.broker_id,
        epoch=0 if view is None or view.group is None else view.group.epoch,
        seconds=round(trio.current_time() - began, 3),
        why_not=why_not,
        is_known=is_known,
    )

"""A switch that an operator wants, as any member asks for it: whoever is master is asked, through what they agree on.

The request is for the term that is there when it is made: one that nobody answers is void with that term, so it can't
take the office from somebody whom the operator does not know of. Its master hands over, or says why not in its place
(`lead.py`).
"""

from __future__ import annotations

import msgspec
import trio

from ha.failover.agreement import TIMEOUT_S, Agreement, AgreementUnavailable, GroupView, SwitchRequest
from ha.failover.known_group import KnownGroup


class SwitchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    is_done: bool
    """The office is with whom it was asked for."""
    master_id: int | None
    """Who is master now; None: nobody, or it isn't known."""
    epoch: int
    """Of the last master that is known."""
    seconds: float
    """From the request until there was another master, or until it was known why not."""
    why_not: str = ""
    is_known: bool = True
    """Whether this is how it ended: without an answer in time the request stands until the master's term ends."""


def is_open(request: SwitchRequest | None) -> bool:
    """Tell whether there is a request which the master has not answered."""
    return request is not None and not request.refusal


class SwitchDesk:
    """Where an operator asks one member for a switch of its group. Of two requests at once the later one counts."""

    def __init__(self, agreement: Agreement, known: KnownGroup) -> None:
        self._agreement = agreement
        self._known = known

    async def ask(self, to: int | None, reason: str, *, wait_s: float) -> SwitchOutcome:
        """Ask for `to` as master, None: any but the present one; return what came of it within about `wait_s`.

        Cancelled, the request may stand.
        """
        began = trio.current_time()
        try:
            with trio.move_on_after(wait_s):
                view, why_not = await self._ask(to, reason, wait_s)
                return _outcome(view, began, why_not)
        except AgreementUnavailable as error:
            return _outcome(self._known.view, began, str(error), is_known=not error.outcome_unknown)
        unanswered = f"no answer within {wait_s:g} s; it may still be done in this term"
        return _outcome(self._known.view, began, unanswered, is_known=False)

    async def _ask(self, to: int | None, reason: str, wait_s: float) -> tuple[GroupView, str]:
        """Return the group as it is then, and why it has not the master that was asked for, or ""."""
        timeout_s = min(wait_s / 2, TIMEOUT_S)
        before = await self._agreement.view(timeout_s=timeout_s)
        self._known.saw(before)
        if before.master is None or before.group is None:
            return before, "there is no master now: an election is under way, or nobody can be elected"
        if before.master.broker_id == to:
            return before, ""
        epoch = before.group.epoch
        request = SwitchRequest(to=to, reason=reason, epoch=epoch)
        revision = await self._agreement.request_switch(request, timeout_s=timeout_s)
        answered: GroupView = await self._known.seen.wait_value(
            lambda now: now.revision >= revision and now.switch_revision != revision
        )
        if answered.switch is not None and answered.switch.refused_revision == revision:
            return answered, answered.switch.refusal
        if answered.master_revision == before.master_revision:
            return answered, "another switch has been asked for since"
        after: GroupView = await self._known.seen.wait_value(
            lambda now: now.master is not None and now.master.epoch > epoch
        )
        assert after.master is not None
        new = after.master.broker_id
        is_done = new != before.master.broker_id if to is None else new == to
        return after, "" if is_done else f"member {new} has taken the office"


def _outcome(view: GroupView | None, began: float, why_not: str, *, is_known: bool = True) -> SwitchOutcome:
    return SwitchOutcome(
        is_done=not why_not,
        master_id=None if view is None or view.master is None else view.master.broker_id,
        epoch=0 if view is None or view.group is None else view.group.epoch,
        seconds=round(trio.current_time() - began, 3),
        why_not=why_not,
        is_known=is_known,
    )

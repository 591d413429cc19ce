"""What one member has heard of its group: the newest view, from the watch and from answers to its own calls."""

from __future__ import annotations

import logging
import math

import trio
from trio_util import AsyncValue

from ha.failover.agreement import Agreement, AgreementUnavailable, GroupView
from ha.failover.options import MemberOptions

logger = logging.getLogger(__name__)


class KnownGroup:
    """The newest view of a group, which may be old. `watch` is its task; `seen` is for waiting."""

    def __init__(self, agreement: Agreement, options: MemberOptions) -> None:
        self._agreement = agreement
        self._options = options
        self.seen: AsyncValue[GroupView | None] = AsyncValue(None)
        self.fault = ""
        """Why the service could not be asked the last time; "" if it could."""
        self.went_back_at = -math.inf
        """When it last showed an older state than before, by the trio clock"""

    @property
    def view(self) -> GroupView | None:
        """The newest view; None before the first."""
        view: GroupView | None = self.seen.value
        return view

    def saw(self, view: GroupView) -> None:
        """Take over a view unless a newer one is known: the watch may be behind the answers to calls."""
        if self.view is None or view.revision >= self.view.revision:
            self.seen.value = view

    async def look(self) -> None:
        """Ask the service what there is now; if it can't be reached, wait a little."""
        known = -1 if self.view is None else self.view.revision
        try:
            view = await self._agreement.view(timeout_s=self._options.call_timeout_s)
            self.fault = ""
            if view.revision < known:
                # Asked after the newer one was known: the service has gone back, as after a restored backup.
                logger.error("member_service_went_back revision=%d known=%d", view.revision, known)
                self.went_back_at = trio.current_time()
                self.seen.value = view
            else:
                self.saw(view)
        except AgreementUnavailable as error:
            self.fault = str(error)
            await trio.sleep(self._options.retry_s)

    async def watch(self) -> None:
        """Take over whatever changes, until cancelled."""
        async with self._agreement.watch() as watch:
            async for seen in watch:
                if seen.is_restart and self.view is not None and seen.view.revision < self.view.revision:
                    await self.look()
                else:
                    self.saw(seen.view)

"""The newest view of the group that one member has, from its watch and from the answers to its own calls."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
import trio
from trio_util import AsyncValue

from ha.failover.agreement import Agreement, AgreementUnavailable, GroupRecord, GroupView
from ha.failover.options import MemberOptions

logger = logging.getLogger(__name__)


class KnownGroup:
    """The newest known view of a group, which may be out of date. `watch` is its task; others can wait on `latest`."""

    def __init__(self, agreement: Agreement, options: MemberOptions) -> None:
        self._agreement = agreement
        self._options = options
        self.latest: AsyncValue[GroupView | None] = AsyncValue(None)
        self.last_error = ""
        """Why the last `refresh` failed; "" if it succeeded."""
        self.rolled_back_at = -math.inf
        """Time at which the service last returned an older state than before (Trio's clock); minus infinity: never."""

    @property
    def view(self) -> GroupView | None:
        """The newest view; None before the first."""
        view: GroupView | None = self.latest.value
        return view

    def update(self, view: GroupView) -> None:
        """Adopts a view unless a newer one is known: the watch may lag behind the answers to calls."""
        if self.view is None or view.revision >= self.view.revision:
            self.latest.value = view

    def apply(self, revision: int, group: GroupRecord, **changes: Any) -> None:
        """Updates the view after this member's own change at `revision`, unless that revision or a later one is known.

        Replaces the record by `group`, and the view's other fields named in `changes`. Changes that other members made
        shortly before may be missing until the watch delivers them.
        """
        assert self.view is not None
        if revision > self.view.revision:
            changes |= {"revision": revision, "group": group, "group_revision": revision}
            self.latest.value = msgspec.structs.replace(self.view, **changes)

    async def refresh(self) -> bool:
        """Reads the group from the service; if that fails, waits for `retry_s`. Returns whether it succeeded."""
        known = -1 if self.view is None else self.view.revision
        try:
            view = await self._agreement.view(timeout_s=self._options.call_timeout_s)
            self.last_error = ""
            if self.view is not None and view.revision < known <= self.view.revision:
                # A higher revision was known before this read: the service was rolled back, for example to a backup.
                logger.error("member.etcd_rolled_back revision=%d known=%d", view.revision, known)
                self.rolled_back_at = trio.current_time()
                self.latest.value = view
            else:
                self.update(view)
        except AgreementUnavailable as error:
            self.last_error = str(error)
            await trio.sleep(self._options.retry_s)
            return False
        return True

    async def watch(self) -> None:
        """Adopts the views that the service's watch delivers, until cancelled. If one is older than the known view,
        reads the group instead."""
        async with self._agreement.watch() as watch:
            async for seen in watch:
                if self.view is None or seen.view.revision >= self.view.revision:
                    self.update(seen.view)
                    continue
                # Either the watch lags behind the answers to calls, or the known view is from before the service was
                # rolled back (a delayed answer, or the answer of a server that was restored later than the others).
                while not await self.refresh():
                    pass

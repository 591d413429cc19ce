"""The states of a member of a failover group, and the transitions between them.

FOLLOWING ──become_candidate──▶ CANDIDATE ──become_master──▶ MASTER
    ▲  ▲                            │                          │
    │  └──────become_following──────┘                    become_fenced
    └──────────become_following──────────── FENCED ◀───────────┘
                                              └──become_candidate──▶ CANDIDATE
"""

from __future__ import annotations

import logging
from enum import Enum

import trio
from trio_util import AsyncValue

logger = logging.getLogger(__name__)


class MemberState(Enum):
    """State of one member."""

    FOLLOWING = "following"
    """There is a master, or it isn't known yet whether there is one. If `master_id` is None, the member follows no
    master: etcd has not answered yet, or this member must not follow the present one."""
    CANDIDATE = "candidate"
    """There is no master. The log doesn't change; the member waits for its turn, or for another member's election."""
    MASTER = "master"
    """This member owns the master's key. `master_id` is its own id once it serves, None until then."""
    FENCED = "fenced"
    """This member has just stopped being the master: waiting requests are refused, and the key is released."""


TRANSITIONS: dict[MemberState, frozenset[MemberState]] = {
    MemberState.FOLLOWING: frozenset({MemberState.FOLLOWING, MemberState.CANDIDATE}),
    MemberState.CANDIDATE: frozenset({MemberState.CANDIDATE, MemberState.FOLLOWING, MemberState.MASTER}),
    MemberState.MASTER: frozenset({MemberState.MASTER, MemberState.FENCED}),
    MemberState.FENCED: frozenset({MemberState.FOLLOWING, MemberState.CANDIDATE}),
}


class MemberProgress:
    """The state of one member, with the transitions as methods. Changed only by its Member; others read, and wait for
    `changed`.

    master_id   broker id of the master that the member follows, or its own while it serves as master; None: no master
    epoch       the master's epoch; without a master the highest known one
    reason      why the member is in this state, as shown to operators; "" if the state needs no explanation
    """

    def __init__(self) -> None:
        self.state = MemberState.FOLLOWING
        self.master_id: int | None = None
        self.epoch = 0
        self.reason = "nothing is known of the group yet"
        self.since = trio.current_time()
        """Time at which it entered this state (Trio's clock)"""
        self.changed: AsyncValue[tuple[MemberState, int | None]] = AsyncValue((self.state, None))
        """State and `master_id`, for tasks that wait for a change."""

    def become_following(self, master_id: int | None, epoch: int, reason: str = "") -> None:
        """Enters FOLLOWING. `master_id`: the master that the member follows; None: no master, for `reason`."""
        self._move(MemberState.FOLLOWING, master_id, epoch, reason)

    def become_candidate(self, epoch: int) -> None:
        """Enters CANDIDATE: there has been no master since the one of `epoch`."""
        self._move(MemberState.CANDIDATE, None, epoch, "")

    def become_master(self, epoch: int) -> None:
        """Enters MASTER: this member owns the master's key and prepares to serve."""
        self._move(MemberState.MASTER, None, epoch, "")

    def become_serving(self, own_id: int) -> None:
        """Sets `master_id` to this member's own id: as master it accepts requests from now on."""
        assert self.state is MemberState.MASTER, self.state
        self._move(MemberState.MASTER, own_id, self.epoch, "")

    def become_fenced(self, reason: str) -> None:
        """Enters FENCED: the term as master is over, for `reason`."""
        self._move(MemberState.FENCED, None, self.epoch, reason)

    def explain(self, reason: str, *, needs_operator: bool = False) -> None:
        """Sets `reason` without changing the state. Logs it if it is new and not empty, as an error if only an operator
        can resolve it (`needs_operator`)."""
        has_changed, self.reason = reason != self.reason, reason
        if reason and has_changed:
            level = logging.ERROR if needs_operator else logging.INFO
            logger.log(level, "member.waits state=%s epoch=%d reason=%r", self.state.value, self.epoch, reason)

    def _move(self, state: MemberState, master_id: int | None, epoch: int, reason: str) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        if state is not self.state:
            self.since = trio.current_time()
        has_changed = (state, master_id, epoch, reason) != (self.state, self.master_id, self.epoch, self.reason)
        self.state, self.master_id, self.epoch, self.reason = state, master_id, epoch, reason
        if has_changed:
            level = logging.WARNING if state is MemberState.FENCED else logging.INFO
            text = "member.state_changed state=%s epoch=%d master=%s reason=%r"
            logger.log(level, text, state.value, epoch, master_id, reason)
        self.changed.value = (state, master_id)

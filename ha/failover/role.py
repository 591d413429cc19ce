"""What a member is to the rest of its node: the few things that whoever decides about roles asks of who plays them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from ha.failover.agreement import MasterRecord
from ha.failover.lease import Mandate


class LogPosition(msgspec.Struct, frozen=True, order=True):
    """How much of the group's log a member has; of two the greater one has more."""

    epoch: int
    """Last term in its epoch history; 0 if there is none."""
    max_offset: int
    """Physical offset of its log's end (bytes)."""


class Term(msgspec.Struct, frozen=True):
    """One master's time in office."""

    epoch: int
    sync_state_set: frozenset[int]
    """As it is at the begin; afterwards `Role.confirm_set` tells."""
    mandate: Mandate
    """Asked at each admission and at each acknowledgement."""


class Role(Protocol):
    """A node that can be master or slave. One task calls; a call that is cancelled is followed by `become_slave`.

    Errors of the store propagate and end the process; there are no others.
    """

    @property
    def position(self) -> LogPosition:
        """What the log holds now."""

    async def become_master(self, term: Term) -> None:
        """Be master of `term`; return when puts are admitted.

        Before the first byte of the term is written its epoch is durable in the log's history.
        """

    async def become_slave(self, epoch: int, master: MasterRecord | None) -> None:
        """Follow `master`, or nobody; nothing of an epoch below `epoch` is taken or acknowledged any more.

        The same master again is no change. With None the log stands still when this returns: its position can be told
        to others. A master that becomes a slave has answered or refused what waited.
        """

    async def wait_caught_up(self) -> None:
        """Wait until the log has every acknowledged byte, whatever was lost before the node started.

        That is so once it has had all that the log of a master had which it followed in this life, flushed if the node
        flushes before it acknowledges; or once it has become master. Returns at once from then on.
        """

    async def wait_wanted_set(self) -> frozenset[int]:
        """As master: wait until replication wants another sync-state set than the confirmed one, and return it.

        From before this returns until `confirm_set` the union of both counts, and the wish stays as it is.
        """

    def note_living(self, members: Mapping[int, int]) -> None:
        """As master: these broker ids have a lease now, and no others, as far as is known; each with the run id of the
        process whose lease it is, 0 if that is not told."""

    def confirm_set(self, sync_state_set: frozenset[int]) -> None:
        """As master: the group's record says this now."""

    def hold_puts(self) -> None:
        """As master: admit nothing more for a moment; what arrives waits."""

    async def wait_held_by(self, broker_id: int) -> None:
        """As master that holds puts: wait until that member has acknowledged all of the log, and no put waits."""

    def release_puts(self) -> None:
        """Admit again, what waits first."""

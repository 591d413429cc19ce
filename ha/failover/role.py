"""The interface of a node through which an election changes the node's role between master and slave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from ha.failover.agreement import MasterRecord
from ha.failover.lease import MasterLease


class LogPosition(msgspec.Struct, frozen=True, order=True):
    """Last epoch and end of a member's log, compared in this order: of two logs, the greater is more up to date."""

    epoch: int
    """Last term in its epoch history; 0 if there is none."""
    max_offset: int
    """Physical offset of its log's end (bytes)."""


class Term(msgspec.Struct, frozen=True):
    """A term as master, for which `Role.become_master` is called."""

    epoch: int
    sync_state_set: frozenset[int]
    """Broker ids of the sync-state set at the start of the term; `Role.confirm_set` receives later sets."""
    lease: MasterLease
    """The right to act as master: checked before each message is stored, and again before it is acknowledged."""


class Role(Protocol):
    """A node that can be master or slave. The only errors are the store's, which propagate and end the process, except
    DiskFull and DamagedBytes from `become_master`.

    One task calls `become_master` and `become_slave`. If such a call is cancelled, `become_slave` follows, unless the
    member ends.
    """

    @property
    def position(self) -> LogPosition:
        """The last epoch and the end of this node's log."""

    async def become_master(self, term: Term) -> None:
        """Becomes master of `term`; returns when messages are accepted. If that is not possible now, raises DiskFull
        (the disk is full, or no file can be opened) or DamagedBytes (the end of the log can't be read); `become_slave`
        follows.

        The term's epoch is durable in the log's history before the first byte of the term is written.
        """

    async def become_slave(self, epoch: int, master: MasterRecord | None) -> None:
        """Follows `master`, or nobody; accepts and acknowledges nothing of an epoch below `epoch` from now on.

        Naming the same master again changes nothing. With None the log has stopped growing when this returns, so its
        position can be published. A master that becomes a slave has answered all waiting requests when this returns.
        """

    async def wait_caught_up(self) -> None:
        """Waits until the log has every acknowledged byte, whatever was lost before the node started.

        This holds once this process has copied the whole log that a master had when this node connected to the master
        (and has flushed the copy, if the node flushes before it acknowledges), or has become master itself. Later calls
        return at once.
        """

    async def wait_wanted_set(self) -> frozenset[int]:
        """As master: waits until replication wants a sync-state set other than the confirmed one, and returns it.

        When this returns, messages already need the acknowledgements of both sets. They do so until `confirm_set`, and
        the wanted set does not change until then.
        """

    def set_live_members(self, members: Mapping[int, int]) -> None:
        """As master: sets which members are known to have a lease, in place of those set before. `members`: run id (0
        if unknown) by broker id."""

    def confirm_set(self, sync_state_set: frozenset[int]) -> None:
        """As master: requires only the acknowledgements of this set from now on. The group's record contains it now."""

    def hold_puts(self) -> None:
        """As master: accepts no messages until `release_puts` or the end of the term."""

    async def wait_replicated_to(self, broker_id: int) -> None:
        """As master, with puts on hold: waits until member `broker_id` has the whole log, and all puts are answered."""

    def release_puts(self) -> None:
        """As master: accepts messages again after `hold_puts`."""

"""What a member is told; made by ha/node from the configuration. Seconds of the trio clock."""

from __future__ import annotations

import msgspec

from ha.failover.lease import DRIFT


class MemberOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One member of a group."""

    broker_id: int
    """From 1 on, its own for good."""
    ha_address: str
    """host:port for slaves."""
    broker_address: str
    """host:port for clients."""
    run_id: int = 0
    """Tells this run of the process from others with the same broker id; 0: not told."""
    priority: int = 0
    """brokerElectionPriority: among equally good candidates the lower goes first."""
    ack_count: int | None = None
    """How many of the sync-state set acknowledge each message, the master included; None: all of them."""
    elects_unclean: bool = False
    """enableElectUncleanMaster: rather a master that lacks acknowledged messages than none."""

    lease_ttl_s: float = 3.0
    """leaseTtl: a master that is gone is missed after so long; one that can't renew stops a little earlier."""
    drift: float = DRIFT
    call_timeout_s: float = 1.0
    """For one call of the agreement, at most; renewals take at most a third of the lease."""
    rank_delay_s: float = 0.2
    """By so much each candidate lets a better one go first."""
    appointed_delay_s: float = 1.0
    """So long the others wait for the member that was handed the office."""
    unclean_delay_s: float = 10.0
    """So long nobody of the sync-state set must have been there before an unclean election."""
    switch_timeout_s: float = 2.0
    """How long puts are held at most until the next master has everything."""
    retry_s: float = 0.2
    """Between two tries at an agreement that can't be reached."""

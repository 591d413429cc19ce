"""Settings of a member, made by ha/node from the configuration. Times in seconds of the Trio clock."""

from __future__ import annotations

import msgspec

from ha.failover.lease import DRIFT


class MemberOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One member of a group."""

    broker_id: int
    """1 or higher, fixed for the member's life."""
    ha_address: str
    """host:port for slaves."""
    broker_address: str
    """host:port for clients."""
    run_id: int = 0
    """Identifies this process among those with the same broker id; 0: unknown."""
    priority: int = 0
    """brokerElectionPriority: of candidates with equal logs the lowest is elected."""
    ack_count: int | None = None
    """Number of members of the sync-state set that acknowledge each message, the master included; None: all of them."""
    is_learner: bool = False
    """asyncLearner: whether it only copies the log, and never stands for election."""
    elects_unclean: bool = False
    """enableElectUncleanMaster: whether a master that lacks acknowledged messages is preferred to no master."""

    lease_ttl_s: float = 3.0
    """leaseTtl: time after which a lost master is noticed. One that can't renew its lease stops a little earlier."""
    drift: float = DRIFT
    call_timeout_s: float = 1.0
    """Timeout of one call of the agreement; that of a renewal is at most a third of the lease."""
    rank_delay_s: float = 0.2
    """A candidate's delay for each better candidate, plus once if a member that may be elected does not stand yet."""
    appointed_delay_s: float = 1.0
    """Delay of the other candidates while the member that the record names (the last master, or the one that it handed
    over to) has a lease but does not stand yet."""
    unclean_delay_s: float = 10.0
    """Delay of an unclean candidate, so that a member with all acknowledged messages can be elected before it."""
    switch_timeout_s: float = 2.0
    """Maximum time that puts are on hold until the next master has the whole log."""
    retry_s: float = 0.2
    """Pause before the next call to an agreement that can't be reached."""

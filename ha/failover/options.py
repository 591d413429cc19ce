"""Settings of a member, made by ha/node from the configuration. Times in seconds of the Trio clock."""

from __future__ import annotations

import msgspec

from ha.failover.lease import DRIFT


class MemberOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one member of a failover group."""

    broker_id: int
    """This member's broker id: 1 or higher, and never changed."""
    ha_address: str
    """Address (host:port) to which slaves connect for replication."""
    broker_address: str
    """Address (host:port) to which clients connect."""
    run_id: int = 0
    """Distinguishes this process from others with the same broker id; 0: unknown."""
    priority: int = 0
    """Priority in elections (brokerElectionPriority): of candidates with equal logs, the one with the lowest value is
    elected."""
    ack_count: int | None = None
    """Number of members of the sync-state set that acknowledge each message, the master included; None: all of them."""
    is_learner: bool = False
    """Whether the member only copies the log and never stands for election (asyncLearner)."""
    elects_unclean: bool = False
    """Whether a master that lacks acknowledged messages is preferred to no master (enableElectUncleanMaster)."""

    lease_ttl_s: float = 3.0
    """Requested time of the lease (leaseTtl): the group notices after this time that its master has failed. A master
    that can't renew its lease gives up its role a little earlier."""
    drift: float = DRIFT
    """Share (0 to 1) of a measured time by which the clocks of the member and of the service may disagree."""
    call_timeout_s: float = 1.0
    """Timeout of one call to the agreement service; a renewal's timeout is at most a third of the lease's time."""
    rank_delay_s: float = 0.2
    """Delay of a candidate for each candidate ranked before it. It is added once more if a member that may be elected
    does not stand for election yet."""
    appointed_delay_s: float = 1.0
    """Delay of the other candidates while the member that the group's record names (the last master, or the member that
    it handed over to) has a lease but does not stand for election yet."""
    unclean_delay_s: float = 10.0
    """Delay of an unclean candidate, so that a member with all acknowledged messages can be elected before it."""
    switch_timeout_s: float = 2.0
    """Maximum time for which puts are on hold in a switchover while the next master copies the rest of the log."""
    retry_s: float = 0.2
    """Pause before the next call after the agreement service could not be reached."""

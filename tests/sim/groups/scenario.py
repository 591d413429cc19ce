"""What one run of a failover group is, drawn from a seed; and what is promised while its faults happen.

Nobody's role is fixed. Each node is a member as `ha.member` starts it; who is master is decided by elections over a
simulated agreement service (tests/sim/agreement.py), which is slow, cut off, late with watches and with ending leases,
and away, but linearizable. What a group promises, and what this package holds it to:

1. Who acknowledges is the master: between a client's asking and its being answered PUT_OK, or that its offset is
   committed, there is a moment at which the service holds the key of whoever answered. Each message stands in the log
   within the term of the member that acknowledged it.
   Of two processes with one broker id the second plays no role while the service holds the first one's key.
2. What is acknowledged is on the members that count: as long as the service says who is in the sync-state set, each of
   them (with ack_count n: n of them) has every message that was ever acknowledged. So nothing acknowledged is lost as
   long as one member of the set has its disk, of ack_count n: n - 1 may be lost. Which kills, pauses, cuts and failed
   disks there were, in which order, doesn't matter; nor do power losses where members flush before they acknowledge.
   Where they don't (ASYNC_FLUSH), a member that loses power counts as lost until it has everything again, and no
   longer: a message is lost only if, after a power loss, no member of the set has it on its disk any more. As long as
   one has it, it is kept, whichever of the others lost power, returned, and stood for master, in whichever order.
   Where the master alone acknowledges, what the next master lacks is lost; it is counted, and not held against it.
3. What a consumer was given, by any member, stays in the log, whoever acknowledges: it was confirmed by the whole set.
   What two members show consumers is the same, for good. Except what is lost as in 2.
4. Queue offsets are dense, and none is ever told of two messages. Committed offsets of consumers that were answered are
   never behind afterwards, and never beyond the log of who tells them. Except what is lost as in 2.
5. No process dies of its own bugs, none leaves a task behind, logs have nothing stale behind their ends.
6. When faults have stopped, all members are in the set and have the same log within CONVERGENCE_S, every put is PUT_OK,
   and a new consumer gets all of it. Nobody helps but by starting processes that have ended. And
   after a loss as in 2, a member outside the set may have kept what the set lost: the operator empties its store.
7. Of a service that was restored from an older state nobody is elected, as long as a member that knows a newer record
   of the group is there. Once the operator has put that back, all of this holds as if nothing had been restored.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from tests.sim.scenario import WEIGHTS, Fault, GroupOptions, GroupPlan

MASTER_NOW = "master"
"""As a fault's node: whoever is master when it happens"""
SLAVE_NOW = "slave"
"""Somebody who is not"""

OF_MEMBERS = (
    "kill", "kill_in_write", "stop", "pause", "clock", "partition", "one_way", "isolate", "clog", "lossy", "reset",
    "cut_frame", "half_open", "disk_full", "disk_slow", "write_error", "create_error", "sync_error",
    "restart_name_server",
)  # fmt: skip
OF_POWER = ("power", "power_in_write")
OF_SERVICE = {
    "service_cut": 8, "service_down": 3, "service_slow": 5, "service_lossy": 5, "service_leader": 1,
    "service_compact": 1, "cut_off": 8, "apart": 10, "switch": 8, "duplicate_id": 5,
}  # fmt: skip
"""Kinds and weights; `tests.sim.groups.faults` says what each does"""
ALL_WEIGHTS = {**WEIGHTS, **OF_SERVICE, "kill": 8, "pause": 8}
RESTORED_SHARE = 0.2
"""Of the runs, in which the service is restored from an older state"""
BLACKOUT_SHARE = 0.2
"""Of the runs, in which several members lose power at once"""
NEAR_SHARE = 0.4
"""Of the faults, that happen soon after another one"""


def members_of(options: GroupOptions) -> list[str]:
    """Names of the machines of a group."""
    return [f"m{number}" for number in range(1, options.member_count + 1)]


def draw_options(chance: random.Random) -> GroupOptions:
    """Draw a group."""
    member_count = chance.choice((2, 3, 3, 3))
    policy: Any = chance.choice(("all", "all", "all", "count", "count", "alone"))
    flush: Any = chance.choice(("SYNC_FLUSH", "SYNC_FLUSH", "ASYNC_FLUSH"))
    heartbeat_ms = chance.choice((500, 1000, 2000))
    return GroupOptions(
        member_count=member_count,
        policy=policy,
        ack_count=chance.randint(2, member_count),
        min_in_sync_replicas=chance.choice((0, 0, 2)),
        flush=flush,
        lease_ttl_ms=chance.choice((2000, 2000, 3000)),
        not_catch_up_ms=chance.choice((1_000, 3_000, 15_000)),
        service_delay_s=chance.choice((0.002, 0.02, 0.15)),
        lease_late_s=chance.choice((0.0, 0.5, 2.0)),
        clock_speed=chance.choice((1.0, 0.92, 1.08)),
        segment_size=chance.choice((8_192, 16_384, 65_536)),
        queue_entries=chance.choice((10, 50, 200)),
        index_entries=chance.choice((40, 300)),
        transfer_batch_bytes=chance.choice((1000, 32_768, 1 << 20)),
        heartbeat_ms=heartbeat_ms,
        housekeeping_ms=heartbeat_ms * chance.choice((3, 5)),
        slave_timeout_ms=chance.choice((500, 3000)),
        sync_flush_timeout_ms=chance.choice((500, 5000)),
        producer_count=chance.randint(1, 2),
        burst_max=chance.choice((1, 3, 8)),
        pause_s=chance.choice((0.2, 0.5, 1.0)),
        body_size_max=chance.choice((60, 600, 2000)),
        queue_count=chance.randint(1, 3),
        consumer_count=chance.choice((1, 1, 2)),
        run_s=float(chance.choice((6, 9, 14))),
        base_s=chance.choice((0.0001, 0.001, 0.01)),
        jitter_s=chance.choice((0.0, 0.002, 0.02)),
        window=chance.choice((4_000, 16_384, 65_536)),
        split_chance=chance.choice((0.0, 0.2, 0.6)),
        fault_count=chance.choice((0, 4, 8, 12, 16)),
    )


def draw_faults(chance: random.Random, options: GroupOptions) -> tuple[Fault, ...]:
    """Draw what goes wrong, in order of time. Half of it happens to whoever is master then."""
    members = members_of(options)
    possible = [*OF_MEMBERS, *OF_SERVICE, *OF_POWER]
    kinds = chance.sample(possible, k=chance.randint(3, len(possible)))
    if options.kinds:
        kinds = options.kinds.split("+")
    faults: list[Fault] = []
    for _ in range(options.fault_count):
        at_s = chance.uniform(1.0, options.run_s)
        if faults and chance.random() < NEAR_SHARE:
            at_s = faults[-1].at_s + chance.choice((0.01, 0.1, 0.5, 2.0)) * chance.random()
        node = chance.choice([MASTER_NOW] * len(members) + members)
        faults.append(
            Fault(
                at_s=round(at_s, 3),
                kind=chance.choices(kinds, [ALL_WEIGHTS[kind] for kind in kinds])[0],
                node=node,
                other=chance.choice([*members, "p1"]),
                duration_s=round(chance.choice((0.05, 0.5, 2.0, 6.0)) * chance.uniform(0.2, 2), 3),
                number=chance.randrange(1 << 30),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def draw_restore(chance: random.Random, options: GroupOptions) -> tuple[Fault, ...]:
    """Draw in some runs that the service is restored, shortly after the set has changed.

    Drawn by itself, so that what a seed means changes little.
    """
    if chance.random() >= RESTORED_SHARE:
        return ()
    at_s = round(chance.uniform(3.0, options.run_s), 3)
    gone = Fault(at_s=at_s - 2.0, kind="kill", node=SLAVE_NOW, other="p1", duration_s=chance.choice((1.0, 3.0)))
    number = chance.randrange(1 << 30)
    return gone, Fault(at_s=at_s, kind="service_restored", node=MASTER_NOW, other="p1", number=number)


def draw_blackout(chance: random.Random, options: GroupOptions) -> tuple[Fault, ...]:
    """Draw in some runs that several members lose power at once. Drawn by itself, too."""
    if chance.random() >= BLACKOUT_SHARE:
        return ()
    at_s, number = round(chance.uniform(2.0, options.run_s), 3), chance.randrange(1 << 30)
    duration_s = chance.choice((0.05, 0.5, 2.0))
    return (Fault(at_s=at_s, kind="blackout", node="m1", other="p1", duration_s=duration_s, number=number),)


def draw_group_plan(seed: int, overrides: dict[str, Any] | None = None) -> GroupPlan:
    """Draw everything from `seed`; `overrides` are options that are not drawn. msgspec.ValidationError for others."""
    options = draw_options(random.Random(f"{seed}/group options"))
    if overrides:
        options = msgspec.convert({**msgspec.structs.asdict(options), **overrides}, GroupOptions, strict=False)
    faults = draw_faults(random.Random(f"{seed}/group faults"), options)
    if options.fault_count and not options.kinds:
        faults += draw_blackout(random.Random(f"{seed}/group blackout"), options)
        faults += draw_restore(random.Random(f"{seed}/group restore"), options)
    return GroupPlan(seed=seed, options=options, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))

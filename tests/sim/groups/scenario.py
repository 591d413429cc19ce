"""The options and faults of one run of a failover group, drawn from a seed, and the promises that hold meanwhile.

No role is fixed. Each node is a member as started by `ha.member`; masters are elected through a simulated agreement
service (tests/sim/agreement.py), which may be slow, unreachable, down, and late with watch events and lease ends, but
is linearizable. A group promises, and this package checks:

1. Only the master acknowledges: between a client's request and a PUT_OK, or the acknowledgement of a commit, there is a
  moment at which the service holds the answering member's key. Each message is in the log within the term of the member
  that acknowledged it. Of two processes with one broker id the second has no role while the service holds the first
  one's key.
2. Acknowledged messages are on the members that count: as long as the service has a sync-state set, each of its members
  (with ack_count n: n of them) has every message acknowledged so far. So nothing acknowledged is lost as long as one
  member of the set has its disk; with ack_count n, n - 1 may be lost. This holds for any kills, pauses, cuts and failed
  disks in any order, and for power losses if members flush before they acknowledge. Otherwise (ASYNC_FLUSH) a member
  that loses power counts as lost until it has everything again: a message is lost only if, after a power loss, no
  member of the set has it on its disk. As long as one has it, it is kept, whichever of the others lost power, returned,
  and stood for election, in any order. If the master alone acknowledges, messages that the next master lacks are lost;
  they are counted, and no violation.
3. A message delivered to a consumer by any member stays in the log, under every policy, because the whole set has
  confirmed it. All members show consumers the same messages. Exception: losses as in 2.
4. Queue offsets are dense and unique. Acknowledged commits of consumers never move back, and never point beyond the log
  of the answering member. Exception: losses as in 2.
5. No process dies of its own bugs, none leaves a task behind, and no log has stale bytes behind its end.
6. After the faults, all members are in the set and have the same log within CONVERGENCE_S, every put is PUT_OK, and a
  new consumer receives everything. The operator only restarts processes that ended, and, after power losses in which
  the whole set lost part of the log, empties the store of a member outside the set that kept what the set lost.
7. No member is elected from a restored older state of the service while a member that knows a newer record of the group
  is present. Once the operator has restored that record, all promises hold as if nothing had happened.
"""

import random
from typing import Any

import msgspec

from tests.sim.scenario import WEIGHTS, Fault, GroupOptions, GroupPlan, draw_pops, draw_read_errors, draw_timers

WITH_LEASES = "leases"
"""`other` of a fault `service_restored`: the older state has its leases, too"""
MASTER_NOW = "master"
"""As a fault's node: the current master"""
SLAVE_NOW = "slave"
"""As a fault's node: a member that is not the master"""

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
"""Kinds and weights; see `tests.sim.groups.faults`"""
ALL_WEIGHTS = {**WEIGHTS, **OF_SERVICE, "kill": 8, "pause": 8}
RESTORED_SHARE = 0.2
"""Share of runs in which the service is restored from an older state"""
BLACKOUT_SHARE = 0.2
"""Share of runs in which several members lose power at once"""
NEAR_SHARE = 0.4
"""Share of faults that happen soon after another one"""


def members_of(options: GroupOptions) -> list[str]:
    """Names of the machines of a group."""
    return [f"m{number}" for number in range(1, options.member_count + 1)]


def draw_options(chance: random.Random) -> GroupOptions:
    """Draws a group."""
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
    """Draws the faults, in order of time. Half of them affect the current master."""
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
        at_s = min(at_s, options.run_s)  # nothing would undo it afterwards
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
    """Draws for some runs that the service is restored shortly after the set has changed.

    Drawn separately, to change the meaning of seeds as little as possible.
    """
    if chance.random() >= RESTORED_SHARE:
        return ()
    at_s = round(chance.uniform(3.0, options.run_s), 3)
    gone = Fault(at_s=at_s - 2.0, kind="kill", node=SLAVE_NOW, other="p1", duration_s=chance.choice((1.0, 3.0)))
    number = chance.randrange(1 << 30)
    other = chance.choice(("p1", WITH_LEASES))
    return gone, Fault(at_s=at_s, kind="service_restored", node=MASTER_NOW, other=other, number=number)


def draw_blackout(chance: random.Random, options: GroupOptions) -> tuple[Fault, ...]:
    """Draws for some runs that several members lose power at once. Drawn separately, too."""
    if chance.random() >= BLACKOUT_SHARE:
        return ()
    at_s, number = round(chance.uniform(2.0, options.run_s), 3), chance.randrange(1 << 30)
    duration_s = chance.choice((0.05, 0.5, 2.0))
    return (Fault(at_s=at_s, kind="blackout", node="m1", other="p1", duration_s=duration_s, number=number),)


def draw_group_plan(seed: int, overrides: dict[str, Any] | None = None) -> GroupPlan:
    """Draws everything from `seed`; `overrides` are options that are not drawn. msgspec.ValidationError for others."""
    options = draw_options(random.Random(f"{seed}/group options"))
    options = msgspec.structs.replace(options, timer_pause_s=draw_timers(seed), pop_pause_s=draw_pops(seed))
    if overrides:
        options = msgspec.convert({**msgspec.structs.asdict(options), **overrides}, GroupOptions, strict=False)
    faults = draw_faults(random.Random(f"{seed}/group faults"), options)
    if options.fault_count and not options.kinds:
        faults += draw_blackout(random.Random(f"{seed}/group blackout"), options)
        faults += draw_restore(random.Random(f"{seed}/group restore"), options)
    faults += draw_read_errors(seed, [MASTER_NOW, *members_of(options)], options)
    return GroupPlan(seed=seed, options=options, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))

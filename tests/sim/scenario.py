"""The options and faults of one run, drawn from a seed, and the promises that hold while the faults happen.

Roles are fixed: one master, its slaves, no elections. The cluster promises, and this package checks:

1. PUT_OK means, when it is sent: the bytes are in the master's log; with SYNC_FLUSH on the master they are on its disk;
  of a SYNC_MASTER as many slaves as the policy requires have reported them (any one; inSyncReplicas - 1; all in sync).
  No slave reports bytes that it has not written, nor, with SYNC_FLUSH, that are not on its disk. A slave without
  SYNC_FLUSH acknowledges bytes in its page cache: that is RocketMQ's meaning; it survives a kill, but not a power loss.
2. A message answered with PUT_OK is lost only if every node that had it at that time has lost it in a way that the
  fault model allows: by a power loss before it was on that node's disk; because its bytes were damaged there, or
  earlier bytes so soon after they were written that the damage can't be told from a torn tail; or because the operator
  emptied that store. ASYNC_FLUSH with a simultaneous power loss of all nodes that had it may lose it. No kill, pause,
  failed sync, full disk, partition or clock, in any order, may.
3. Statuses that mean "stored, but" promise that the message was in the master's log, and nothing about crashes.
4. Always: the logs agree where they overlap, queue offsets are dense and equal to the reported ones, queues and index
  follow from the log, no process crashes because of a bug.
5. After the faults and the operator's actions, every node holds the same within CONVERGENCE_S, and every consumer has
  received everything.

The operator's actions, since no other component decides whose log is right (`Cluster`):
- A process that ended on its own is restarted. A failed disk gets another try.
- A master that lost power may come back with a shorter log than its slaves. `restore`: before its start its log is
  replaced by the longest of any node, and the slaves are restarted; nothing is lost that any node kept, except behind
  damage of that node, which is emptied then. `plain`: it is started as it is, and a slave whose log is longer is
  emptied; nothing of that was ever acknowledged if the master flushes synchronously, otherwise it counts as lost by the
  operator.
- If damage took the end of the master's log, a longer log of a slave replaces it, whatever the choice above.
- A slave that refuses its damaged store is emptied; a master gets the longest valid log there is.
- A master with damage that no slave could repair gets the slave's bytes, as far as there are any; otherwise its log is
  cut off there. Intact messages behind the damage are dropped and counted (`Outcome.given_up_count`).
"""

import random
from typing import Any, Literal

import msgspec

CONVERGENCE_S = 240.0
"""The operator may look twice, 45 s apart, and a restarted node scrubs its files a minute later"""
MASTER = "m"
NAME_SERVER = "ns"
INDEX_SLOT_COUNT = 32

KINDS = (
    "kill", "power", "kill_in_write", "power_in_write", "stop", "pause", "clock",
    "partition", "one_way", "isolate", "clog", "lossy", "reset", "cut_frame", "half_open",
    "disk_full", "disk_slow", "write_error", "create_error", "sync_error", "restart_name_server",
)  # fmt: skip
"""Every kind of fault; `tests.sim.faults` says what each does."""

WEIGHTS = {
    "kill": 4, "power": 4, "kill_in_write": 3, "power_in_write": 3, "stop": 2, "pause": 4, "clock": 2,
    "partition": 4, "one_way": 3, "isolate": 2, "clog": 2, "lossy": 2, "reset": 4, "cut_frame": 4, "half_open": 2,
    "disk_full": 2, "disk_slow": 3, "write_error": 1, "create_error": 1, "sync_error": 2, "restart_name_server": 1,
    "read_error": 2,
    "flip_bit": 1, "zero_range": 1, "truncate_file": 1,
}  # fmt: skip


DAMAGE = ("flip_bit", "zero_range", "truncate_file")
"""To files of one node only, in some runs"""
DAMAGED_SHARE = 0.2
TIMERS_SHARE = 0.5
"""Share of runs with timer messages"""
READ_ERRORS_SHARE = 0.2
"""Share of runs with reads that fail"""
POPS_SHARE = 0.25
"""Share of runs with POP consumers"""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of every run: files, load, network. Units as in the names."""

    segment_size: int = 32_768
    queue_entries: int = 50
    index_entries: int = 300
    transfer_batch_bytes: int = 1 << 20
    heartbeat_ms: int = 1000
    housekeeping_ms: int = 5000
    slave_timeout_ms: int = 3000
    sync_flush_timeout_ms: int = 5000

    producer_count: int = 2
    burst_max: int = 8
    """Maximum number of messages in flight of one producer"""
    pause_s: float = 0.2
    """Mean time between two bursts"""
    body_size_max: int = 1000
    queue_count: int = 3
    consumer_count: int = 1
    run_s: float = 25.0

    base_s: float = 0.0005
    jitter_s: float = 0.002
    window: int = 65_536
    split_chance: float = 0.2

    fault_count: int = 8
    timer_pause_s: float = 0.0
    """Mean time between two timer messages; 0: none are sent"""
    pop_pause_s: float = 0.0
    """Mean time between two pops of one of two consumers; 0: nothing is popped. Not drawn"""
    kinds: str = ""
    """Kinds of faults that may be drawn, joined with "+"; empty: a choice of all"""


class Options(RunOptions, frozen=True, kw_only=True, omit_defaults=True):
    """A master and its slaves, with fixed roles."""

    role: Literal["SYNC_MASTER", "ASYNC_MASTER"] = "SYNC_MASTER"
    slave_count: int = 2
    master_flush: Literal["SYNC_FLUSH", "ASYNC_FLUSH"] = "ASYNC_FLUSH"
    slave_flush: Literal["SYNC_FLUSH", "ASYNC_FLUSH"] = "ASYNC_FLUSH"
    flush_interval_ms: int = 500
    in_sync_replicas: int = 0
    """inSyncReplicas; 0: unset, the rule of 4.9"""
    min_in_sync_replicas: int = 0
    all_in_sync: bool = False
    """allAckInSyncStateSet"""
    separate_name_server: bool = False
    learn_master: bool = False
    """Slaves learn the master's address from the name server"""
    start_from: Literal["first", "last"] = "first"
    after_power_loss: Literal["restore", "plain"] = "restore"
    overlap_bytes: int = 65_536


class GroupOptions(RunOptions, frozen=True, kw_only=True, omit_defaults=True):
    """A failover group and its agreement service."""

    member_count: int = 3
    policy: Literal["all", "count", "alone"] = "all"
    """Which members acknowledge a message: the whole sync-state set; ack_count of it; the master alone"""
    ack_count: int = 2
    min_in_sync_replicas: int = 0
    flush: Literal["SYNC_FLUSH", "ASYNC_FLUSH"] = "ASYNC_FLUSH"
    lease_ttl_ms: int = 2000
    not_catch_up_ms: int = 15_000
    """haMaxTimeSlaveNotCatchup"""
    service_delay_s: float = 0.002
    """Maximum delay of a request to the service, its answer, or a watch event, without faults"""
    lease_late_s: float = 0.5
    """Maximum delay with which the service ends a lease"""
    clock_speed: float = 1.0
    """Speed of the service's clock, relative to the members'"""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault at `at_s`, for `duration_s` (or until the node is restarted)."""

    at_s: float
    kind: str
    node: str = ""
    other: str = ""
    duration_s: float = 0.0
    number: int = 0
    """Selects details: which connection, how many bytes, how many operations"""
    folder: str = ""
    """Of the file that is damaged; never drawn"""


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag_field="roles", tag="fixed"):
    """Determines a run completely. As JSON it can be passed to the command."""

    seed: int
    options: Options
    faults: tuple[Fault, ...]


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True, tag_field="roles", tag="elected"):
    """Determines a run of a failover group completely."""

    seed: int
    options: GroupOptions
    faults: tuple[Fault, ...]


AnyPlan = Plan | GroupPlan

LOST_SEGMENTS: dict[str, Any] = {
    "role": "SYNC_MASTER", "master_flush": "ASYNC_FLUSH", "after_power_loss": "plain", "in_sync_replicas": 0,
    "min_in_sync_replicas": 0, "all_in_sync": False, "segment_size": 8192, "burst_max": 12, "body_size_max": 2500,
    "pause_s": 0.2, "run_s": 15.0, "flush_interval_ms": 5_000,
}  # fmt: skip
"""Enough load for a master to lose whole segments in a power loss, which its slaves have"""


def draw_options(chance: random.Random) -> Options:
    """Draws a cluster."""
    slave_count = chance.choice((1, 1, 2, 2, 2, 3))
    role: Any = chance.choice(("SYNC_MASTER", "SYNC_MASTER", "SYNC_MASTER", "ASYNC_MASTER"))
    master_flush: Any = chance.choice(("SYNC_FLUSH", "ASYNC_FLUSH"))
    policy = chance.choice(("4.9", "4.9", "5.x", "all"))
    wanted = chance.randint(2, slave_count + 1) if policy == "5.x" else 0
    least = chance.randint(0, wanted) if policy == "5.x" else chance.choice((0, 1)) if policy == "all" else 0
    start_from: Any = chance.choice(("first", "first", "last"))
    after: Any = chance.choice(("restore", "plain")) if master_flush == "SYNC_FLUSH" else "restore"
    slave_flush: Any = chance.choice(("SYNC_FLUSH", "ASYNC_FLUSH"))
    heartbeat_ms = chance.choice((500, 1000, 2000))
    options = Options(
        role=role,
        slave_count=slave_count,
        master_flush=master_flush,
        slave_flush=slave_flush,
        in_sync_replicas=wanted,
        min_in_sync_replicas=least,
        all_in_sync=policy == "all",
        separate_name_server=chance.random() < 0.3,
        learn_master=chance.random() < 0.4,
        start_from=start_from,
        after_power_loss=after,
        segment_size=chance.choice((8_192, 16_384, 32_768, 65_536)),
        queue_entries=chance.choice((10, 50, 200)),
        index_entries=chance.choice((40, 300)),
        transfer_batch_bytes=chance.choice((1000, 32_768, 1 << 20)),
        heartbeat_ms=heartbeat_ms,
        housekeeping_ms=heartbeat_ms * chance.choice((3, 5)),
        slave_timeout_ms=chance.choice((500, 3000)),
        sync_flush_timeout_ms=chance.choice((500, 5000)),
        producer_count=chance.randint(1, 3),
        burst_max=chance.choice((1, 3, 8)),
        pause_s=chance.choice((0.2, 0.5, 1.0)),
        body_size_max=chance.choice((60, 600, 2500)),
        queue_count=chance.randint(1, 4),
        consumer_count=chance.choice((0, 1, 1, 2)),
        run_s=float(chance.choice((10, 20, 30))),
        base_s=chance.choice((0.0001, 0.001, 0.01)),
        jitter_s=chance.choice((0.0, 0.002, 0.02)),
        window=chance.choice((2_000, 16_384, 65_536)),
        split_chance=chance.choice((0.0, 0.2, 0.6)),
        fault_count=chance.choice((0, 3, 6, 10, 16)),
    )
    if (
        chance.random() < 0.3
    ):  # drawn last, like all later additions, to change the meaning of seeds as little as possible
        options = msgspec.structs.replace(options, after_power_loss="plain")
    if chance.random() < 0.08:
        options = msgspec.structs.replace(options, **LOST_SEGMENTS)
    # With the default comparison few of these logs would be longer than the compared range.
    return msgspec.structs.replace(options, overlap_bytes=chance.choice((2_000, 16_384, 65_536)))


def draw_faults(chance: random.Random, options: Options) -> tuple[Fault, ...]:
    """Draws the faults, in order of time."""
    slaves = [f"s{number}" for number in range(1, options.slave_count + 1)]
    nodes = [MASTER, MASTER, *slaves]
    kinds = chance.sample(KINDS, k=chance.randint(3, len(KINDS)))
    if options.kinds:
        kinds = options.kinds.split("+")
    faults = []

    def add(kind: str, node: str) -> None:
        other = chance.choice([each for each in (MASTER, *slaves, "p1") if each != node])
        faults.append(
            Fault(
                at_s=round(chance.uniform(1.0, options.run_s), 3),
                kind=kind,
                node=node,
                other=other,
                duration_s=round(chance.choice((0.05, 0.5, 2.0, 8.0)) * chance.uniform(0.2, 2), 3),
                number=chance.randrange(1 << 30),
            )
        )

    damaged = ""
    for _ in range(options.fault_count):
        kind = chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        node = chance.choice(nodes)
        damaged = damaged or (node if kind in DAMAGE else "")
        add(kind, damaged if kind in DAMAGE else node)
    if options.fault_count and not options.kinds and chance.random() < DAMAGED_SHARE:
        damaged = chance.choice(nodes)
        for _ in range(chance.randint(1, 2)):
            add(chance.choice(DAMAGE), damaged)
    if options.burst_max == LOST_SEGMENTS["burst_max"]:
        at_s = round(chance.uniform(2.0, options.run_s - 5.0), 3)
        faults.append(Fault(at_s=at_s, kind="power", node=MASTER, other="p1", duration_s=0.2))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def draw_timers(seed: int) -> float:
    """Draws `timer_pause_s`. Drawn separately, so that no seed has other faults than before."""
    chance = random.Random(f"{seed}/timers")
    return chance.choice((0.2, 1.0)) if chance.random() < TIMERS_SHARE else 0.0


def draw_pops(seed: int) -> float:
    """Draws `pop_pause_s`, as `draw_timers`."""
    chance = random.Random(f"{seed}/pops")
    return chance.choice((0.1, 0.3)) if chance.random() < POPS_SHARE else 0.0


def draw_read_errors(seed: int, nodes: list[str], options: RunOptions) -> tuple[Fault, ...]:
    """Draws reads of `nodes` that fail, as `draw_timers`."""
    chance = random.Random(f"{seed}/read errors")
    if not options.fault_count or options.kinds or chance.random() >= READ_ERRORS_SHARE:
        return ()
    return tuple(
        Fault(
            at_s=round(chance.uniform(1.0, options.run_s), 3),
            kind="read_error",
            node=chance.choice(nodes),
            other="p1",
            number=chance.randrange(1 << 30),
        )
        for _ in range(chance.randint(1, 5))
    )


def draw_plan(seed: int, overrides: dict[str, Any] | None = None) -> Plan:
    """Draws everything from `seed`; `overrides` are options that are not drawn. msgspec.ValidationError for others."""
    options = draw_options(random.Random(f"{seed}/options"))
    options = msgspec.structs.replace(options, timer_pause_s=draw_timers(seed), pop_pause_s=draw_pops(seed))
    if overrides:
        options = msgspec.convert({**msgspec.structs.asdict(options), **overrides}, Options, strict=False)
    faults = draw_faults(random.Random(f"{seed}/faults"), options)
    faults += draw_read_errors(seed, [MASTER, *(f"s{number}" for number in range(1, options.slave_count + 1))], options)
    return Plan(seed=seed, options=options, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))

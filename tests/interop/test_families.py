"""Each kind of client use: the same Java programs against a real broker and halog's, with the results compared.

All families run at once on the two clusters of a release, which makes them fast; the one that restarts its brokers runs
last. The tests then check the results.
"""

import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import trio

from ha.protocol.codes import SysFlag
from tests.interop.broker import Broker
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import Event, JavaClient, open_java_client
from tests.interop.processes import Children, eventually, open_children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker
from tests.interop.stored_files import Stored, records

MIB = 1024 * 1024
# A dead member is noticed by its connection, and the others are notified. Without that they rebalance every 20 s.
TAKEOVER_S_MAX = 10.0
ORDERED_COUNT = 150
COMPRESSIONS = {
    "ZLIB": SysFlag.COMPRESSION_ZLIB,
    "LZ4": SysFlag.COMPRESSION_LZ4,
    "ZSTD": SysFlag.COMPRESSION_ZSTD,
}
_FAMILY_TIMEOUT_S = 600.0


class Outcome(NamedTuple):
    """The result of a family, or its error."""

    value: Any
    error: str = ""


@dataclass
class Place:
    """The brokers of one make, and what the families need to use them."""

    make: str
    broker: Broker
    ipv6: Broker
    client: JavaClient
    victim: JavaClient
    may_kill: Callable[[], Awaitable[None]]

    async def start(self, name: str, topic: str, **options: Any) -> Any:
        return await self.client.start(name, nameServer=self.broker.name_server, topic=topic, **options)

    async def run(self, name: str, topic: str, **options: Any) -> list[Event]:
        options = {"nameServer": self.broker.name_server, **options}
        return await self.client.run(name, topic=topic, **options)

    async def deliver(self, topic: str, count: int, **options: Any) -> list[Event]:
        """Returns the "sent" events, which must all be SEND_OK."""
        events = only("sent", await self.run("deliver", topic, count=count, **options))
        assert {event["status"] for event in events} <= {"SEND_OK"}, events
        return events

    async def member(self, topic: str, name: str, **options: Any) -> Any:
        return await self.start("member", topic, group=f"g-{topic}", member=name, **options)


def only(name: str, events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["event"] == name]


def pick(events: Iterable[Event], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(event[key] for key in keys) for event in events]


async def wait_got(calls: list[Any], wanted: set[int], within_s: float = 60.0) -> None:
    """Waits until the calls together have received these messages."""

    def missing() -> set[int]:
        return wanted - {event["sequence"] for call in calls for event in only("got", call.events)}

    try:
        await eventually(f"{len(wanted)} messages are got", lambda: not missing(), within_s, 0.05)
    except AssertionError as error:
        error.add_note(f"missing: {sorted(missing())}")
        error.add_note(f"queues: {[only('owns', call.events)[-3:] for call in calls]}")
        raise


async def wait_owns(calls: list[Any], queues: list[str], within_s: float = 60.0) -> None:
    """Waits until each call last reported these queues."""

    def is_so() -> bool:
        said = [only("owns", call.events) for call in calls]
        return [events[-1]["queues"] for events in said if events] == queues

    try:
        await eventually(f"the queues are shared as {queues}", is_so, within_s, 0.05)
    except AssertionError as error:
        error.add_note(str([only("owns", call.events)[-3:] for call in calls]))
        raise


# ---- the families ----------------------------------------------------------------------------------------------------
async def group(place: Place) -> Any:
    """Two members share the queues; one of them dies by SIGKILL."""
    await place.deliver("shared", 1, first=1000)
    first = await place.member("shared", "a")
    await wait_owns([first], ["[0, 1, 2, 3]"])
    second = await place.victim.start(
        "member", nameServer=place.broker.name_server, topic="shared", group="g-shared", member="b"
    )
    await wait_owns([first, second], ["[0, 1]", "[2, 3]"])
    sent = [await place.deliver("shared", 4, first=10 * queue, queue=queue) for queue in range(4)]
    await wait_got([first, second], {event["sequence"] for events in sent for event in events})
    shares = [sorted({event["sequence"] for event in only("got", call.events)} - {1000}) for call in (first, second)]
    await place.may_kill()
    died = trio.current_time()
    await wait_owns([first], ["[0, 1, 2, 3]"])
    takeover_s = trio.current_time() - died
    for queue in range(4):
        await place.deliver("shared", 2, first=100 + 10 * queue, queue=queue)
    later = {100 + 10 * queue + number for queue in range(4) for number in range(2)}
    await wait_got([first], later)
    return shares, takeover_s


async def broadcast(place: Place) -> Any:
    """Each member gets every message, and the broker receives no offsets."""
    await place.deliver("broadcast", 1, first=1000)
    members = [await place.member("broadcast", name, model="BROADCASTING") for name in ("a", "b")]
    await wait_owns(members, ["[0, 1, 2, 3]"] * 2)
    await place.deliver("broadcast", 20)
    for member in members:
        await wait_got([member], set(range(20)))
    await trio.sleep(1.5)  # offsets are sent every second
    counts = [sorted(pick(only("got", member.events), "sequence")) for member in members]
    offsets = await place.client.offsets("broadcast", "g-broadcast", nameServer=place.broker.name_server)
    return counts, sum(event["committed"] > 0 for event in offsets)


async def batch(place: Place) -> Any:
    await place.deliver("batched", 1, first=1000, queue=0)
    member = await place.member("batched", "a")
    [sent] = await place.deliver("batched", 20, kind="batch", size=50)
    await wait_got([member], set(range(20)))
    got = [event for event in only("got", member.events) if event["sequence"] < 1000]
    # The queue of a batch is random.
    start = min(event["queueOffset"] for event in got)
    assert sent["queueOffset"] == start
    places = sorted((event["sequence"], event["queueOffset"] - start) for event in got)
    return (
        (sent["ids"], sent["offsetIds"]),
        places,
        sorted(pick(got, "sequence", "size", "crc", "tags", "keys", "sysFlag")),
    )


async def compression(place: Place) -> Any:
    seen = {}
    for number, kind in enumerate(COMPRESSIONS):
        topic = f"compressed-{kind}"
        await place.deliver(topic, 3, first=number * 10, size=50_000, compression=kind)
        member = await place.member(topic, "a")
        await wait_got([member], {number * 10 + step for step in range(3)})
        stored = [each for each in all_stored(place.broker) if each.topic == topic]
        sizes = sorted({(each.body_size, each.properties.get("UNIQ_KEY") is not None) for each in stored})
        seen[kind] = sizes, sorted(pick(only("got", member.events), "sequence", "size", "crc", "sysFlag"))
    return seen


async def big(place: Place) -> Any:
    """4 MiB are accepted, one byte more is not: a client with the default limit rejects it, and so does the broker."""
    member = None
    seen: list[tuple[str, bool]] = []
    for size, size_max in ((4 * MIB, 4 * MIB), (4 * MIB + 1, 4 * MIB), (4 * MIB + 1, 8 * MIB)):
        [sent] = only("sent", await place.run("deliver", "big", count=1, first=len(seen), size=size, sizeMax=size_max))
        seen.append((sent["status"], "CODE: 13" in sent.get("error", "")))
        member = member or await place.member("big", "a")
    assert member is not None
    await wait_got([member], {0})
    return seen, pick(only("got", member.events), "sequence", "size", "crc")


async def one_way(place: Place) -> Any:
    await place.deliver("one-way", 1, first=1000)
    member = await place.member("one-way", "a")
    await place.deliver("one-way", 50, kind="oneway")
    await wait_got([member], set(range(50)))
    return sorted(pick(only("got", member.events), "sequence", "crc", "tags", "keys"))


async def pull(place: Place) -> Any:
    await place.deliver("pulled", 10, queue=0)
    call = await place.start("pull", "pulled", group="pullers", count=10)
    await call.wait("waiting")
    await trio.sleep(0.5)
    await place.deliver("pulled", 1, first=10, queue=0)
    return {event["question"]: event["value"] for event in only("answer", await call.result())}


async def lite_pull(place: Place) -> Any:
    for queue in range(4):
        await place.deliver("lite", 5, first=queue * 10, queue=queue)
    events = await place.run("lite", "lite", group="lites", count=20)
    again = next(number for number, event in enumerate(events) if event.get("question") == "again")
    subscribed, assigned = events[:again], events[again:]
    [committed] = [event["value"] for event in only("answer", subscribed)]
    keys = ("queueId", "queueOffset", "sequence", "crc")
    return committed, sorted(pick(only("got", subscribed), *keys)), pick(only("got", assigned), *keys)


async def ipv6(place: Place) -> Any:
    """Brokers with IPv6 hosts, and so 16-byte hosts in records and message ids."""
    name_server = place.ipv6.name_server
    sent = only("sent", await place.run("deliver", "six", nameServer=name_server, count=4, queue=0))
    assert {event["status"] for event in sent} == {"SEND_OK"}, sent
    member = await place.client.start("member", nameServer=name_server, topic="six", group="g-six", member="a")
    await wait_got([member], set(range(4)))
    events = await place.run("view", "six", nameServer=name_server, id=sent[2]["offsetMsgId"])
    keys = ("sequence", "queueOffset", "crc", "sysFlag", "bornHost", "storeHost")
    lengths = {len(event["offsetMsgId"]) for event in sent}
    return lengths, sorted(pick(only("got", member.events), *keys)), pick(only("got", events), *keys)


async def order(place: Place) -> Any:
    """The messages that two members get from each queue, in order, while the broker restarts."""
    await place.deliver("ordered", 1, first=100_000, queue=3)
    members = [await place.member("ordered", name, listener="orderly") for name in ("a", "b")]
    await wait_owns(members, ["[0, 1]", "[2, 3]"])
    sends = [
        await place.start(
            "deliver", "ordered", count=ORDERED_COUNT, first=1000 * queue, queue=queue, untilS=240, everyMs=20
        )
        for queue in (0, 2)
    ]
    await wait_got(members, {10, 2010})
    await place.broker.stop()
    await place.broker.start()
    for send in sends:
        statuses = {event["status"] for event in only("sent", await send.result(within_s=300))}
        assert statuses == {"SEND_OK"}, statuses
    wanted = {1000 * queue + number for queue in (0, 2) for number in range(ORDERED_COUNT)}
    # After a restart the members learn of each other with their heartbeats, every 30 s, and a lock may last 60 s.
    await wait_got(members, wanted, 400)
    seen: dict[int, list[tuple[int, int]]] = {0: [], 2: []}
    got = [event for member in members for event in only("got", member.events) if event["queueId"] in seen]
    for event in sorted(got, key=lambda event: int(event["at"])):
        seen[event["queueId"]].append((event["queueOffset"], event["sequence"]))
    return seen


FAMILIES: dict[str, Callable[[Place], Awaitable[Any]]] = {
    family.__name__: family for family in (group, broadcast, batch, compression, big, one_way, pull, lite_pull, ipv6)
}


def all_stored(broker: Broker) -> list[Stored]:
    return list(records(broker.commitlog))


# ---- running them ----------------------------------------------------------------------------------------------------
class Seen:
    """Outcomes by family and make."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, Outcome]] = {}

    async def observe(self, name: str, family: Callable[[Place], Awaitable[Any]], place: Place) -> None:
        try:
            with trio.fail_after(_FAMILY_TIMEOUT_S):
                outcome = Outcome(await family(place))
        except Exception:
            outcome = Outcome(None, traceback.format_exc())
        self.outcomes.setdefault(name, {})[place.make] = outcome

    def both(self, name: str) -> tuple[Any, Any]:
        """The results of the real broker and halog's."""
        for make, outcome in self.outcomes[name].items():
            assert not outcome.error, f"{make}:\n{outcome.error}"
        return self.outcomes[name]["real"].value, self.outcomes[name]["ours"].value


async def run_all(release: Release, children: Children) -> Seen:
    seen = Seen()
    ready = 0
    all_ready = trio.Event()

    async with trio.open_nursery() as nursery:
        name_servers = [await start_halog_name_server(children) for _ in range(4)]
        six = {"brokerIP1": "::1", "brokerIP2": "::1"}
        real = RocketMqBroker(children, release, "real", name_servers[0], "ASYNC_MASTER")
        ours = HalogBroker(children, "ours", name_servers[1], "ASYNC_MASTER")
        real6 = RocketMqBroker(children, release, "real6", name_servers[2], "ASYNC_MASTER", extra=six)
        ours6 = HalogBroker(children, "ours6", name_servers[3], "ASYNC_MASTER", extra={**six, "bindAddress": "::1"})
        async with trio.open_nursery() as starting:
            for broker in (real, ours, real6, ours6):
                starting.start_soon(broker.start)
        lock = "-Drocketmq.client.rebalance.lockInterval=1000"
        async with (
            open_java_client(children, release, "none", lock) as client,
            open_java_client(children, release, "none") as victim,
        ):

            async def may_kill() -> None:
                """When the groups of both makes are shared, kills the process with one member of each."""
                nonlocal ready
                ready += 1
                if ready == 2:
                    assert victim.child is not None
                    await victim.child.kill()
                    all_ready.set()
                await all_ready.wait()

            places = [
                Place("real", real, real6, client, victim, may_kill),
                Place("ours", ours, ours6, client, victim, may_kill),
            ]
            for broker in (real, ours, real6, ours6):
                await client.wait_route("TBW102", nameServer=broker.name_server)
            async with trio.open_nursery() as running:
                for name, family in FAMILIES.items():
                    for place in places:
                        running.start_soon(seen.observe, name, family, place)
            async with trio.open_nursery() as running:
                for place in places:
                    running.start_soon(seen.observe, "order", order, place)
        nursery.cancel_scope.cancel()
    return seen


@pytest.fixture(scope="module")
def seen(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    async def run() -> Seen:
        async with open_children(tmp_path_factory.mktemp("families")) as children:
            return await run_all(release, children)

    return trio.run(run)


# ---- what both have to have done -------------------------------------------------------------------------------------
def test_group_shares_queues_and_takes_over_those_of_a_dead_member(seen: Seen) -> None:
    (real, real_s), (ours, ours_s) = seen.both("group")
    assert ours == real == [[*range(4), *range(10, 14)], [*range(20, 24), *range(30, 34)]]
    assert max(real_s, ours_s) < TAKEOVER_S_MAX


def test_broadcasting_gives_all_to_all(seen: Seen) -> None:
    real, ours = seen.both("broadcast")
    assert ours == real
    counts, committed = ours
    assert all(set(range(20)) <= {sequence for (sequence,) in each} for each in counts)
    assert committed == 0


def test_a_batch_is_stored_as_its_messages(seen: Seen) -> None:
    real, ours = seen.both("batch")
    assert ours == real
    assert ours[0] == (20, 20)
    assert ours[1] == [(number, number) for number in range(20)]


def test_compressed_bodies_of_all_kinds(seen: Seen) -> None:
    real, ours = seen.both("compression")
    assert ours == real
    for kind, flag in COMPRESSIONS.items():
        sizes, got = ours[kind]
        assert max(size for size, _ in sizes) < 5_000
        assert {(size, sys_flag & SysFlag.COMPRESSION_TYPE_MASK) for _, size, _, sys_flag in got} == {(50_000, flag)}


def test_message_size_limit_is_four_mebibytes(seen: Seen) -> None:
    real, ours = seen.both("big")
    assert ours == real
    assert [status for status, _ in ours[0]] == ["SEND_OK", "ERROR", "ERROR"]
    assert [event[:2] for event in ours[1]] == [(0, 4 * MIB)]


def test_one_way_sends_arrive(seen: Seen) -> None:
    real, ours = seen.both("one_way")
    assert ours == real
    assert len(ours) == 51


def test_pull_consumer(seen: Seen, release: Release) -> None:
    real, ours = seen.both("pull")
    if release.is_4:
        assert real.pop("end") == ours.pop("end") - 1  # 5.x reports the end also for times after the last message
    assert ours == real
    assert ours["waited for"].startswith("FOUND 1 ")


def test_lite_pull_consumer(seen: Seen) -> None:
    real, ours = seen.both("lite_pull")
    assert ours == real
    assert ours[0] == "{0=5, 1=5, 2=5, 3=5}"


def test_ipv6_hosts(seen: Seen) -> None:
    real, ours = seen.both("ipv6")
    assert ours == real
    lengths, got, viewed = ours
    assert lengths == {2 * (16 + 4 + 8)}
    assert got[2:3] == viewed
    assert {event[3] & (SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6) for event in got} == {0x30}


def test_order_over_a_restart(seen: Seen) -> None:
    for value in seen.both("order"):
        for queue, found in value.items():
            numbers = []
            reached = -1
            for offset, sequence in found:
                assert offset <= reached + 1, "a message came before the one ahead of it"
                if offset == reached + 1:
                    numbers.append(sequence)
                    reached = offset
            # A send whose answer was lost is repeated, and stored twice.
            assert list(dict.fromkeys(numbers)) == [1000 * queue + number for number in range(ORDERED_COUNT)]

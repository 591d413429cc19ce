"""A broker against its name servers: real ones over memory streams, and ones that are down, silent or hostile."""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from ha.broker.registration import BrokerIdentity, MasterAddresses, NameServerRegistration
from ha.broker.standing import Standing
from ha.protocol.bodies import DataVersion, TopicConfig, TopicConfigTable
from ha.protocol.remoting import RemotingCommand
from ha.remoting import CloseCause, open_remoting_client
from tests.namesrv.brokers import Site, open_site, register, route_of
from tests.remoting.wire import MemoryListener, Peer
from tests.store.disks import run_inline

MASTER = BrokerIdentity(
    cluster_name="C", broker_name="b0", broker_address="10.0.0.1:10911", ha_address="10.0.0.1:10912"
)
SLAVE = BrokerIdentity(cluster_name="C", broker_name="b0", broker_address="10.0.0.2:10911", ha_address="10.0.0.2:10912")


class Net:
    """Name server addresses: sites to reach; the others refuse, unless `hang` says that they never answer."""

    def __init__(self, **listeners: MemoryListener) -> None:
        self.listeners = listeners
        self.hang: set[str] = set()
        self.tried: list[tuple[float, str]] = []

    async def connect(self, address: str) -> trio.abc.Stream:
        self.tried.append((trio.current_time(), address))
        await trio.lowlevel.checkpoint()
        if address in self.hang:
            await trio.sleep_forever()
        if address not in self.listeners:
            raise ConnectionRefusedError(111, "Connection refused")
        return self.listeners[address].connect()


class Topics:
    """A table that grows."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.counter = 1

    def add(self, name: str) -> None:
        self.names.append(name)
        self.counter += 1

    def __call__(self) -> TopicConfigTable:
        configs = {
            name: TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4, perm=6) for name in self.names
        }
        return TopicConfigTable(
            topic_config_table=configs, data_version=DataVersion(counter=self.counter, state_version=0, timestamp=1)
        )


@asynccontextmanager
async def registered(
    net: Net, identity: BrokerIdentity, name_servers: list[str], topics: Topics, standing: Standing | None = None
) -> AsyncIterator[NameServerRegistration]:
    if standing is None:
        standing = Standing("b0", int(identity is SLAVE), is_slave=identity is SLAVE)
    async with open_remoting_client(connect=net.connect) as client:
        registration = NameServerRegistration(identity, name_servers, client, topics, standing, run_blocking=run_inline)
        async with trio.open_nursery() as nursery:
            await nursery.start(registration.serve)
            yield registration
            nursery.cancel_scope.cancel()


async def test_a_broker_is_known_once_it_started_and_forgotten_once_it_stopped() -> None:
    async with open_site() as n1, open_site() as n2:
        net = Net(n1=n1.listener, n2=n2.listener)
        async with registered(net, MASTER, ["n1", "n2"], Topics("T1", "T2")):
            for site in (n1, n2):
                found = await route_of(site.connect(), "T1")
                assert found is not None
                assert found["brokerDatas"][0]["brokerAddrs"] == {"0": "10.0.0.1:10911"}
                assert found["queueDatas"][0]["writeQueueNums"] == 4
        for site in (n1, n2):
            assert await route_of(site.connect(), "T1") is None


async def test_it_registers_every_30_seconds(site: Site, autojump_clock: trio.testing.MockClock) -> None:
    async with registered(Net(n1=site.listener), MASTER, ["n1"], Topics("T1", "T2")) as registration:
        await trio.sleep(29.9)
        assert registration.states["n1"].registered_count == 1
        await trio.sleep(0.2)
        assert registration.states["n1"].registered_count == 2
        await trio.sleep(1000)
        assert await route_of(site.connect(), "T1") is not None
        assert registration.states["n1"].registered_count == 2 + 33


async def test_new_topics_are_registered_at_once_and_together(site: Site) -> None:
    topics = Topics("T1", "T2")
    async with registered(Net(n1=site.listener), MASTER, ["n1"], topics) as registration:
        for n in range(100):
            topics.add(f"new{n}")
            registration.topics_changed()
        await trio.testing.wait_all_tasks_blocked()
        assert await route_of(site.connect(), "new99") is not None
        assert registration.states["n1"].registered_count == 2


async def test_who_changed_a_topic_can_wait_until_it_is_known(
    site: Site, autojump_clock: trio.testing.MockClock
) -> None:
    net, topics = Net(n1=site.listener), Topics("T1", "T2")
    async with registered(net, MASTER, ["n1", "down"], topics) as registration:
        await registration.wait_told()
        topics.add("T3")
        registration.topics_changed()
        await registration.wait_told()
        assert await route_of(site.connect(), "T3") is not None
        assert trio.current_time() < 1, "a name server that is down is not waited for"


async def test_topics_that_change_while_registering_are_not_lost(autojump_clock: trio.testing.MockClock) -> None:
    listener = MemoryListener()
    topics = Topics("T1", "T2")
    async with open_remoting_client(connect=Net(n1=listener).connect) as client:
        registration = NameServerRegistration(
            MASTER, ["n1"], client, topics, Standing("b0", 0, is_slave=False), run_blocking=run_inline
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(registration.serve)
            peer = Peer(await listener.accept())
            first = await peer.receive()
            assert first is not None
            topics.add("T3")
            registration.topics_changed()
            assert b"T3" not in bytes(first.body)
            await peer.send(first.reply(0))
            second = await peer.receive()
            assert second is not None
            assert b"T3" in bytes(second.body)
            assert trio.current_time() == pytest.approx(0)  # not at the next period
            await peer.stream.aclose()
            nursery.cancel_scope.cancel()


async def test_a_name_server_that_is_down_delays_no_other(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with open_site() as site:
        net = Net(n1=site.listener)
        net.hang.add("n3")
        async with registered(net, MASTER, ["n2", "n3", "n1"], Topics("T1", "T2")) as registration:
            assert trio.current_time() == pytest.approx(3)  # n3's connect timeout; n1 was registered at 0
            assert registration.states["n1"].last_registered_at == pytest.approx(0)
            await trio.sleep(20)
            assert registration.states["n1"].registered_count == 1
            assert registration.states["n2"].error == "[Errno 111] Connection refused"
            assert "not reached" in registration.states["n3"].error
            assert [at for at, address in net.tried if address == "n2"] == pytest.approx([0, 5, 10, 15, 20])
            async with open_site() as late:
                net.listeners["n2"] = late.listener
                await trio.sleep(5)
                assert await route_of(late.connect(), "T1") is not None
            messages = [r.getMessage() for r in caplog.records if "registration." in r.getMessage()]
            assert [m for m in messages if "n2" in m] == [
                "registration.failed namesrv=n2 reason='[Errno 111] Connection refused'",
                "registration.succeeded namesrv=n2 broker=b0",
            ]


async def test_a_refusal_is_told_and_tried_again(site: Site, autojump_clock: trio.testing.MockClock) -> None:
    topics = Topics("T1")  # a single topic of an unknown broker is refused
    async with registered(Net(n1=site.listener), MASTER, ["n1"], topics) as registration:
        assert registration.states["n1"].error == "code 1 register broker failed"
        topics.add("T2")
        await trio.sleep(5.1)
        assert registration.states["n1"].is_registered


async def test_topics_that_fit_no_frame_do_not_end_the_broker(
    site: Site, autojump_clock: trio.testing.MockClock
) -> None:
    topics = Topics("T1", "T2")
    async with registered(Net(n1=site.listener), MASTER, ["n1"], topics) as registration:
        for number in range(4500):
            topics.add(f"{number}".rjust(4000, "x"))
        registration.topics_changed()
        await registration.wait_told()
        assert "the maximum is 16777216" in registration.states["n1"].error
        del topics.names[2:]
        registration.topics_changed()
        await registration.wait_told()
        assert registration.states["n1"].is_registered


async def test_a_slave_learns_its_master(site: Site, autojump_clock: trio.testing.MockClock) -> None:
    async with registered(Net(n1=site.listener), SLAVE, ["n1"], Topics("T1", "T2")) as registration:
        assert registration.master.value is None
        master = site.connect()
        await master.ask(register(topics=["T1", "T2"]))
        await registration.master.wait_value(MasterAddresses("10.0.0.1:10911", "10.0.0.1:10912"))
        assert trio.current_time() == pytest.approx(5)
        await master.ask(register(topics=["T1", "T2"], ha="10.0.0.1:20912"))
        await registration.master.wait_value(MasterAddresses("10.0.0.1:10911", "10.0.0.1:20912"))
        assert trio.current_time() == pytest.approx(35)
        await master.stream.aclose()
        await trio.sleep(60)
        assert registration.master.value is not None  # kept: it may be the name server that lost it


async def test_a_master_is_told_of_no_master(site: Site) -> None:
    await site.connect().ask(register(topics=["T1", "T2"], address="other:1"))
    async with registered(Net(n1=site.listener), MASTER, ["n1"], Topics("T1", "T2")) as registration:
        assert registration.master.value is None


async def answer_nothing(peer: Peer) -> None:
    while await peer.receive() is not None:
        pass


async def answer_nonsense(peer: Peer) -> None:
    if await peer.receive() is not None:
        await peer.stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def answer_without_fields_of_sense(peer: Peer) -> None:
    while (asked := await peer.receive()) is not None:
        await peer.send(RemotingCommand(0, asked.opaque, 1, ext_fields={"masterAddr": "", "haServerAddr": "x"}))


@pytest.mark.parametrize("answer", [answer_nothing, answer_nonsense, answer_without_fields_of_sense])
async def test_a_hostile_name_server_harms_nobody(
    answer: Callable[[Peer], Awaitable[None]], autojump_clock: trio.testing.MockClock
) -> None:
    async with open_site() as good, trio.open_nursery() as nursery:
        bad = MemoryListener()

        async def be_bad() -> None:
            while True:
                nursery.start_soon(answer, Peer(await bad.accept()))

        nursery.start_soon(be_bad)
        async with registered(Net(bad=bad, good=good.listener), SLAVE, ["bad", "good"], Topics("T1", "T2")) as r:
            await trio.sleep(300)
            assert r.states["good"].is_registered
            assert r.master.value is None
            stopping_at = trio.current_time()
        assert trio.current_time() - stopping_at <= 3.01
        nursery.cancel_scope.cancel()


async def test_stopping_waits_at_most_3_seconds(autojump_clock: trio.testing.MockClock) -> None:
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:

        async def answer_once() -> None:
            peer = Peer(await listener.accept())
            asked = await peer.receive()
            assert asked is not None
            await peer.send(asked.reply(0))
            await answer_nothing(peer)

        nursery.start_soon(answer_once)
        async with registered(Net(n1=listener), MASTER, ["n1"], Topics("T1", "T2")):
            stopping_at = trio.current_time()
        assert trio.current_time() - stopping_at == pytest.approx(3)
        nursery.cancel_scope.cancel()


async def test_a_restarted_name_server_is_told_within_the_period(autojump_clock: trio.testing.MockClock) -> None:
    async with open_site() as first:
        net = Net(n1=first.listener)
        async with registered(net, MASTER, ["n1"], Topics("T1", "T2")), open_site() as second:
            net.listeners["n1"] = second.listener
            first.name_server.server.connections.copy().popitem()[0].close(CloseCause.CANCELLED)
            await trio.sleep(30.1)
            assert await route_of(second.connect(), "T1") is not None


# ---- with failover


def member(member_id: int) -> Standing:
    return Standing("b0", member_id, is_slave=True, is_elected=True)


async def addresses(site: Site) -> dict[str, str]:
    found = await route_of(site.connect(), "T1")
    return {} if found is None else found["brokerDatas"][0]["brokerAddrs"]


async def test_two_members_change_places(autojump_clock: trio.testing.MockClock) -> None:
    one, two = member(1), member(2)
    one.become_master(3)
    first, second = MASTER.broker_address, SLAVE.broker_address
    async with (
        open_site() as site,
        registered(Net(n1=site.listener), MASTER, ["n1"], Topics("T1", "T2"), one),
        registered(Net(n1=site.listener), SLAVE, ["n1"], Topics("T1", "T2"), two) as follower,
    ):
        assert await addresses(site) == {"0": first, "2": second}
        assert follower.master.value == MasterAddresses(first, MASTER.ha_address)
        began = trio.current_time()
        one.become_slave(3)
        await trio.testing.wait_all_tasks_blocked()
        assert await addresses(site) == {"1": first, "2": second}
        two.become_master(4)
        await trio.testing.wait_all_tasks_blocked()
        assert await addresses(site) == {"0": second, "1": first}
        assert trio.current_time() == began


async def test_a_killed_masters_place_is_taken(autojump_clock: trio.testing.MockClock) -> None:
    """Before the name server has noticed that it is gone, as after a cut cable."""
    two = member(2)
    async with open_site() as site:
        dead = site.connect()
        await dead.ask(register(["T1", "T2"], version={"counter": 9, "stateVersion": 3, "timestamp": 1}))
        async with registered(Net(n1=site.listener), SLAVE, ["n1"], Topics("T1", "T2"), two):
            two.become_master(4)
            await trio.testing.wait_all_tasks_blocked()
            assert await addresses(site) == {"0": SLAVE.broker_address}
            await dead.stream.aclose()
            await trio.testing.wait_all_tasks_blocked()
            assert await addresses(site) == {"0": SLAVE.broker_address}


async def test_what_a_former_master_said_late_changes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    one, two = member(1), member(2)
    one.become_master(3)
    async with (
        open_site() as site,
        registered(Net(n1=site.listener), MASTER, ["n1"], Topics("T1", "T2"), one) as late,
        registered(Net(n1=site.listener), SLAVE, ["n1"], Topics("T1", "T2"), two),
    ):
        two.become_master(4)
        await trio.testing.wait_all_tasks_blocked()
        late.topics_changed()  # it has not heard of its successor
        await trio.testing.wait_all_tasks_blocked()
        assert await addresses(site) == {"0": SLAVE.broker_address}
        one.become_slave(4)
        await trio.testing.wait_all_tasks_blocked()
        assert await addresses(site) == {"0": SLAVE.broker_address, "1": MASTER.broker_address}


async def test_a_master_whose_lease_has_ended_registers_no_more(autojump_clock: trio.testing.MockClock) -> None:
    one = member(1)
    one.become_master(3, 10.0)
    async with open_site() as site:
        async with registered(Net(n1=site.listener), MASTER, ["n1"], Topics("T1", "T2"), one) as registration:
            assert registration.states["n1"].registered_count == 1
            await trio.sleep(40)
            state = registration.states["n1"]
            assert (state.registered_count, state.error) == (1, "the lease of this master has ended")
            one.extend(trio.current_time() + 10)
            await trio.sleep(5.1)
            assert registration.states["n1"].registered_count == 2
            other = site.connect()
            await other.ask(register(["T1", "T2"], address="10.0.0.3:10911", version=NEWER))
            await trio.sleep(10)  # the lease is over again, and a name server of 4.9 unregisters whoever has the id
        assert await addresses(site) == {"0": "10.0.0.3:10911"}


NEWER = {"counter": 1, "stateVersion": 9, "timestamp": 1}


async def end_lease(one: Standing) -> None:
    one.extend(trio.current_time())


async def become_slave_unheard(one: Standing) -> None:
    one.become_slave(4)
    await trio.sleep(0.1)
    one.become_master(5)
    one.become_slave(6)


async def become_master_unheard(one: Standing) -> None:
    one.become_slave(4)
    await trio.sleep(0.1)  # heard
    one.become_master(5)


async def stay(one: Standing) -> None:
    """The master that it was, and is."""


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (stay, [(103, "0"), (104, "0")]),
        (end_lease, [(103, "0")]),
        (become_slave_unheard, [(103, "0"), (103, "1"), (104, "1")]),
        (become_master_unheard, [(103, "0"), (103, "1")]),
    ],
)
async def test_only_who_has_an_id_still_unregisters_it(
    happens: Callable[[Standing], Awaitable[None]],
    expected: list[tuple[int, str]],
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A name server of 4.9 removes whoever has the id, be it another broker by now."""
    listener, one = MemoryListener(), member(1)
    asked: list[tuple[int, str]] = []
    one.become_master(3)
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            peer = Peer(await listener.accept())
            while (request := await peer.receive()) is not None:
                asked.append((request.code, request.ext_fields["brokerId"]))
                await peer.send(request.reply(0))

        nursery.start_soon(answer)
        async with registered(Net(n1=listener), MASTER, ["n1"], Topics("T1", "T2"), one):
            await happens(one)  # it ends before it can say more
        nursery.cancel_scope.cancel()
    assert asked == expected


async def test_a_name_server_that_hangs_hears_of_a_change_soon(autojump_clock: trio.testing.MockClock) -> None:
    listener, one = MemoryListener(), member(1)
    heard: list[tuple[float, str]] = []
    async with trio.open_nursery() as nursery:

        async def listen() -> None:
            peer = Peer(await listener.accept())
            while (request := await peer.receive()) is not None:
                heard.append((trio.current_time(), request.ext_fields["brokerId"]))

        nursery.start_soon(listen)
        async with open_remoting_client(connect=Net(n1=listener).connect) as client:
            made = NameServerRegistration(MASTER, ["n1"], client, Topics("T1", "T2"), one, run_blocking=run_inline)
            nursery.start_soon(made.serve)
            await trio.sleep(2)
            one.become_master(1)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
    assert heard == [(0.0, "1"), (2.5, "0")]


async def test_a_new_master_says_it_again_and_again(autojump_clock: trio.testing.MockClock) -> None:
    """A name server of 4.9 believes whoever spoke last, which may be what an old master said long ago."""
    listener, two = MemoryListener(), member(2)
    heard: list[tuple[float, str, int, int]] = []
    async with trio.open_nursery() as nursery:

        async def listen() -> None:
            peer = Peer(await listener.accept())
            while (request := await peer.receive()) is not None:
                if request.code == 103:
                    version = json.loads(bytes(request.body))["topicConfigSerializeWrapper"]["dataVersion"]
                    at = trio.current_time() - began
                    heard.append((at, request.ext_fields["brokerId"], version["stateVersion"], version["counter"]))
                await peer.send(request.reply(0))

        began = trio.current_time()
        nursery.start_soon(listen)
        async with registered(Net(n1=listener), SLAVE, ["n1"], Topics("T1", "T2"), two):
            began = trio.current_time()
            two.become_master(7)
            await trio.sleep(65)
        nursery.cancel_scope.cancel()
    # By counter and time alone, as 4.9 compares, a master's table is not what this address told as a slave's.
    assert heard[0] == (0.0, "2", 0, 1)
    assert heard[1:] == [(at, "0", 7, 8) for at in (0, 1, 3, 7, 15, 31, 61)]


# two brokers of one name and id


OTHER = BrokerIdentity(cluster_name="C", broker_name="b0", broker_address="10.0.0.9:10911", ha_address="10.0.0.9:10912")


@pytest.mark.parametrize("role", ["masters", "slaves"])
async def test_two_brokers_of_one_name_and_id_find_out_and_the_name_server_tells(
    role: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The later registration wins, as in RocketMQ. The name server tells at once, each of the two within its period."""
    first, id_ = (MASTER, 0) if role == "masters" else (SLAVE, 1)

    def standing() -> Standing:
        return Standing("b0", id_, is_slave=bool(id_))

    async with open_site() as site:
        net = Net(n1=site.listener)
        async with registered(net, first, ["n1"], Topics("T1", "T2"), standing()) as one:
            await trio.sleep(101.3)
            assert one.states["n1"].other_address == ""
            assert await duplicates_of(site) == {}
            async with registered(net, OTHER, ["n1"], Topics("T1", "T2"), standing()) as two:
                assert await address_of(site, id_) == OTHER.broker_address
                assert await duplicates_of(site) == {f"b0:{id_}": f"10.0.0.9:10911;{first.broker_address}"}
                await trio.sleep(40)
                for _ in range(10):
                    assert one.states["n1"].other_address == OTHER.broker_address
                    assert two.states["n1"].other_address == first.broker_address
                    await trio.sleep(61)
            said = [record.getMessage() for record in caplog.records if "duplicate" in record.getMessage()]
            told = [line for line in said if line.startswith("namesrv.duplicate_found")]
            assert 5 <= len(told) <= 12  # once a minute, though they replaced each other 40 times
            assert {
                line.partition(" hint=")[0] for line in said if line.startswith("registration.duplicate_found")
            } == {
                f"registration.duplicate_found namesrv=n1 broker=b0 id={id_} other={first.broker_address}",
                f"registration.duplicate_found namesrv=n1 broker=b0 id={id_} other=10.0.0.9:10911",
            }
            assert len(said) == len(told) + 2
            await trio.sleep(200)
            assert one.states["n1"].other_address == ""
            assert await address_of(site, id_) == first.broker_address
            assert await duplicates_of(site) == {}


async def test_a_master_is_looked_up_without_a_list_of_all_brokers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A thousand brokers that list a thousand brokers each would cost the name server more than their registrations."""
    listener = MemoryListener()
    asked: list[tuple[int, str | None]] = []
    async with open_site() as site, trio.open_nursery() as nursery:
        name_server = site.connect()

        async def forward() -> None:
            peer = Peer(await listener.accept())
            while (request := await peer.receive()) is not None:
                asked.append((request.code, (request.ext_fields or {}).get("topic")))
                answer = await name_server.ask(request)
                answer.opaque = request.opaque
                await peer.send(answer)

        nursery.start_soon(forward)
        async with registered(Net(n1=listener), MASTER, ["n1"], Topics("T1", "b0")) as one:
            await trio.sleep(35)
            async with registered(Net(n1=site.listener), OTHER, ["n1"], Topics("T1", "b0")):
                await trio.sleep(31)
                assert one.states["n1"].other_address == OTHER.broker_address
        nursery.cancel_scope.cancel()
    assert asked[:4] == [(103, None), (105, "b0"), (103, None), (105, "b0")]
    assert 106 not in dict(asked)


async def test_a_broker_that_comes_back_at_another_address_is_no_duplicate(site: Site) -> None:
    net = Net(n1=site.listener)
    async with registered(net, MASTER, ["n1"], Topics("T1", "T2")):
        pass
    async with registered(net, OTHER, ["n1"], Topics("T1", "T2")) as moved:
        assert moved.states["n1"].other_address == ""
        assert await duplicates_of(site) == {}


async def test_a_master_of_a_newer_term_is_no_duplicate(site: Site) -> None:
    net = Net(n1=site.listener)
    old, new = (Standing("b0", id_, is_slave=False, is_elected=True, epoch=id_) for id_ in (1, 2))
    async with (
        registered(net, MASTER, ["n1"], Topics("T1", "T2"), old),
        registered(net, OTHER, ["n1"], Topics("T1", "T2"), new) as newer,
    ):
        assert newer.states["n1"].other_address == ""
        assert await address_of(site, 0) == OTHER.broker_address
        assert await duplicates_of(site) == {}


async def test_a_broker_that_must_not_go_by_its_id_leaves_name_servers_as_they_are() -> None:
    why = "another process has it"
    async with open_site() as site, open_remoting_client(connect=Net(n1=site.listener).connect) as client:
        topics = Topics("T1", "T2")
        registration = NameServerRegistration(
            MASTER,
            ["n1"],
            client,
            topics,
            Standing("b0", 0, is_slave=False),
            why_not=lambda: why,
            run_blocking=run_inline,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(registration.serve)
            assert registration.states["n1"].error == why
            assert await route_of(site.connect(), "T1") is None
            why = ""
            registration.topics_changed()
            await registration.wait_told()
            assert await route_of(site.connect(), "T1") is not None
            why = "another process has it now"
            nursery.cancel_scope.cancel()
        assert await route_of(site.connect(), "T1") is not None


async def duplicates_of(site: Site) -> dict[str, str]:
    answer = await site.connect().ask(RemotingCommand(219, 1, ext_fields={"namespace": "HALOG_DUPLICATE_BROKERS"}))
    if answer.code == 22:
        return {}
    table: dict[str, str] = json.loads(bytes(answer.body))["table"]
    return table


async def address_of(site: Site, broker_id: int) -> str:
    answer = await site.connect().ask(RemotingCommand(106, 1))
    known = json.loads(bytes(answer.body).replace(b"{0:", b'{"0":').replace(b"{1:", b'{"1":'))
    found: str = known["brokerAddrTable"]["b0"]["brokerAddrs"][str(broker_id)]
    return found

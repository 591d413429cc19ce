"""Network faults between master and slave under load: cut, half cut, delayed, slow, lossy, reset.

The same faults through a proxy, which works everywhere, and between network namespaces with a packet switch, where the
kernel's own TCP has to cope. Housekeeping is set to 1.5 s; the slave reconnects half a second after it lost its master.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.codes import ResponseCode
from tests.faults.checking import check_run
from tests.faults.producing import JournaledProducer, count_statuses
from tests.faults.proxy import Link, Proxy
from tests.faults.switch import NO_IPROUTE2, OWN, Switch, why_not
from tests.faults.switch import Path as PacketPath
from tests.node.processes import Process
from tests.scenarios.brokers import REPOSITORY, Broker, eventually, slave_of, wait_caught_up, wait_in_sync

pytestmark = pytest.mark.processes

SEED = 77
HOUSEKEEPING_S = 1.5
EAGER = "tests.faults.eager_slave"
SETTINGS: dict[str, Any] = {
    "haSendHeartbeatInterval": 300,
    "haHousekeepingInterval": int(HOUSEKEEPING_S * 1000),
    "slaveTimeout": 500,
}
GRACE_S = 0.3
"""Messages sent this soon after a cut may have been ahead of it"""
TRUE_STATUSES = {ResponseCode.SUCCESS, ResponseCode.FLUSH_SLAVE_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE}

Direction = Link | PacketPath


class Story:
    """A master, its slave and a producer, and the two directions between them: `data` to the slave, `acks` back."""

    def __init__(self, master: Broker, slave: Broker, data: Direction, acks: Direction) -> None:
        self.master = master
        self.slave = slave
        self.data = data
        self.acks = acks
        self.producer = JournaledProducer(0, lambda: master.addresses["remoting"], seed=SEED, pause_s=0.01)

    def heal(self) -> None:
        """Heals the network, and waits until that shows."""
        self.data.clear()
        self.acks.clear()
        wait_followed(self.master)
        self.wait_answer_sent_now({ResponseCode.SUCCESS})

    def wait_answer_sent_now(self, codes: set[ResponseCode]) -> float:
        """Waits until a new message is answered with one of `codes`; returns the seconds since it was sent."""
        began = time.monotonic()
        seen = len(self.producer.answered)
        first = self.producer.next_sequence

        def found() -> float | None:
            nonlocal seen
            while seen < len(self.producer.answered):
                at_s, answer = self.producer.answered[seen]
                seen += 1
                if answer.sequence >= first and answer.code in codes:
                    return at_s - self.producer.sent[answer.sequence].time_s
            return None

        took_s = eventually(f"an answer {codes} after {began}", found, 40.0)
        assert took_s is not None
        return took_s

    def answers_to_what_was_sent(self, since_s: float, until_s: float) -> set[int]:
        sent = {each.sequence for each in self.producer.sent if since_s <= each.time_s <= until_s}
        return {each.answer.code for each in self.producer.answered if each.answer.sequence in sent}

    def cut(self, *directions: Direction) -> None:
        """Cuts these links until the master counts no slave; meanwhile nothing may be reported as replicated."""
        for direction in directions:
            direction.is_open = False
        since_s = time.monotonic() + GRACE_S
        self.wait_answer_sent_now({ResponseCode.FLUSH_SLAVE_TIMEOUT})
        self.wait_answer_sent_now({ResponseCode.SLAVE_NOT_AVAILABLE})
        noticed_s = time.monotonic() - since_s
        assert noticed_s < HOUSEKEEPING_S + 6.0
        until_s = time.monotonic()
        self.heal()
        codes = self.answers_to_what_was_sent(since_s, until_s)
        assert ResponseCode.SUCCESS not in codes
        assert codes <= TRUE_STATUSES

    def finish(self) -> None:
        self.producer.stop()
        wait_followed(self.master)
        wait_caught_up(self.slave, self.master)
        self.slave.stop()
        self.master.stop()
        found = check_run([self.master, self.slave], [self.producer], [])
        assert found.all == []
        answers = [each.answer for each in self.producer.answered]
        print(count_statuses(answers))
        assert {answer.code for answer in answers} <= TRUE_STATUSES
        assert self.producer.break_count == 0
        for broker in (self.master, self.slave):
            assert "Traceback" not in broker.log()


def wait_followed(master: Broker) -> None:
    eventually("the slave is in sync again", lambda: master.status()["ha"]["in_sync"] == 1, 40.0)


def test_pair_survives_network_faults_through_a_proxy(tmp_path: Path) -> None:
    with (
        Broker(tmp_path / "master", "SYNC_MASTER", **SETTINGS).start() as master,
        Proxy(master.addresses["ha"]) as proxy,
        slave_of(master, tmp_path / "slave", module=EAGER, haMasterAddress=proxy.address, **SETTINGS).start() as slave,
    ):
        wait_in_sync(master)
        story = Story(master, slave, proxy.back, proxy.there)
        story.wait_answer_sent_now({ResponseCode.SUCCESS})

        proxy.back.delay_s = proxy.there.delay_s = 0.1
        time.sleep(0.5)  # data in flight arrives
        assert story.wait_answer_sent_now({ResponseCode.SUCCESS}) >= 0.2
        proxy.back.clear()
        proxy.there.clear()

        proxy.back.bytes_per_s = 10_000
        story.wait_answer_sent_now({ResponseCode.FLUSH_SLAVE_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE})
        story.heal()

        connected = slave.status()["ha_client"]["connection_count"]
        proxy.reset()  # the slave reconnects at once, so no message need be answered SLAVE_NOT_AVAILABLE
        eventually("the slave reconnects", lambda: slave.status()["ha_client"]["connection_count"] > connected, 40.0)
        story.heal()

        story.cut(proxy.back)
        story.finish()


@pytest.fixture(scope="module")
def namespaces() -> None:
    reason = why_not()
    if reason == NO_IPROUTE2 and os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(reason)  # .ci/run installs it
    if reason:
        pytest.skip(f"no network namespaces: {reason}; the same faults were made through a proxy")


def test_pair_survives_packet_loss_delay_and_partition(tmp_path: Path, namespaces: None) -> None:
    with Switch("master", "slave", seed=SEED) as switch, ExitStack() as stack:
        names = stack.enter_context(name_server(tmp_path, switch.address(OWN)))
        master = Broker(tmp_path / "master", "SYNC_MASTER", **_place(switch, "master", names))
        slave = Broker(tmp_path / "slave", "SLAVE", module=EAGER, **_place(switch, "slave", names))
        master.prefix, slave.prefix = switch.prefix("master"), switch.prefix("slave")
        stack.enter_context(master).start()
        stack.enter_context(slave).start()
        wait_in_sync(master)
        data, acks = switch.between("master", "slave")
        story = Story(master, slave, data, acks)
        story.wait_answer_sent_now({ResponseCode.SUCCESS})

        data.delay_s = acks.delay_s = 0.05
        data.loss = acks.loss = 0.2
        time.sleep(0.3)
        assert story.wait_answer_sent_now({ResponseCode.SUCCESS}) >= 0.1
        eventually("packets are lost both ways", lambda: data.dropped >= 3 and acks.dropped >= 3)
        story.heal()

        story.cut(acks)
        # Half-open: the slave dies behind the cut, and the master receives nothing.
        data.is_open = acks.is_open = False
        slave.kill()
        story.wait_answer_sent_now({ResponseCode.SLAVE_NOT_AVAILABLE})
        data.clear()
        acks.clear()
        slave.start()
        story.heal()
        print(f"{data.carried} + {acks.carried} packets carried, {data.dropped} + {acks.dropped} dropped")
        story.finish()


def _place(switch: Switch, name: str, name_server: str) -> dict[str, Any]:
    address = switch.address(name)
    return {
        **SETTINGS,
        "bindAddress": address,
        "adminBindAddress": address,
        "brokerIP1": address,
        "namesrvAddr": name_server,
        "registerNameServerPeriod": 10_000,
    }


@contextmanager
def name_server(directory: Path, address: str) -> Iterator[str]:
    """A name server on this address; returns its port."""
    with Process(
        "ha.namesrv",
        "--set",
        "listenPort=0",
        "--set",
        f"bindAddress={address}",
        directory=directory,
        environment={"PYTHONPATH": str(REPOSITORY)},
    ) as process:
        yield process.wait_ready()["remoting"]

"""Timer messages as workload: a producer's clients send them, and the log tells what became of them.

They go to a topic of their own and are no part of the history: `tests.checkers.timers` judges them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ha.protocol.codes import RequestCode
from ha.protocol.headers import SendMessageRequestV2
from ha.protocol.remoting import RemotingCommand
from tests.checkers.timers import TimerSent
from tests.sim.groups.workload import GroupProducer
from tests.sim.workload import Producer

if TYPE_CHECKING:
    from tests.checkers.history import Answered, Sent
    from tests.sim.groups.group import Group
    from tests.sim.machines import Machines
    from tests.sim.observer import Observer
    from tests.sim.scenario import RunOptions

TIMED_TOPIC = "timed"
DELAYS_S = (0.2, 1.0, 3.0, 8.0)
"""Largest delays, drawn with equal chance"""


class TimerLedger:
    """What was sent, and which of it was answered with PUT_OK."""

    def __init__(self, watch: Observer) -> None:
        self.world = watch.world
        self._due_ms: dict[bytes, int] = {}
        self._acknowledged: set[bytes] = set()

    def add(self, key: bytes, due_ms: int) -> None:
        """A message is about to be sent."""
        self._due_ms[key] = due_ms

    def on_sent(self, sent: Sent) -> None:
        """As `Observer.on_sent`: `add` was called for it."""

    def on_answer(self, answered: Answered) -> None:
        """As `Observer.on_answer`."""
        if answered.status == "PUT_OK":
            self._acknowledged.add(_key(answered.client, answered.seq))

    def sent(self) -> list[TimerSent]:
        """Returns every message."""
        return [TimerSent(key, due_ms, key in self._acknowledged) for key, due_ms in self._due_ms.items()]


def _key(client: str, number: int) -> bytes:
    return f"timer {client}-{number}".encode()


class TimerProducer(Producer):
    """Sends timer messages to a master with a fixed role."""

    def __init__(self, cluster: Machines, options: RunOptions, ledger: TimerLedger, name: str) -> None:
        super().__init__(cluster, options, ledger, name)
        self._ledger = ledger

    def _command(self, number: int) -> tuple[RemotingCommand, bytes]:
        return _command(self, self._ledger, number)


class GroupTimerProducer(GroupProducer):
    """Sends timer messages to the current master."""

    def __init__(self, group: Group, options: RunOptions, ledger: TimerLedger, name: str) -> None:
        super().__init__(group, ledger, name, options)
        self._ledger = ledger

    def _command(self, number: int) -> tuple[RemotingCommand, bytes]:
        return _command(self, self._ledger, number)


def _command(producer: Producer, ledger: TimerLedger, number: int) -> tuple[RemotingCommand, bytes]:
    client = producer.client
    chance, machine = client.chance, client.cluster.machines[producer.node]
    due_ms = machine.wall_clock_ms() + int(1000 * chance.choice(DELAYS_S) * chance.random())
    key = _key(client.name, number)
    ledger.add(key, due_ms)
    header = SendMessageRequestV2(
        producer_group="simulated",
        topic=TIMED_TOPIC,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties=f"UNIQ_KEY\x01{key.decode()}\x02TIMER_DELIVER_MS\x01{due_ms}\x02",
    )
    command = RemotingCommand(RequestCode.SEND_MESSAGE_V2, opaque=number, ext_fields=header.to_ext_fields(), body=key)
    return command, key

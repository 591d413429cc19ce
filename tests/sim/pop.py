"""POP consumers as workload: they acknowledge most messages, hide some for another time, and forget the others.

Their deliveries are no part of the history: `tests.checkers.pop` judges them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import Header
from ha.protocol.pop import PopMessageRequest
from ha.protocol.popped import ReceiptHandle, read_popped
from ha.protocol.remoting import RemotingCommand
from tests.checkers.history import body_id_of
from tests.checkers.pop import Delivery
from tests.sim.groups.workload import GroupProducer
from tests.sim.workload import TOPIC, Lost, Producer

if TYPE_CHECKING:
    from tests.checkers.history import Answered, Sent
    from tests.sim.groups.group import Group
    from tests.sim.machines import Machines
    from tests.sim.observer import Observer
    from tests.sim.scenario import RunOptions

GROUP = "poppers"
BROKER_NAME = "broker-a"
INVISIBLE_MS = (300, 1000, 3000, 8000)
ACK_CHANCE, CHANGE_CHANCE = 0.7, 0.1
WORK_S = 0.05
"""Mean time that a message takes"""
ANSWERS = (ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT, ResponseCode.POLLING_FULL)
"""All others are refusals: this broker is not the master, does not know the topic yet, or can't store the change"""
COUNT_MAX = 32
REFUSED_S = 0.2
"""Pause before a consumer looks for the master again"""


class PopLedger:
    """What was given to the consumers of the group, and what became of it."""

    def __init__(self, watch: Observer) -> None:
        self.world = watch.world
        self.deliveries: list[Delivery] = []
        self.finished: set[bytes] = set()
        """Keys of the messages that were acknowledged; the answer may have been lost"""
        self.is_draining = False
        """Whether consumers acknowledge everything at once"""

    def on_sent(self, sent: Sent) -> None:
        """As `Observer.on_sent`: nothing is sent."""

    def on_answer(self, answered: Answered) -> None:
        """As `Observer.on_answer`."""


class PopConsumer(Producer):
    """Pops from a master with a fixed role. It pauses and stops as a producer does."""

    def __init__(self, cluster: Machines, options: RunOptions, ledger: PopLedger, name: str) -> None:
        super().__init__(cluster, options, ledger, name)
        self._ledger = ledger

    async def _burst(self, count: int) -> None:
        await _Round(self, self._ledger).run(count)


class GroupPopConsumer(GroupProducer):
    """Pops from the current master."""

    def __init__(self, group: Group, options: RunOptions, ledger: PopLedger, name: str) -> None:
        super().__init__(group, ledger, name, options)
        self._ledger = ledger

    async def _burst(self, count: int) -> None:
        await _Round(self, self._ledger).run(count)


class _Round:
    """Pops, and what follows for each message."""

    def __init__(self, consumer: Producer, ledger: PopLedger) -> None:
        self._client = consumer.client
        self._machine = consumer.client.cluster.machines[consumer.node]
        self._ledger = ledger

    async def run(self, count: int) -> None:
        """Pops at most `count` messages; while draining, everything there is. Lost."""
        if not self._ledger.is_draining:
            await self._pop(count)
        while self._ledger.is_draining and await self._pop(COUNT_MAX):
            pass

    async def _pop(self, count: int) -> int:
        """Pops once, and works on each message; returns how many there were."""
        chance, ledger = self._client.chance, self._ledger
        # With short times, what comes again may be as much as what is acknowledged, so that there is no end.
        invisible_ms = max(INVISIBLE_MS) if ledger.is_draining else chance.choice(INVISIBLE_MS)
        header = PopMessageRequest(
            consumer_group=GROUP,
            topic=TOPIC,
            queue_id=-1,
            max_msg_nums=count,
            invisible_time=invisible_ms,
            poll_time=chance.choice((0, 500)),
            born_time=self._machine.wall_clock_ms(),
            init_mode=0,
            exp_type="TAG",
            exp="*",
        )
        asked_s = trio.current_time()
        answer = await self._ask(RequestCode.POP_MESSAGE, header)
        if answer.code != ResponseCode.SUCCESS:
            return 0
        given_s = trio.current_time()
        found: list[tuple[Delivery, ReceiptHandle]] = []
        for popped in read_popped(answer, BROKER_NAME):
            key = body_id_of(bytes(popped.record.body)) or b"?"
            ledger.world.note(f"{self._client.name} got {key.decode()} {popped.receipt.encode()}")
            delivery = Delivery(key, asked_s, given_s, _hidden_to_s(asked_s, invisible_ms))
            ledger.deliveries.append(delivery)
            found.append((delivery, popped.receipt))
        if ledger.is_draining:
            await self._acknowledge(found)
        else:
            for delivery, receipt in found:
                await self._work_on(delivery, receipt)
        return len(found)

    async def _work_on(self, delivery: Delivery, receipt: ReceiptHandle) -> None:
        chance = self._client.chance
        await trio.sleep(chance.expovariate(1 / WORK_S))
        drawn = chance.random()
        if drawn < ACK_CHANCE:
            await self._acknowledge([(delivery, receipt)])
        elif drawn < ACK_CHANCE + CHANGE_CHANCE:
            await self._hide(delivery, receipt, chance.choice(INVISIBLE_MS))

    async def _acknowledge(self, given: Sequence[tuple[Delivery, ReceiptHandle]]) -> None:
        """Acknowledges messages at once, each by a request of its own. Lost."""
        self._ledger.finished.update(delivery.key for delivery, _ in given)
        headers = [receipt.ack_request(GROUP, TOPIC) for _, receipt in given]
        await self._client.send(
            [
                RemotingCommand(RequestCode.ACK_MESSAGE, opaque=number, ext_fields=header.to_ext_fields())
                for number, header in enumerate(headers)
            ]
        )
        for _ in given:
            answer = await self._answer()
            delivery = given[answer.opaque][0]
            if answer.code == ResponseCode.SUCCESS:
                self._ledger.world.note(f"{self._client.name} acknowledged {delivery.key.decode()}")
                delivery.acknowledged_s = trio.current_time()

    async def _hide(self, delivery: Delivery, receipt: ReceiptHandle, invisible_ms: int) -> None:
        change = receipt.change_request(GROUP, TOPIC, invisible_ms)
        asked_s = trio.current_time()
        is_in_time, hidden_to_s = asked_s < delivery.hidden_to_s, _hidden_to_s(asked_s, invisible_ms)
        delivery.hidden_to_s = min(delivery.hidden_to_s, hidden_to_s)
        answer = await self._ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, change)
        if answer.code == ResponseCode.SUCCESS and is_in_time and trio.current_time() < delivery.hidden_to_s:
            delivery.hidden_to_s = hidden_to_s

    async def _ask(self, code: RequestCode, header: Header) -> RemotingCommand:
        """Returns the answer to a request. Lost."""
        await self._client.send([RemotingCommand(code, opaque=1, ext_fields=header.to_ext_fields())])
        return await self._answer()

    async def _answer(self) -> RemotingCommand:
        """Returns the next answer. Lost if it is a refusal of a broker that is no master."""
        answer = await self._client.receive()
        if answer.code not in ANSWERS:
            await trio.sleep(REFUSED_S)
            raise Lost
        return answer


def _hidden_to_s(asked_s: float, invisible_ms: int) -> float:
    """When a message that was asked for may be given again: brokers count from a whole millisecond."""
    return (math.floor(asked_s * 1000) + invisible_ms) / 1000

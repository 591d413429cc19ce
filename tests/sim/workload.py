"""Producers and consumers of one run: raw remoting clients that record every answer exactly.

A producer keeps a burst of sends in flight, each with a distinct body; a lost connection leaves the outcome of sends
in flight unknown, and nothing is sent twice. A consumer pulls every queue in turn, from the master or from a slave.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import trio

from ha.errors import RemoteProtocolError
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import PullMessageRequest, SendMessageRequestV2
from ha.protocol.record import decode_records
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.checkers.history import STATUS_OF_CODE, Answered, Consumed, Sent, body_id_of, make_body
from tests.sim.machines import LISTEN_PORT, address_of
from tests.sim.scenario import MASTER, RunOptions

if TYPE_CHECKING:
    from tests.sim.machines import Machines
    from tests.sim.observer import Observer
    from tests.sim.sockets import SimStream
    from tests.sim.world import World

TOPIC = "flights"
CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 12.0
"""Longer than the broker's own timeouts: a later answer would be useless"""
RECONNECT_S = 0.7
PULL_SUSPEND_MS = 1000
UNKNOWN = "UNKNOWN"

REFUSAL_OF_REMARK = {
    "in-sync replicas not enough": "IN_SYNC_REPLICAS_NOT_ENOUGH",
    "create mapped file failed": "CREATE_MAPPED_FILE_FAILED",
    "the message is illegal": "MESSAGE_ILLEGAL",
}


def status_of(answer: RemotingCommand) -> str:
    """Returns the status in an answer to a send, by RocketMQ's name."""
    for remark, name in REFUSAL_OF_REMARK.items():
        if (answer.remark or "").startswith(remark):
            return name
    if answer.code == ResponseCode.SERVICE_NOT_AVAILABLE:
        return "SERVICE_NOT_AVAILABLE"
    return STATUS_OF_CODE.get(answer.code, f"CODE_{answer.code}")


def answered_by(answer: RemotingCommand, now_s: float, client: str, node: str) -> Answered:
    """Returns an answer to a send as an event."""
    physical_offset = queue_offset = -1
    if "msgId" in answer.ext_fields:
        physical_offset = int(answer.ext_fields["msgId"][16:], 16)
        queue_offset = int(answer.ext_fields["queueOffset"])
    return Answered(now_s, client, answer.opaque, status_of(answer), queue_offset, physical_offset, node)


class Lost(Exception):  # noqa: N818
    """The connection is unusable."""


class Client:
    """One connection with requests in flight."""

    def __init__(self, cluster: Machines, name: str) -> None:
        self.name = name
        self.cluster = cluster
        self.chance = cluster.world.chance(f"client {name}")
        self.host = cluster.add_client(name)
        self._stream: SimStream | None = None
        self._parser = RemotingParser()
        self._ready: list[RemotingCommand] = []

    async def connect(self, node: str, port: int = LISTEN_PORT) -> None:
        """Connects to a node, without time limit; Lost if that is impossible now."""
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                self._stream = await self.cluster.network.connect(self.host, f"{address_of(node)}:{port}")
        except (OSError, trio.TooSlowError) as error:
            raise Lost from error
        self._parser = RemotingParser()
        self._ready = []

    async def send(self, commands: list[RemotingCommand]) -> None:
        """Sends requests in one write."""
        assert self._stream is not None
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                await self._stream.send_all(b"".join(map(encode_command, commands)))
        except (trio.BrokenResourceError, trio.TooSlowError) as error:
            self.close()
            raise Lost from error

    async def receive(self) -> RemotingCommand:
        """Returns the next answer."""
        assert self._stream is not None
        try:
            while not self._ready:
                with trio.fail_after(ANSWER_TIMEOUT_S):
                    chunk = await self._stream.receive_some(65_536)
                if not chunk:
                    raise Lost
                self._ready = self._parser.feed(chunk)[::-1]
        except (Lost, trio.BrokenResourceError, trio.TooSlowError) as error:
            self.close()
            raise Lost from error
        return self._ready.pop()

    def close(self) -> None:
        """Close it."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class Watcher(Protocol):
    """What a producer reports to: an `Observer`, or the ledger of timer messages."""

    world: World

    def on_sent(self, sent: Sent) -> None:
        """A client is about to send a message."""

    def on_answer(self, answered: Answered) -> None:
        """A client was answered, or never will be."""


class Producer:
    """Sends bursts to the master until `stop`; `is_idle` once the outcome of all sends is known."""

    def __init__(self, cluster: Machines, options: RunOptions, watch: Watcher, name: str) -> None:
        self.client = Client(cluster, name)
        self._options = options
        self._watch = watch
        self.node = MASTER
        self._name = name
        self._numbers = itertools.count()
        self._go_on = trio.Event()
        self._go_on.set()
        self._is_stopping = False
        self.is_idle = False
        """Paused or stopped, and the outcome of all sends is known"""

    async def run(self) -> None:
        """Sends until stopped."""
        chance = self.client.chance
        while not self._is_stopping:
            try:
                self.node = await self._choose()
                await self.client.connect(self.node)
                while not self._is_stopping:
                    if not self._go_on.is_set():
                        self.is_idle = True
                        await self._go_on.wait()
                        self.is_idle = False
                        raise Lost  # this connection may be half-open without notice
                    await self._burst(chance.randint(1, self._options.burst_max))
                    await trio.sleep(chance.expovariate(1 / self._options.pause_s))
            except Lost:
                self.client.close()
                await trio.sleep(RECONNECT_S * chance.uniform(0.5, 1.5))
        self.client.close()
        self.is_idle = True

    async def _choose(self) -> str:
        """Returns the node to send to. Lost."""
        return MASTER

    async def _burst(self, count: int) -> None:
        now = trio.current_time()
        commands: list[RemotingCommand] = []
        pending: dict[int, None] = {}
        for _ in range(count):
            number = next(self._numbers)
            command, body_id = self._command(number)
            commands.append(command)
            pending[number] = None
            queue_id = int(command.ext_fields["e"])
            self._watch.on_sent(Sent(now, self._name, number, TOPIC, queue_id, body_id))
        try:
            await self.client.send(commands)
            while pending:
                answer = await self.client.receive()
                del pending[answer.opaque]
                self._note(answer)
        finally:
            for number in pending:
                self._watch.on_answer(Answered(trio.current_time(), self._name, number, UNKNOWN, node=self.node))

    def _command(self, number: int) -> tuple[RemotingCommand, bytes]:
        chance, options = self.client.chance, self._options
        body_id = f"{self._name}-{number}".encode()
        body = make_body(body_id, chance.randrange(options.body_size_max))
        unique = f"{self._name}{number:030d}"
        properties = f"UNIQ_KEY\x01{unique}\x02KEYS\x01k{number % 17}\x02TAGS\x01t{number % 3}\x02"
        header = SendMessageRequestV2(
            producer_group="simulated",
            topic=TOPIC,
            default_topic="TBW102",
            default_topic_queue_nums=4,
            queue_id=chance.randrange(options.queue_count),
            sys_flag=0,
            born_timestamp=1,
            flag=0,
            properties=properties,
        )
        command = RemotingCommand(
            RequestCode.SEND_MESSAGE_V2, opaque=number, ext_fields=header.to_ext_fields(), body=body
        )
        return command, body_id

    def _note(self, answer: RemotingCommand) -> None:
        answered = answered_by(answer, trio.current_time(), self._name, self.node)
        text = f"{answered.status} {answered.queue_offset} {answered.physical_offset}"
        self._watch.world.note(f"{self._name} {answer.opaque} {text}")
        self._answered(answered)

    def _answered(self, answered: Answered) -> None:
        self._watch.on_answer(answered)

    def pause(self) -> None:
        """Sends nothing until `resume`."""
        self._go_on = trio.Event()

    def resume(self) -> None:
        """Continues after `pause`."""
        self.is_idle = False
        self._go_on.set()

    def stop(self) -> None:
        """Stops sending."""
        self._is_stopping = True
        self._go_on.set()


class Consumer:
    """Pulls every queue from `node`, endlessly."""

    def __init__(self, cluster: Machines, options: RunOptions, watch: Observer, name: str, node: str) -> None:
        self._client = Client(cluster, name)
        self._watch = watch
        self._name = name
        self._node = node
        self._opaques = itertools.count()
        self.next_offsets = dict.fromkeys(range(options.queue_count), 0)
        """By queue id"""
        self.flags = 4 | 1
        """Flags of pulls: includes a subscription, and commits the offset"""

    def has_reached(self, ends: dict[int, int]) -> bool:
        """Whether it has received everything before these queue offsets."""
        return all(self.next_offsets[queue_id] >= end for queue_id, end in ends.items())

    async def run(self) -> None:
        """Pulls until cancelled."""
        while True:
            try:
                await self._client.connect(self._node)
                while True:
                    for queue_id in self.next_offsets:
                        await self._pull(queue_id)
            except Lost:
                await trio.sleep(RECONNECT_S * self._client.chance.uniform(0.5, 1.5))

    async def _pull(self, queue_id: int) -> None:
        wanted = self.next_offsets[queue_id]
        header = PullMessageRequest(
            consumer_group=f"group-{self._name}",
            topic=TOPIC,
            queue_id=queue_id,
            queue_offset=wanted,
            max_msg_nums=self._client.chance.choice((1, 8, 32)),
            sys_flag=self.flags | (2 if self._client.chance.random() < 0.3 else 0),
            commit_offset=wanted,
            suspend_timeout_millis=PULL_SUSPEND_MS,
            sub_version=0,
            subscription="*",
            expression_type="TAG",
        )
        request = RemotingCommand(
            RequestCode.PULL_MESSAGE, opaque=next(self._opaques), ext_fields=header.to_ext_fields()
        )
        await self._client.send([request])
        answer = await self._client.receive()
        if answer.code == ResponseCode.SUCCESS:
            try:
                records = decode_records(answer.body)
            except RemoteProtocolError as error:
                self._watch.violate("consumers", f"{self._node} serves {wanted} of queue {queue_id} damaged: {error}")
                return
            for record in records:
                body_id = body_id_of(bytes(record.body)) or b"?"
                if body_id == b"?":
                    self._watch.violate("consumers", f"{self._node} serves a body that nobody sent: {record}")
                event = Consumed(
                    trio.current_time(), self._name, TOPIC, queue_id, record.queue_offset, body_id, self._node
                )
                self._watch.on_consumed(event, record.physical_offset)
                wanted = record.queue_offset + 1
            self.next_offsets[queue_id] = wanted
        elif answer.code in (ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_RETRY_IMMEDIATELY):
            self.next_offsets[queue_id] = int(answer.ext_fields["nextBeginOffset"])
        elif "nextBeginOffset" in answer.ext_fields:
            await trio.sleep(0.1)
        else:  # the topic is not known yet, or the node is not ready
            await trio.sleep(0.5)

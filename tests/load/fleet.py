"""Many client connections to one broker from one process: idle ones that only send heartbeats, active ones that send,
pull and commit. Every answer to a send is kept, to be held against the files afterwards.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from itertools import count

import trio

from ha.protocol import java_json
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.scenarios.producing import QUEUE_COUNT, read_answer, send_command

HEARTBEAT, PULL, COMMIT = 34, 11, 15
TOPIC = "flights"
ANSWER_TIMEOUT_S = 30.0
HEARTBEAT_S = 30.0
OPENING_AT_A_TIME = 50


class Fleet:
    """`run` opens the connections and keeps them busy until cancelled or `stop`.

    acked        of each send that was answered SUCCESS: sequence and physical offset, in the order of the answers
    statuses     how often each code came
    lost_connections   connections that ended before `stop`, with the reason; 0 is expected of a healthy broker
    """

    def __init__(self, address: str, *, idle: int, active: int, sends_per_s: float, seed: int = 1) -> None:
        """`sends_per_s`: of all active connections together."""
        self._address = address
        self._idle_count = idle
        self._active_count = active
        self._pause_s = active / sends_per_s
        self._chance = random.Random(seed)
        self._sequences = count()
        self._opening = trio.CapacityLimiter(OPENING_AT_A_TIME)
        self._is_stopping = False
        self.acked_sequences = array("q")
        self.acked_offsets = array("q")
        self.statuses: Counter[int] = Counter()
        self.lost_connections: list[str] = []
        self.open_count = 0
        self.sent_count = 0
        self.pulled_count = 0

    @property
    def connection_count(self) -> int:
        return self._idle_count + self._active_count

    def stop(self) -> None:
        """Ends each connection once its requests are answered."""
        self._is_stopping = True

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(self.connection_count):
                nursery.start_soon(self._live, number, number >= self._idle_count)

    async def wait_open(self, timeout_s: float = 60.0) -> None:
        with trio.fail_after(timeout_s):
            while self.open_count < self.connection_count:  # noqa: ASYNC110
                await trio.sleep(0.05)

    async def _live(self, number: int, is_active: bool) -> None:
        host, _, port = self._address.rpartition(":")
        is_open = False
        try:
            async with self._opening:
                stream = await trio.open_tcp_stream(host, int(port))
                client = _Client(stream)
                await client.ask(_heartbeat(number))
                self.open_count += 1
                is_open = True
            async with stream:
                await (self._work(client, number) if is_active else self._idle(client, number))
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            if not self._is_stopping:
                self.lost_connections.append(f"{number}: {type(error).__name__} {error}")
        finally:
            self.open_count -= is_open

    async def _idle(self, client: _Client, number: int) -> None:
        await trio.sleep(self._chance.random() * HEARTBEAT_S)
        while not self._is_stopping:
            await client.ask(_heartbeat(number))
            await trio.sleep(HEARTBEAT_S)

    async def _work(self, client: _Client, number: int) -> None:
        at = trio.current_time() + self._chance.random() * self._pause_s
        beat_at = at
        queue_id, queue_offset = number % QUEUE_COUNT, 0
        while not self._is_stopping:
            await trio.sleep_until(at)
            at += self._pause_s * (0.5 + self._chance.random())
            self.sent_count += 1
            answer = read_answer(
                await client.ask(send_command(next(self._sequences), self._chance.randrange(10, 1000)))
            )
            self.statuses[answer.code] += 1
            if answer.code == ResponseCode.SUCCESS:
                self.acked_sequences.append(answer.sequence)
                self.acked_offsets.append(answer.physical_offset)
            if number % 4 == 0:
                pulled = await client.ask(_pull(queue_id, queue_offset))
                following = int(pulled.ext_fields.get("nextBeginOffset", queue_offset))
                self.pulled_count += following - queue_offset if pulled.code == ResponseCode.SUCCESS else 0
                queue_offset = following
                await client.ask(_commit(queue_id, queue_offset, number))
            if trio.current_time() >= beat_at:
                beat_at = trio.current_time() + HEARTBEAT_S
                await client.ask(_heartbeat(number))


class _Client:
    """One connection, one request at a time. OSError and Trio's errors if it breaks, TooSlowError without an answer."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._parser = RemotingParser()

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        with trio.fail_after(ANSWER_TIMEOUT_S):
            await self._stream.send_all(encode_command(command))
            while True:
                chunk = await self._stream.receive_some(65536)
                if not chunk:
                    raise ConnectionResetError("closed by the broker")
                for answer in self._parser.feed(chunk):
                    if answer.is_response and answer.opaque == command.opaque:
                        return answer


def _heartbeat(number: int) -> RemotingCommand:
    body = {
        "clientID": f"fleet@{number}",
        "consumerDataSet": [],
        "producerDataSet": [{"groupName": f"fleet{number % 50}"}],
    }
    return RemotingCommand(HEARTBEAT, opaque=1 << 30, body=java_json.dumps(body))


def _pull(queue_id: int, queue_offset: int) -> RemotingCommand:
    fields = {
        "consumerGroup": "fleet",
        "topic": TOPIC,
        "queueId": queue_id,
        "queueOffset": queue_offset,
        "maxMsgNums": 32,
        "sysFlag": 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
    }
    return RemotingCommand(PULL, opaque=(1 << 30) + 1, ext_fields={key: str(value) for key, value in fields.items()})


def _commit(queue_id: int, queue_offset: int, number: int) -> RemotingCommand:
    fields = {
        "consumerGroup": f"fleet{number % 50}",
        "topic": TOPIC,
        "queueId": queue_id,
        "commitOffset": queue_offset,
    }
    return RemotingCommand(COMMIT, opaque=(1 << 30) + 2, ext_fields={key: str(value) for key, value in fields.items()})

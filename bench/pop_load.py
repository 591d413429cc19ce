"""A POP consumer over remoting that needs less processor time than the servers: blocking sockets, no event loop.

Like RocketMQ's push consumer, a connection acknowledges the messages of a pop as soon as it has them, and sends the
next pop in the same write, unless more than UNACKNOWLEDGED_MAX messages have no response to their acknowledgement. A
pop (POP_MESSAGE, 200050) returns up to 32 messages. Each is acknowledged by a request of its own (ACK_MESSAGE, 200051);
with `--batches` all of a pop by one request (BATCH_ACK_MESSAGE, 200151), with an entry for each queue. Bodies are
ignored. Works with any broker that speaks RocketMQ's protocol. Prints one line of JSON with the acknowledged messages
per second.
"""

from __future__ import annotations

import argparse
import base64
import json
import select
import socket
import struct
import time
from collections import deque
from contextlib import ExitStack

from bench.load import FIRST_OPAQUE, READ_BYTES, SILENCE_S, connected
from ha.protocol.remoting import CommandTemplate, RemotingCommand, encode_command

POP, ACK, BATCH_ACK = 200_050, 200_051, 200_151
COUNT_MAX = 32
INVISIBLE_MS = 60_000
POLL_MS = 5_000
_EMPTY = (19, 209, 210)
"""Codes of a pop without messages: PULL_NOT_FOUND, POLLING_FULL, POLLING_TIMEOUT."""
UNACKNOWLEDGED_MAX = 96
"""Number of messages of a connection without a response to their acknowledgement, above which it does not pop: the
default of RocketMQ's popThresholdForQueue"""
_OPAQUE = 2_000_000_001
"""Placeholder in the templates"""


def templates(topic: str, group: str) -> tuple[CommandTemplate, CommandTemplate]:
    """Returns the templates of a pop (to fill in: time, opaque), and of an acknowledgement (queue id, handle, queue
    offset, opaque)."""
    common = {"consumerGroup": group, "topic": topic}
    pop = common | {
        "queueId": "-1",
        "maxMsgNums": str(COUNT_MAX),
        "invisibleTime": str(INVISIBLE_MS),
        "pollTime": str(POLL_MS),
        "bornTime": "<time>",
        "initMode": "0",
        "expType": "TAG",
        "exp": "*",
        "order": "false",
    }
    ack = common | {"queueId": "<queue>", "extraInfo": "<handle>", "offset": "<offset>"}
    opaque = b"%d" % _OPAQUE, b"%d"
    return (
        CommandTemplate(RemotingCommand(POP, _OPAQUE, ext_fields=pop), [(b"<time>", b"%d"), opaque]),
        CommandTemplate(
            RemotingCommand(ACK, _OPAQUE, ext_fields=ack),
            [(b"<queue>", b"%b"), (b"<handle>", b"%b"), (b"<offset>", b"%b"), opaque],
        ),
    )


class Consumer:
    """One connection."""

    def __init__(self, connection: socket.socket, topic: str, group: str, broker_name: str, *, batches: bool) -> None:
        self._connection = connection
        self._topic = topic
        self._group = group
        self._broker_name = broker_name
        self._batches = batches
        self._pop, self._ack = templates(topic, group)
        self._buffer = b""
        self._opaque = FIRST_OPAQUE
        self._pop_mark: bytes | None = None
        """Part of the header of the response to the pop in flight; None if there is no pop in flight"""
        self._unanswered: deque[int] = deque()
        """Number of messages of each acknowledgement without a response, in the order of the requests"""
        self._unacknowledged = 0
        self.acknowledged = 0
        self.pops = self.empty = 0

    def pop(self) -> None:
        """Sends the first pop."""
        self._connection.sendall(self._next_pop())

    def receive(self) -> None:
        """Reads the available responses, acknowledges the messages in them, and sends the next pop. Raises SystemExit
        if the broker closes the connection or rejects a request."""
        chunk = self._connection.recv(READ_BYTES)
        if not chunk:
            raise SystemExit("the broker closed the connection")
        data = self._buffer + chunk
        at, end = 0, len(data)
        frames: list[bytes] = []
        while end - at >= 8:
            length, header_length = struct.unpack_from(">ii", data, at)
            if end - at < 4 + length:
                break
            header = data[at + 8 : at + 8 + (header_length & 0xFFFFFF)]
            if self._pop_mark is not None and self._pop_mark in header:
                self._pop_mark = None
                frames += self._acknowledgements(json.loads(header))
            elif b'"code":0,' in header:
                count = self._unanswered.popleft()
                self._unacknowledged -= count
                self.acknowledged += count
            else:
                raise SystemExit(f"an acknowledgement was refused: {header!r}")
            at += 4 + length
        self._buffer = data[at:]
        if self._pop_mark is None and self._unacknowledged <= UNACKNOWLEDGED_MAX:
            frames.append(self._next_pop())
        if frames:
            self._connection.sendall(b"".join(frames))

    def _next_pop(self) -> bytes:
        opaque = self._next_opaque()
        self._pop_mark = b'"opaque":%d' % opaque
        return self._pop.encode(time.time_ns() // 1_000_000, opaque)

    def _acknowledgements(self, answer: dict[str, object]) -> list[bytes]:
        """Returns the frames that acknowledge the messages of a pop."""
        self.pops += 1
        fields = answer.get("extFields")
        if answer["code"] in _EMPTY:
            self.empty += 1
            return []
        if answer["code"] != 0 or not isinstance(fields, dict):
            raise SystemExit(f"a pop was refused: {answer}")
        pop_time, invisible, revive = fields["popTime"], fields["invisibleTime"], fields["reviveQid"]
        starts = {tuple(part.split(" ")[:2]): part.split(" ")[2] for part in fields["startOffsetInfo"].split(";")}
        frames: list[bytes] = []
        acks: list[dict[str, object]] = []
        popped = 0
        for part in fields["msgOffsetInfo"].split(";"):
            flag, queue, numbers = part.split(" ")
            offsets = numbers.split(",")
            popped += len(offsets)
            start = starts[flag, queue]
            if self._batches:
                bits = sum(1 << (int(offset) - int(start)) for offset in offsets)
                text = base64.b64encode(bits.to_bytes(-(-bits.bit_length() // 8), "little")).decode()
                acks.append(
                    {
                        "c": self._group,
                        "t": self._topic,
                        "r": flag,
                        "so": int(start),
                        "q": int(queue),
                        "rq": int(revive),
                        "pt": int(pop_time),
                        "it": int(invisible),
                        "b": text,
                    }
                )
                continue
            words = f"{start} {pop_time} {invisible} {revive} {flag} {self._broker_name} {queue} ".encode()
            for offset in numbers.encode().split(b","):
                frames.append(self._ack.encode(queue.encode(), words + offset, offset, self._next_opaque()))
        self._unanswered.extend([1] * len(frames))
        if acks:
            body = json.dumps({"brokerName": self._broker_name, "acks": acks}).encode()
            frames.append(encode_command(RemotingCommand(BATCH_ACK, self._next_opaque(), body=body)))
            self._unanswered.append(popped)
        self._unacknowledged += popped
        return frames

    def _next_opaque(self) -> int:
        self._opaque += 1
        return self._opaque


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--broker", required=True, metavar="HOST:PORT")
    parser.add_argument("--broker-name", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--batches", action="store_true", help="acknowledge with 200151")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=2.0, help="warm-up time in seconds")
    options = parser.parse_args()
    host, port = options.broker.rsplit(":", 1)
    with ExitStack() as stack, select.epoll() as poller:
        consumers = {}
        for _ in range(options.connections):
            connection = stack.enter_context(connected(host, int(port)))
            consumers[connection.fileno()] = Consumer(
                connection, options.topic, options.group, options.broker_name, batches=options.batches
            )
            poller.register(connection, select.EPOLLIN)
        for consumer in consumers.values():
            consumer.pop()

        def serve(seconds: float) -> tuple[float, int]:
            """Returns how long it took, and how many messages were acknowledged."""
            began, before = time.perf_counter(), sum(each.acknowledged for each in consumers.values())
            while time.perf_counter() < began + seconds:
                ready = poller.poll(SILENCE_S)
                if not ready:
                    raise SystemExit(f"no response within {SILENCE_S} s")
                for descriptor, _ in ready:
                    consumers[descriptor].receive()
            return time.perf_counter() - began, sum(each.acknowledged for each in consumers.values()) - before

        serve(options.warm)
        cpu_began = time.process_time()
        seconds, count = serve(options.seconds)
        cpu = time.process_time() - cpu_began
    found = {
        "rate": count / seconds,
        "acknowledged": sum(each.acknowledged for each in consumers.values()),
        "client_cores": cpu / seconds,
        "pops": sum(each.pops for each in consumers.values()),
        "empty": sum(each.empty for each in consumers.values()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""A raw remoting client for scenarios: sends with any number in flight, and keeps every answer.

Bodies begin with a ten-digit sequence number, as the readers of tests/interop/stored_files.py expect, so what was
answered can be held against what is stored.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ha.protocol.codes import ResponseCode
from ha.protocol.headers import PullMessageRequest, SendMessageRequestV2
from ha.protocol.record import MessageRecord, decode_records
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.interop.stored_files import heads_at

SEND_MESSAGE_V2, PULL_MESSAGE = 310, 11
QUEUE_COUNT = 4
ANSWER_TIMEOUT_S = 30.0
STORED_CODES = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    }
)


class Answer(NamedTuple):
    """One send's answer. Offsets are -1 if nothing was stored."""

    sequence: int
    code: int
    remark: str
    queue_id: int
    queue_offset: int
    physical_offset: int


def send_command(sequence: int, size: int = 100, *, topic: str = "flights", properties: str = "") -> RemotingCommand:
    body = (b"%010d" % sequence).ljust(size, b"abcdefghijklmnopqrstuvwxyz"[sequence % 26 : sequence % 26 + 1])
    header = SendMessageRequestV2(
        producer_group="scenario",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=QUEUE_COUNT,
        queue_id=sequence % QUEUE_COUNT,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties=properties,
    )
    return RemotingCommand(SEND_MESSAGE_V2, opaque=sequence, ext_fields=header.to_ext_fields(), body=body)


class Client:
    """A blocking connection to a broker. Errors of the socket, timeouts included, are OSError."""

    def __init__(self, address: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = RemotingParser()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def write(self, commands: Iterable[RemotingCommand]) -> None:
        self._socket.sendall(b"".join(map(encode_command, commands)))

    def read(self) -> list[RemotingCommand]:
        """The next answers; none if the broker closed."""
        while True:
            chunk = self._socket.recv(262_144)
            if not chunk:
                return []
            answers = self._parser.feed(chunk)
            if answers:
                return answers

    def ask_all(self, commands: Sequence[RemotingCommand]) -> list[RemotingCommand]:
        """All of them in flight at once; their answers in the same order."""
        self.write(commands)
        answers: dict[int, RemotingCommand] = {}
        while len(answers) < len(commands):
            came = self.read()
            assert came, f"closed after {len(answers)} of {len(commands)} answers"
            answers.update((answer.opaque, answer) for answer in came)
        return [answers[command.opaque] for command in commands]

    def ask(self, command: RemotingCommand) -> RemotingCommand:
        [answer] = self.ask_all([command])
        return answer

    def send(self, sequence: int, size: int = 100, *, topic: str = "flights", properties: str = "") -> Answer:
        command = send_command(sequence, size, topic=topic, properties=properties)
        return read_answer(self.ask(command))

    def send_all(self, sequences: Iterable[int], size: int = 100) -> list[Answer]:
        return [read_answer(answer) for answer in self.ask_all([send_command(each, size) for each in sequences])]

    def pull(self, queue_id: int, queue_offset: int = 0, *, topic: str = "flights") -> list[MessageRecord]:
        """Messages of one queue from `queue_offset` on; AssertionError if there are none."""
        header = PullMessageRequest(
            consumer_group="scenario",
            topic=topic,
            queue_id=queue_id,
            queue_offset=queue_offset,
            max_msg_nums=32,
            sys_flag=4,
            commit_offset=0,
            suspend_timeout_millis=0,
            sub_version=0,
            subscription="*",
            expression_type="TAG",
        )
        answer = self.ask(RemotingCommand(PULL_MESSAGE, opaque=1, ext_fields=header.to_ext_fields()))
        assert answer.code == 0, (answer.code, answer.remark)
        return decode_records(answer.body)


def read_answer(command: RemotingCommand) -> Answer:
    fields = command.ext_fields
    message_id = fields.get("msgId", "")
    return Answer(
        sequence=command.opaque,
        code=command.code,
        remark=command.remark or "",
        queue_id=int(fields.get("queueId", -1)),
        queue_offset=int(fields.get("queueOffset", -1)),
        physical_offset=int(message_id[16:], 16) if message_id else -1,
    )


def sequence_of(record: MessageRecord) -> int:
    return int(bytes(record.body)[:10])


class Load(threading.Thread):
    """Sends without end, `window` in flight, until the connection breaks or `stop`; ends with `error` or None.

    `answers` grows in the order in which they came. Sizes are drawn from `chance`.
    """

    def __init__(self, address: str, first_sequence: int, chance: random.Random, *, window: int = 64) -> None:
        super().__init__(daemon=True)
        self.answers: list[Answer] = []
        self.next_sequence = first_sequence
        self.error: OSError | None = None
        self._chance = chance
        self._window = window
        self._client = Client(address)
        self._grown = threading.Condition()
        self._is_stopping = False
        self.start()

    def run(self) -> None:
        in_flight = 0
        try:
            while not (self._is_stopping and not in_flight):
                commands = []
                while in_flight < self._window and not self._is_stopping:
                    commands.append(send_command(self.next_sequence, self._chance.randrange(10, 1500)))
                    self.next_sequence += 1
                    in_flight += 1
                self._client.write(commands)
                came = self._client.read()
                if not came:
                    return
                in_flight -= len(came)
                with self._grown:
                    self.answers += map(read_answer, came)
                    self._grown.notify_all()
        except OSError as error:
            self.error = error
        finally:
            self._client.close()
            with self._grown:
                self._grown.notify_all()

    def wait_answers(self, count: int) -> None:
        with self._grown:
            enough = self._grown.wait_for(lambda: len(self.answers) >= count or not self.is_alive(), ANSWER_TIMEOUT_S)
        assert enough, f"{len(self.answers)} answers instead of {count}"

    def stop(self) -> list[Answer]:
        """Wait for the answers that are still to come; all of them."""
        self._is_stopping = True
        self.join(ANSWER_TIMEOUT_S)
        assert not self.is_alive()
        return self.answers


def assert_stored(commitlog: Path, answers: Sequence[Answer]) -> None:
    """Assert that each stored message is where its answer says."""
    stored = [answer for answer in answers if answer.code in STORED_CODES]
    if not stored:
        return
    heads = heads_at(commitlog, [answer.physical_offset for answer in stored])
    for answer, head in zip(stored, heads, strict=True):
        assert (answer.sequence, answer.queue_id, answer.queue_offset) == head[:3]

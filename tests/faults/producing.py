"""Producers that survive every fault: they find their broker again, and keep a journal of messages and answers.

A message is never sent twice. Its sequence number, unique in a run, is the first ten digits of its body, so that the
files can be compared with the journal. Messages in flight on a broken connection have no answer: they may be stored or
not.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from tests.checkers.history import make_body
from tests.scenarios.producing import QUEUE_COUNT, Answer, Client, read_answer, send_command

TOPIC = "flights"
SEQUENCES_EACH = 500_000_000
"""A producer's own range of sequence numbers; they are also the opaque ids, which are int32, so there are at most four.
"""
BODY_SIZES = (10, 700)
RETRY_S = 0.05
STOP_TIMEOUT_S = 40.0


def body_id(sequence: int) -> bytes:
    return b"%010d" % sequence


def send_whole(sequence: int, size: int) -> RemotingCommand:
    """A send whose body identifies its message and shows whether it is intact."""
    command = send_command(sequence)
    return msgspec.structs.replace(command, body=make_body(body_id(sequence), size))


class SentAt(NamedTuple):
    """One send, in seconds of the monotonic clock."""

    time_s: float
    sequence: int

    @property
    def queue_id(self) -> int:
        return self.sequence % QUEUE_COUNT


class AnsweredAt(NamedTuple):
    """One answer."""

    time_s: float
    answer: Answer


class JournaledProducer(threading.Thread):
    """Sends with up to `window` messages in flight until `stop`, with pauses of up to `pause_s` to keep the logs small.

    `address` returns the current address of the broker, None while it is unknown.
    """

    def __init__(
        self,
        number: int,
        address: Callable[[], str | None],
        *,
        seed: int,
        window: int = 32,
        pause_s: float = 0.05,
        body_sizes: tuple[int, int] = BODY_SIZES,
        answer_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(daemon=True, name=f"producer-{number}")
        assert 0 <= number < 4
        self.number = number
        self.sent: list[SentAt] = []
        self.answered: list[AnsweredAt] = []
        self.break_count = 0
        """Number of connections that failed or ended with sends in flight"""
        self._address = address
        self._chance = random.Random(seed * 4 + number)
        self._window = window
        self._pause_s = pause_s
        self._body_sizes = body_sizes
        self._answer_timeout_s = answer_timeout_s
        self.next_sequence = number * SEQUENCES_EACH
        self._is_stopping = threading.Event()
        self._grown = threading.Condition()
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                address = self._address()
                try:
                    if address is not None:
                        self._send_until_broken(address)
                        continue
                except OSError:
                    self.break_count += 1
                self._is_stopping.wait(RETRY_S)
        except BaseException as failure:
            self.failure = failure
            raise

    def _send_until_broken(self, address: str) -> None:
        with Client(address, self._answer_timeout_s) as client:
            in_flight = 0
            while in_flight or not self._is_stopping.is_set():
                room = self._chance.randint(1, self._window) - in_flight
                if room > 0 and not self._is_stopping.is_set():
                    sequences = range(self.next_sequence, self.next_sequence + room)
                    commands = [send_whole(each, self._chance.randrange(*self._body_sizes)) for each in sequences]
                    now = time.monotonic()
                    self.sent += [SentAt(now, each) for each in sequences]
                    self.next_sequence += room
                    client.write(commands)
                    in_flight += room
                came = client.read()
                if not came:
                    raise ConnectionResetError("the broker closed")
                in_flight -= len(came)
                now = time.monotonic()
                with self._grown:
                    self.answered += [AnsweredAt(now, read_answer(each)) for each in came]
                    self._grown.notify_all()
                if self._address() != address:
                    return
                self._is_stopping.wait(self._pause_s)

    def wait_answers(self, count: int, timeout_s: float) -> bool:
        """Waits until `count` more answers have arrived; returns whether they did in time."""
        wanted = len(self.answered) + count
        with self._grown:
            return self._grown.wait_for(lambda: len(self.answered) >= wanted, timeout_s)

    def ask_to_stop(self) -> None:
        """Stops sending; it ends when the sends in flight are answered."""
        self._is_stopping.set()

    def stop(self) -> None:
        """Waits for the sends in flight, and ends."""
        self.ask_to_stop()
        self.join(STOP_TIMEOUT_S)
        assert not self.is_alive(), "a producer still waits for an answer"
        if self.failure is not None:
            raise self.failure


def count_statuses(answers: list[Answer]) -> Counter[str]:
    """Answers by status name."""
    return Counter(ResponseCode(answer.code).name for answer in answers)

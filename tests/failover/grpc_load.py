"""Clients of rocketmq-python-client that survive every failover: `python -m tests.failover.grpc_load ENDPOINTS NAME`.

Each kind of message has a sender. A SimpleConsumer and a PushConsumer of different groups receive all of them except
FIFO messages, which a SimpleConsumer of a third group receives. Some messages are not acknowledged, or given back.
GrpcLoad.java (tests/interop/java5) does the same with rocketmq-client-java.

Standard output has what happened, one JSON list a line (grpc_clients.py reads them). After a line on standard input
nothing new is sent, and everything that is received is acknowledged. The process runs until it is killed.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.checkers.grpc_clients import COMMIT, DELAY, FIFO, NORMAL, ROLLBACK

TOPICS = {NORMAL: "Grpc-normal", DELAY: "Grpc-delay", FIFO: "Grpc-fifo", COMMIT: "Grpc-half", ROLLBACK: "Grpc-half"}
SIMPLE, PUSH, ORDERED = "grpc-simple", "grpc-push", "grpc-ordered"
GROUPS = {SIMPLE: (NORMAL, DELAY, COMMIT, ROLLBACK), PUSH: (NORMAL, DELAY, COMMIT, ROLLBACK), ORDERED: (FIFO,)}
"""Consumer groups with the kinds of messages that they receive"""
INVISIBLE_S = 10
"""Of SimpleConsumers: the least that the front accepts"""
PAUSE_S = 0.1
FIFO_PAUSE_S = 0.3
"""FIFO messages are received more slowly: one that is not acknowledged keeps its queue waiting"""
AGAIN_S = 0.2
"""Pause after a failed call"""
DELAYS_S = (1, 2, 6)
FORGET_CHANCE = 0.05
"""That a message is not acknowledged, or fails"""
CHECKER_CHANCE = 0.3
"""That a transaction is left to the producer's checker"""
TRANSACTIONS_PER_PRODUCER = 40
"""This client opens a new stream for checks minutes after the old one has broken; a new producer does at once"""
ENDS_MAX = 5


class Journal:
    """Writes events to standard output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_draining = threading.Event()

    def note(self, *event: object) -> None:
        line = json.dumps(event) + "\n"
        with self._lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    def forgets(self) -> bool:
        """Whether a consumer is to leave a message alone."""
        return not self.is_draining.is_set() and random.random() < FORGET_CHANCE


def recorded(kind: type[Any], journal: Journal, group: str) -> type[Any]:
    """A consumer class that notes what its clients are given and what becomes of it."""

    class Recorded(kind):  # type: ignore[misc]
        async def _receive_coroutine(self, queue: Any, request: Any, patience_s: float) -> Any:
            asked_s = time.time()
            messages = await super()._receive_coroutine(queue, request, patience_s)
            given_s = time.time()
            for message in messages or ():
                message.first_handle = message.receipt_handle  # a change of the invisible time replaces it
                journal.note("given", group, message.body.decode(), message.first_handle, asked_s, given_s)
            return messages

        def _ack(self, message: Any) -> None:
            journal.note("acknowledging", group, message.first_handle)
            super()._ack(message)
            journal.note("acknowledged", group, message.first_handle, time.time())

        def _change_invisible_duration(self, message: Any, invisible_duration: int) -> None:
            journal.note("hidden", group, message.first_handle, time.time() + invisible_duration)
            super()._change_invisible_duration(message, invisible_duration)

    return Recorded


class Load:
    """The clients of one process."""

    def __init__(self, endpoints: str, name: str) -> None:
        from rocketmq import ClientConfiguration, Credentials

        self.journal = Journal()
        self._name = name
        self._configuration = ClientConfiguration(endpoints, Credentials())

    def run(self) -> None:
        """Starts all clients, and returns when nothing new is to be sent."""
        tasks: list[tuple[Callable[..., None], tuple[object, ...]]] = [
            *((self._send, (kind,)) for kind in (NORMAL, DELAY, FIFO)),
            (self._send_transactions, ()),
            (self._receive, (SIMPLE,)),
            (self._receive, (ORDERED,)),
            (self._listen, ()),
        ]
        for call, arguments in tasks:
            threading.Thread(target=call, args=arguments, daemon=True).start()
        sys.stdin.readline()
        self.journal.is_draining.set()

    def _started(self, make: Callable[[], Any]) -> Any:
        """A client that has started, which takes a master."""
        while True:
            client = make()
            try:
                client.startup()
                return client
            except Exception as error:
                self.journal.note("failed", "startup", type(error).__name__)
                time.sleep(AGAIN_S)

    def _attempt(self, what: str, call: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
        """Whether a call succeeds, and its result."""
        try:
            return True, call(*arguments)
        except Exception as error:
            self.journal.note("failed", what, type(error).__name__)
            time.sleep(AGAIN_S)
            return False, None

    def _message(self, kind: str, number: int) -> Any:
        """A new message; notes that it is sent."""
        from rocketmq import Message

        message, key, due_s = Message(), f"{self._name}/{kind}/{number}", 0
        message.topic, message.body = TOPICS[kind], key.encode()
        if kind == DELAY:
            message.delivery_timestamp = due_s = int(time.time()) + random.choice(DELAYS_S)
        elif kind == FIFO:
            message.message_group = f"{self._name}-{number % 3}"
        self.journal.note("sent", key, kind, message.message_group or "", number, due_s)
        return message

    def _send(self, kind: str) -> None:
        from rocketmq import Producer

        producer = self._started(lambda: Producer(self._configuration, [TOPICS[kind]]))
        number = 0
        while not self.journal.is_draining.is_set():
            message = self._message(kind, number)
            number += 1
            is_ok, _ = self._attempt("send", producer.send, message)
            if is_ok:
                self.journal.note("stored", message.body.decode())
            time.sleep(FIFO_PAUSE_S if kind == FIFO else PAUSE_S)

    def _send_transactions(self) -> None:
        number = 0
        producer = self._transaction_producer()
        while not self.journal.is_draining.is_set():
            self._one_transaction(producer, number)
            number += 1
            if number % TRANSACTIONS_PER_PRODUCER == 0:
                producer.shutdown()
                producer = self._transaction_producer()
            time.sleep(PAUSE_S)
        producer.shutdown()
        self._transaction_producer()  # answers checks

    def _transaction_producer(self) -> Any:
        from rocketmq import Producer, TransactionChecker, TransactionResolution

        class Checker(TransactionChecker):  # type: ignore[misc]
            def check(self, message: Any) -> Any:
                is_commit = message.body.decode().split("/")[1] == COMMIT
                return TransactionResolution.COMMIT if is_commit else TransactionResolution.ROLLBACK

        return self._started(lambda: Producer(self._configuration, [TOPICS[COMMIT]], checker=Checker()))

    def _one_transaction(self, producer: Any, number: int) -> None:
        kind = random.choice((COMMIT, COMMIT, ROLLBACK))
        message, transaction = self._message(kind, number), producer.begin_transaction()
        is_ok, _ = self._attempt("half", producer.send, message, transaction)
        if not is_ok:
            return
        self.journal.note("stored", message.body.decode())
        if random.random() >= CHECKER_CHANCE:
            end = transaction.commit if kind == COMMIT else transaction.rollback
            any(self._attempt("end", end)[0] for _ in range(ENDS_MAX))

    def _receive(self, group: str) -> None:
        from rocketmq import SimpleConsumer

        subscribed = self._subscriptions(group)
        kind = recorded(SimpleConsumer, self.journal, group)
        consumer = self._started(lambda: kind(self._configuration, group, subscribed, await_duration=5))
        while True:
            is_ok, messages = self._attempt("receive", consumer.receive, 16, INVISIBLE_S)
            if is_ok and messages:
                self._work_on(consumer, messages, is_ordered=group == ORDERED)

    def _work_on(self, consumer: Any, messages: Sequence[Any], *, is_ordered: bool) -> None:
        for message in messages:
            time.sleep(random.random() * 0.02)
            is_done = not self.journal.forgets() and self._attempt("ack", consumer.ack, message)[0]
            if is_ordered and not is_done:
                return  # it comes again, before the later ones

    def _listen(self) -> None:
        from rocketmq import ConsumeResult, MessageListener, PushConsumer

        journal = self.journal

        class Listener(MessageListener):  # type: ignore[misc]
            def consume(self, message: Any) -> Any:
                time.sleep(random.random() * 0.02)
                return ConsumeResult.FAILURE if journal.forgets() else ConsumeResult.SUCCESS

        subscribed = self._subscriptions(PUSH)
        kind = recorded(PushConsumer, journal, PUSH)
        self._started(lambda: kind(self._configuration, PUSH, Listener(), subscribed, consumption_thread_count=4))

    def _subscriptions(self, group: str) -> dict[str, Any]:
        from rocketmq import FilterExpression

        return {TOPICS[kind]: FilterExpression() for kind in GROUPS[group]}


def main() -> None:
    """Runs until killed."""
    load = Load(*sys.argv[1:])
    load.run()
    threading.Event().wait()


if __name__ == "__main__":
    main()

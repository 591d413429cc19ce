"""Cases of rocketmq-python-client against a gRPC port: `python -m tests.interop.grpc_cases ENDPOINT PREFIX [retry]`.

Runs all cases at the same time, each with the topic PREFIX-NAME and the group PREFIX-NAME-g, and prints "ok NAME" or
"FAIL NAME reason". `SETUPS` says which type a topic has and how a group is configured; the group PREFIX-NAME-reader
reads the dead letters, because consumers of one group must have the same subscriptions. java5/GrpcCases.java has the
same cases for rocketmq-client-java.

With "retry", a consumer's first receive may fail: this client does not wait for the exchange of settings, and until
then RocketMQ's proxy answers a receive with an internal error.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "send and receive": ("NORMAL", {}),
    "push consumer": ("NORMAL", {}),
    "without waiting": ("NORMAL", {}),
    "4 MiB bodies": ("NORMAL", {}),
    "tags": ("NORMAL", {}),
    "SQL92": ("NORMAL", {}),
    "message groups, push": ("FIFO", {"consume_message_orderly": True}),
    "message groups, simple": ("FIFO", {"consume_message_orderly": True}),
    "delay": ("DELAY", {}),
    "recall": ("DELAY", {}),
    "commit": ("TRANSACTION", {}),
    "rollback": ("TRANSACTION", {}),
    "check of a transaction": ("TRANSACTION", {}),
    "redelivery": ("NORMAL", {}),
    "invisible time": ("NORMAL", {}),
    "renewal": ("NORMAL", {}),
    "retries": ("NORMAL", {"retry_max_times": 16}),
    "dead letters": ("NORMAL", {"retry_max_times": 1}),
    "message groups, dead letters": ("FIFO", {"consume_message_orderly": True, "retry_max_times": 1}),
    "priority": ("PRIORITY", {}),
    "unknown topic": ("NORMAL", {}),
    "wrong type": ("NORMAL", {}),
}
"""Case -> type of its topic, configuration of its group. The Python client can't set a priority."""

RETRY_POLICY = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 1000, 1000]}}


def slug(case: str) -> str:
    """The case as part of a name."""
    return case.replace(" ", "-").replace(",", "")


class Case:
    """One case with its clients."""

    def __init__(self, name: str, endpoint: str, prefix: str, *, retries_first: bool) -> None:
        from rocketmq import ClientConfiguration, Credentials

        self.topic = f"{prefix}-{slug(name)}"
        self.group = f"{self.topic}-g"
        self.reader = f"{self.topic}-reader"
        self.configuration = ClientConfiguration(endpoint, Credentials())
        self.retries_first = retries_first
        self.open: list[Any] = []

    def started(self, client: Any) -> Any:
        client.startup()
        self.open.append(client)
        return client

    def producer(self, topic: str = "", checker: Any = None) -> Any:
        from rocketmq import Producer

        return self.started(Producer(self.configuration, [topic or self.topic], checker=checker))

    def simple(self, expression: Any = None) -> Any:
        """A SimpleConsumer whose group has its offsets: its first receive succeeds, without settings."""
        consumer = self.consumer(self.group, self.topic, expression)
        if self.retries_first:
            assert until(10, lambda: not fails(lambda: consumer.receive(1, 10)))
        else:
            consumer.receive(1, 10)
        return consumer

    def consumer(self, group: str, topic: str, expression: Any = None) -> Any:
        from rocketmq import FilterExpression, SimpleConsumer

        subscriptions = {topic: expression or FilterExpression()}
        return self.started(SimpleConsumer(self.configuration, group, subscriptions, await_duration=5))

    def push(self, listen: Callable[[Any], bool]) -> None:
        from rocketmq import ConsumeResult, FilterExpression, MessageListener, PushConsumer

        class Listener(MessageListener):  # type: ignore[misc]
            def consume(self, message: Any) -> Any:
                return ConsumeResult.SUCCESS if listen(message) else ConsumeResult.FAILURE

        subscriptions = {self.topic: FilterExpression()}
        self.started(PushConsumer(self.configuration, self.group, Listener(), subscriptions))

    def message(self, body: bytes = b"body", tag: str = "", **properties: str) -> Any:
        from rocketmq import Message

        message = Message()
        message.topic, message.body = self.topic, body
        if tag:
            message.tag = tag
        for name, value in properties.items():
            message.add_property(name, value)
        return message

    def take(
        self, consumer: Any, count: int, within_s: float, *, invisible_s: int = 30, acks: bool = True
    ) -> list[Any]:
        """Receives until there are `count` messages."""
        found: list[Any] = []
        ends = time.monotonic() + within_s
        while len(found) < count and time.monotonic() < ends:
            for message in consumer.receive(16, invisible_s) or []:
                found.append(message)
                if acks:
                    consumer.ack(message)
        return found

    def close(self) -> None:
        for client in self.open:
            client.shutdown()


def until(within_s: float, condition: Callable[[], bool]) -> bool:
    """Waits for a condition; returns whether it became true."""
    ends = time.monotonic() + within_s
    while not (found := condition()) and time.monotonic() < ends:
        time.sleep(0.05)
    return found


def fails(call: Callable[[], Any]) -> bool:
    """Whether a call raises."""
    try:
        call()
    except Exception:
        return True
    return False


def send_and_receive(case: Case) -> None:
    consumer, producer = case.simple(), case.producer()
    sent = {}
    for number in range(30):
        message = case.message(b"%d" % number, "T", number=str(number))
        message.keys = f"k{number}"
        sent[producer.send(message).message_id] = number
    found = case.take(consumer, 30, 30)
    assert {message.message_id: int(message.body) for message in found} == sent
    for message in found:
        number = message.properties["number"]
        assert (message.tag, message.delivery_attempt, message.topic) == ("T", 1, case.topic)
        assert f"k{number}" in message.keys
        assert message.body == number.encode()


def push_consumer(case: Case) -> None:
    found: list[str] = []

    def listen(message: Any) -> bool:
        found.append(message.message_id)
        return True

    case.push(listen)
    producer = case.producer()
    sent = {producer.send(case.message()).message_id for _ in range(100)}
    assert until(30, lambda: len(found) >= 100), len(found)
    assert (set(found), len(found)) == (sent, 100)


def without_waiting(case: Case) -> None:
    consumer, producer = case.simple(), case.producer()
    futures = [producer.send_async(case.message(b"%d" % number)) for number in range(200)]
    assert len({future.result().message_id for future in futures}) == 200
    found = case.take(consumer, 200, 40)
    assert {int(message.body) for message in found} == set(range(200))


def large_bodies(case: Case) -> None:
    consumer, producer = case.simple(), case.producer()
    sizes = [4 * 1024 * 1024 - 4096, 3 * 1024 * 1024]
    for size in sizes:
        producer.send(case.message(b"x" * size))
    assert sorted(len(message.body) for message in case.take(consumer, 2, 30)) == sorted(sizes)
    assert fails(lambda: producer.send(case.message(b"x" * (4 * 1024 * 1024 + 1))))


def tags(case: Case) -> None:
    from rocketmq import FilterExpression

    consumer, producer = case.simple(FilterExpression("A || C")), case.producer()
    for tag in "ABCABC":
        producer.send(case.message(tag.encode(), tag))
    assert sorted(message.tag for message in case.take(consumer, 5, 12)) == ["A", "A", "C", "C"]


def sql92(case: Case) -> None:
    from rocketmq import FilterExpression
    from rocketmq.grpc_protocol import FilterType

    condition = FilterExpression("price > 10 AND region IN ('eu', 'us')", FilterType.SQL)
    consumer, producer = case.simple(condition), case.producer()
    for price, region in ((5, "eu"), (15, "eu"), (15, "asia"), (20, "us")):
        producer.send(case.message(b"%d" % price, price=str(price), region=region))
    assert sorted(message.body for message in case.take(consumer, 3, 12)) == [b"15", b"20"]


def groups_push(case: Case) -> None:
    found: dict[str, list[int]] = {}
    failed: list[int] = []

    def listen(message: Any) -> bool:
        number = int(message.body)
        if (number, message.message_group) == (5, "g0"):
            failed.append(number)
            if len(failed) == 1:
                return False
        found.setdefault(message.message_group, []).append(number)
        return True

    case.push(listen)
    producer = case.producer()
    for number in range(15):
        for group in ("g0", "g1", "g2"):
            message = case.message(b"%d" % number)
            message.message_group = group
            producer.send(message)
    assert until(40, lambda: sum(map(len, found.values())) >= 45), found
    assert found == {group: list(range(15)) for group in ("g0", "g1", "g2")}
    assert len(failed) == 2


def groups_simple(case: Case) -> None:
    consumer, producer = case.simple(), case.producer()
    for number in range(4):
        message = case.message(b"%d" % number)
        message.message_group = "one"
        producer.send(message)
    # A message is readable soon after its send, not at once: the first pop may come between the first two.
    first = consumer.receive(2, 30) or consumer.receive(2, 30)
    assert [message.body for message in first] in ([b"0"], [b"0", b"1"])
    assert not consumer.receive(16, 30)
    for message in first:
        consumer.ack(message)
    rest = case.take(consumer, 4 - len(first), 20)
    assert [message.body for message in [*first, *rest]] == [b"0", b"1", b"2", b"3"]


def delay(case: Case) -> None:
    consumer, producer, now = case.simple(), case.producer(), int(time.time())
    for seconds in (2, 5):
        message = case.message(b"%d" % (now + seconds))
        message.delivery_timestamp = now + seconds
        producer.send(message)
    for _ in range(2):
        [message] = case.take(consumer, 1, 15)
        assert 0 <= time.time() - int(message.body) < 3.5


def recall(case: Case) -> None:
    consumer, producer, now = case.simple(), case.producer(), int(time.time())
    receipts = []
    for body in (b"recalled", b"kept"):
        message = case.message(body)
        message.delivery_timestamp = now + 5
        receipts.append(producer.send(message))
    assert producer.recall_message(case.topic, receipts[0].recall_handle) == receipts[0].message_id
    assert [message.body for message in case.take(consumer, 2, 12)] == [b"kept"]
    assert fails(lambda: producer.recall_message(case.topic, "bad"))


def checker(asked: list[bytes]) -> Any:
    """Decides by the body, "commit" or "roll back", if at all, and notes what it was asked about."""
    from rocketmq import TransactionChecker, TransactionResolution

    decisions = {b"commit": TransactionResolution.COMMIT, b"roll back": TransactionResolution.ROLLBACK}

    class Checker(TransactionChecker):  # type: ignore[misc]
        def check(self, message: Any) -> Any:
            asked.append(message.body)
            return decisions.get(message.body, TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED)

    return Checker()


def end_transaction(case: Case, *, commits: bool) -> None:
    consumer, producer = case.simple(), case.producer(checker=checker([]))
    transaction = producer.begin_transaction()
    producer.send(case.message(b"half"), transaction)
    assert not consumer.receive(16, 10)
    if commits:
        transaction.commit()
    else:
        transaction.rollback()
    assert len(case.take(consumer, 1, 10)) == int(commits)


def check_transactions(case: Case) -> None:
    asked: list[bytes] = []
    consumer, producer = case.simple(), case.producer(checker=checker(asked))
    for body in (b"commit", b"roll back"):
        producer.send(case.message(body), producer.begin_transaction())
    assert [message.body for message in case.take(consumer, 1, 40)] == [b"commit"]
    assert until(20, lambda: set(asked) == {b"commit", b"roll back"}), asked


def redelivery(case: Case) -> None:
    consumer, producer = case.simple(), case.producer()
    sent_at = time.monotonic()
    producer.send(case.message())
    [first] = case.take(consumer, 1, 10, invisible_s=10, acks=False)
    [second] = case.take(consumer, 1, 30)
    assert (second.message_id, second.delivery_attempt, second.topic) == (first.message_id, 2, case.topic)
    assert 10 <= time.monotonic() - sent_at < 25


def invisible_time(case: Case) -> None:
    consumer, producer = case.simple(), case.producer()
    producer.send(case.message())
    [first] = case.take(consumer, 1, 10, invisible_s=60, acks=False)
    consumer.change_invisible_duration(first, 2)
    assert len(case.take(consumer, 1, 20)) == 1


def renewal(case: Case) -> None:
    """The client keeps the new handle in the message."""
    consumer, producer = case.simple(), case.producer()
    producer.send(case.message())
    [first] = case.take(consumer, 1, 10, invisible_s=10, acks=False)
    consumer.change_invisible_duration(first, 25)
    assert case.take(consumer, 1, 13, acks=False) == []
    consumer.ack(first)
    assert case.take(consumer, 1, 16, acks=False) == []


def retries(case: Case) -> None:
    attempts: list[int] = []

    def listen(message: Any) -> bool:
        attempts.append(message.delivery_attempt)
        return len(attempts) >= 3

    case.push(listen)
    case.producer().send(case.message())
    assert until(40, lambda: len(attempts) >= 3), attempts
    time.sleep(3)
    assert attempts == [1, 2, 3]


def dead_letters(case: Case, *, is_fifo: bool) -> None:
    attempts: list[int] = []
    others: list[bytes] = []

    def listen(message: Any) -> bool:
        if message.body == b"bad":
            attempts.append(message.delivery_attempt)
            return False
        others.append(message.body)
        return True

    case.push(listen)
    producer = case.producer()
    for body in (b"bad", b"good"):
        message = case.message(body)
        if is_fifo:
            message.message_group = "one"
        producer.send(message)
    assert until(60, lambda: len(attempts) >= 2 and others == [b"good"]), (attempts, others)
    dead: list[Any] = []
    ends = time.monotonic() + 40
    while not dead and time.monotonic() < ends:
        time.sleep(1)
        try:
            dead = case.take(case.consumer(case.reader, f"%DLQ%{case.group}"), 1, 10)
        except Exception as error:  # no such topic yet
            print("waiting", error)
    assert [message.body for message in dead] == [b"bad"]
    if not is_fifo:  # this client repeats messages of groups itself, more often than the group says, without counting
        assert attempts == [1, 2]


def unknown_topic(case: Case) -> None:
    from rocketmq import Producer

    topic = f"{case.topic}-no"
    producer = Producer(case.configuration, [topic])
    message = case.message()
    message.topic = topic

    def send() -> None:
        producer.startup()
        producer.send(message)

    assert fails(send)


def wrong_type(case: Case) -> None:
    producer, grouped, delayed = case.producer(), case.message(), case.message()
    grouped.message_group = "g"
    delayed.delivery_timestamp = int(time.time()) + 10
    assert fails(lambda: producer.send(grouped))
    assert fails(lambda: producer.send(delayed))


CASES: dict[str, Callable[[Case], None]] = {
    "send and receive": send_and_receive,
    "push consumer": push_consumer,
    "without waiting": without_waiting,
    "4 MiB bodies": large_bodies,
    "tags": tags,
    "SQL92": sql92,
    "message groups, push": groups_push,
    "message groups, simple": groups_simple,
    "delay": delay,
    "recall": recall,
    "commit": lambda case: end_transaction(case, commits=True),
    "rollback": lambda case: end_transaction(case, commits=False),
    "check of a transaction": check_transactions,
    "redelivery": redelivery,
    "invisible time": invisible_time,
    "renewal": renewal,
    "retries": retries,
    "dead letters": lambda case: dead_letters(case, is_fifo=False),
    "message groups, dead letters": lambda case: dead_letters(case, is_fifo=True),
    "unknown topic": unknown_topic,
    "wrong type": wrong_type,
}


def main() -> None:
    """Runs the cases, and ends the process without waiting for the client's threads."""
    endpoint, prefix, *options = sys.argv[1:]

    def run(name: str) -> None:
        case = Case(name, endpoint, prefix, retries_first=options == ["retry"])
        try:
            CASES[name](case)
        except BaseException as error:
            traceback.print_exc()
            print(f"FAIL {name} {error!r}", flush=True)
        else:
            print(f"ok {name}", flush=True)

    threads = [threading.Thread(target=run, args=(name,)) for name in CASES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

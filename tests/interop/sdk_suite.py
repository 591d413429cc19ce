"""Shared parts of the SDK tests on a running cluster: the cluster fixture, an inbox, and waiting."""

from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from ha.client import Message, Producer, PullConsumer, ReceivedMessage
from ha.errors import BrokerError
from tests.interop.sdk_cluster import HALOG, SdkCluster, running_cluster


@pytest.fixture(scope="module", params=[HALOG, "5.5.0"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkCluster]:
    """The cluster of one file's tests: halog's, then a real one."""
    if request.param != HALOG:
        request.getfixturevalue("java")
    with running_cluster(str(request.param), tmp_path_factory.mktemp("sdk")) as running:
        yield running


class Inbox:
    """A handler that keeps its messages; `refuse` may raise for a message."""

    def __init__(self, refuse: Callable[[ReceivedMessage], None] | None = None) -> None:
        self.messages: list[ReceivedMessage] = []
        self._refuse = refuse
        self._grown = anyio.Event()

    async def __call__(self, message: ReceivedMessage) -> None:
        self.messages.append(message)
        self._grown.set()
        if self._refuse is not None:
            self._refuse(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    async def wait(self, count: int) -> None:
        """Waits until `count` messages have arrived."""
        while len(self.messages) < count:
            self._grown = anyio.Event()
            await self._grown.wait()


async def send_all(cluster: SdkCluster, topic: str, bodies: list[bytes], **fields: Any) -> None:
    async with Producer(cluster.name_server) as producer, anyio.create_task_group() as tasks:
        await producer.send(Message(topic, bodies[0], **fields))
        for body in bodies[1:]:
            tasks.start_soon(producer.send, Message(topic, body, **fields))


async def read_until(cluster: SdkCluster, topic: str, count: int) -> list[ReceivedMessage]:
    """Waits until `topic` has `count` messages, and returns them."""
    async with PullConsumer(cluster.name_server) as pull:
        while True:
            found: list[ReceivedMessage] = []
            try:
                for queue in await pull.queues(topic):
                    found += (await pull.pull(queue, await pull.min_offset(queue))).messages
            except BrokerError:
                pass  # the topic does not exist yet
            if len(found) >= count:
                return found
            await anyio.sleep(0.2)

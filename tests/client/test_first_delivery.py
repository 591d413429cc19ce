"""Delay until a push consumer receives the first message: the consumer, its topic, or the message may come first."""

from pathlib import Path

import pytest
import trio

from ha.client import ClientOptions, ConsumeMode, Message, Producer, PushConsumer, ReceivedMessage, StartFrom
from tests.broker.node import Node
from tests.client.our_broker import NAMES, run_with_our_broker


class Inbox:
    """Time at which the first message arrived."""

    def __init__(self) -> None:
        self.came_at: float | None = None
        self._came = trio.Event()

    async def handle(self, message: ReceivedMessage) -> None:
        if self.came_at is None:
            self.came_at = trio.current_time()
        self._came.set()

    async def wait(self) -> float:
        await self._came.wait()
        assert self.came_at is not None
        return self.came_at


@pytest.mark.parametrize("sent_after_s", [0.5, 3.5, 16, 40, 100])
def test_late_topic_is_found_within_seconds(tmp_path: Path, sent_after_s: float) -> None:
    async def body(node: Node, options: ClientOptions) -> None:
        inbox = Inbox()
        async with (
            PushConsumer(NAMES, inbox.handle, group="g", subscriptions={"T": "*"}, options=options),
            Producer(NAMES, options=options) as producer,
        ):
            await trio.sleep(sent_after_s)
            await producer.send(Message("T", b"creates its topic"))
            sent_at = trio.current_time()
            assert await inbox.wait() - sent_at <= 5.0

    run_with_our_broker(tmp_path, body)


@pytest.mark.parametrize("mode", ConsumeMode)
@pytest.mark.parametrize("turns", range(0, 200, 40))
def test_message_stored_during_startup_is_delivered_at_once(tmp_path: Path, turns: int, mode: ConsumeMode) -> None:
    """`turns`: scheduler passes after the consumer started, during a lookup, a heartbeat or a pull."""

    async def body(node: Node, options: ClientOptions) -> None:
        inbox = Inbox()

        async def send_soon() -> None:
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            await node.send(b"x", b="T", e=turns % 4)

        await node.ask(
            17,
            topic="T",
            defaultTopic="TBW102",
            readQueueNums=4,
            writeQueueNums=4,
            perm=6,
            topicFilterType="SINGLE_TAG",
            topicSysFlag=0,
            order=False,
        )
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_soon)
            async with PushConsumer(
                NAMES,
                inbox.handle,
                group="g",
                subscriptions={"T": "*"},
                mode=mode,
                start_from=StartFrom.FIRST,
                options=options,
            ):
                assert await inbox.wait() == began_at

    run_with_our_broker(tmp_path, body)

"""Producer.recall: with scripted brokers, and with a whole halog broker."""

from __future__ import annotations

import itertools
from pathlib import Path

import anyio
import pytest

from ha.client import ClientOptions, Message, Producer, PullConsumer
from ha.errors import BrokerError, RemoteProtocolError, RequestTimedOut, RouteNotFound
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.recall_handle import RecallHandle, encode_recall_handle
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import Node, WallClock
from tests.client.backends import on_both_backends
from tests.client.fake_broker import stored
from tests.client.our_broker import NAMES, run_with_our_broker
from tests.client.test_producer import Cluster, open_producer

HANDLE = encode_recall_handle(RecallHandle("T", "b", 2_000_000_000_000, "K1"))


def with_handle(command: RemotingCommand) -> RemotingCommand:
    """A broker's answer to a timer message."""
    answer = stored(command)
    answer.ext_fields["recallHandle"] = HANDLE
    return answer


class Recalls:
    """Answers recalls with each of `codes` in turn, again and again."""

    def __init__(self, *codes: ResponseCode) -> None:
        self.codes = itertools.cycle(codes)

    def __call__(self, command: RemotingCommand) -> RemotingCommand:
        code = next(self.codes)
        return command.reply(code, "the remark" if code else None, {} if code else {"msgId": "K1"})


@on_both_backends(open_producer, [with_handle])
async def test_a_result_has_the_handle(producer: Producer, cluster: Cluster) -> None:
    assert (await producer.send(Message("T", b"later", delay_s=60))).recall_handle == HANDLE


@on_both_backends(open_producer, [stored])
async def test_an_ordinary_result_has_none(producer: Producer, cluster: Cluster) -> None:
    assert (await producer.send(Message("T", b"now"))).recall_handle is None


@on_both_backends(open_producer, [stored, Recalls(ResponseCode.SUCCESS)])
async def test_it_asks_the_broker_that_has_the_message(producer: Producer, cluster: Cluster) -> None:
    assert await producer.recall(HANDLE) == "K1"
    (command,) = cluster.brokers[1].commands
    assert command.code == RequestCode.RECALL_MESSAGE
    assert command.ext_fields == {"topic": "T", "recallHandle": HANDLE, "producerGroup": "g", "bname": "b"}


@on_both_backends(
    open_producer, [stored, Recalls(ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY, ResponseCode.SUCCESS)]
)
async def test_it_retries_while_the_broker_can_not_store(producer: Producer, cluster: Cluster) -> None:
    assert await producer.recall(HANDLE) == "K1"
    assert len(cluster.brokers[1].commands) == 3


@on_both_backends(open_producer, [stored, Recalls(ResponseCode.ILLEGAL_OPERATION)])
async def test_a_rejection_is_raised(producer: Producer, cluster: Cluster) -> None:
    with pytest.raises(BrokerError) as caught:
        await producer.recall(HANDLE)
    assert (caught.value.code, caught.value.remark) == (604, "the remark")


@on_both_backends(open_producer, [stored, Recalls(ResponseCode.SERVICE_NOT_AVAILABLE)])
async def test_it_ends_with_its_timeout(producer: Producer, cluster: Cluster) -> None:
    with pytest.raises(BrokerError) as caught:
        await producer.recall(HANDLE, timeout_s=0.3)
    assert caught.value.code == 14


@on_both_backends(open_producer, [stored, lambda command: None])
async def test_it_times_out_if_the_last_attempt_is_not_answered(producer: Producer, cluster: Cluster) -> None:
    """It may have been executed, whatever became of the attempt before."""
    broker = cluster.brokers[1]

    def reject_first(command: RemotingCommand) -> RemotingCommand | None:
        return command.reply(ResponseCode.SERVICE_NOT_AVAILABLE) if len(broker.commands) == 1 else None

    broker.handler = reject_first
    with pytest.raises(RequestTimedOut):
        await producer.recall(HANDLE, timeout_s=0.5)
    assert len(broker.commands) == 2


@on_both_backends(open_producer, [stored, stored])
@pytest.mark.parametrize("code", [ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.ILLEGAL_OPERATION])
async def test_a_rejection_says_that_an_earlier_attempt_may_have_been_executed(
    producer: Producer, cluster: Cluster, *, code: ResponseCode
) -> None:
    broker = cluster.brokers[1]

    def lose_then_reject(command: RemotingCommand) -> RemotingCommand | bytes:
        return command.reply(code) if len(broker.commands) > 1 else b"\xff" * 8

    broker.handler = lose_then_reject
    with pytest.raises(BrokerError) as caught:
        await producer.recall(HANDLE, timeout_s=0.5)
    assert (caught.value.code, caught.value.was_sent) == (code, True)


@on_both_backends(open_producer, [stored])
async def test_handles_are_checked(producer: Producer, cluster: Cluster) -> None:
    with pytest.raises(RemoteProtocolError):
        await producer.recall("no handle")
    elsewhere = encode_recall_handle(RecallHandle("other", "b", 1, "K1"))
    with pytest.raises(RouteNotFound):
        await producer.recall(elsewhere)


def test_a_message_that_a_halog_broker_recalled_does_not_come(tmp_path: Path) -> None:
    async def body(node: Node, options: ClientOptions) -> None:
        async with Producer(NAMES, options=options, wall_clock_ms=WallClock()) as producer:
            await producer.send(Message("TT", b"now"))
            sent = [await producer.send(Message("TT", text, delay_s=30)) for text in (b"no", b"yes")]
            assert sent[0].recall_handle is not None
            assert await producer.recall(sent[0].recall_handle) == sent[0].message_id
            await anyio.sleep(40)
            with pytest.raises(BrokerError, match="timestamp invalid"):
                await producer.recall(sent[1].recall_handle or "")
        found = []
        async with PullConsumer(NAMES, group="g", options=options) as consumer:
            for queue in await consumer.queues("TT"):
                found += [message.body for message in (await consumer.pull(queue, 0)).messages]
        assert sorted(found) == [b"now", b"yes"]

    run_with_our_broker(tmp_path, body)

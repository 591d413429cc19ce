"""POP: acknowledgements, one by one and many together (spec pop.md)."""

from __future__ import annotations

import tracemalloc
from base64 import b64encode

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.journal import NO_MASTER
from ha.broker.refused import RefusedError
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.broker.node import Node, text
from tests.broker.pop_client import Popped, ack, ack_fields, bodies, change, pop_messages, send


async def test_ack_checks(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node)
    assert (await ack(node, message, topic="X")).code == 17
    assert (await ack(node, message, queueId=4)).code == 13
    assert (await ack(node, message, queueId=-1)).code == 13
    assert (await ack(node, message, offset=2)).code == 208
    assert (await ack(node, message, extraInfo="1 2 3")).code == 1
    assert (await ack(node, message, extraInfo="a b c d e f g h")).code == 1
    assert (await ack(node, message, consumerGroup="stranger")).code == 0
    assert (await ack(node, message)).code == 0
    assert (await ack(node, message)).code == 0
    await trio.sleep(20)
    assert await pop_messages(node) == []


async def pop_20(node: Node) -> list[Popped]:
    """Sends 20 messages and pops them, at most 7 together."""
    await send(node, *(b"%d" % number for number in range(20)))
    return [message for _ in range(3) for message in await pop_messages(node, maxMsgNums=7)]


async def acks_of_one_chunk(node: Node, messages: list[Popped]) -> list[RemotingCommand]:
    """Acknowledges messages with one chunk of requests; returns their answers."""
    commands = [
        RemotingCommand(
            200051, opaque=number, ext_fields={name: text(value) for name, value in ack_fields(each).items()}
        )
        for number, each in enumerate(messages)
    ]
    stream = node.listener.connect()
    await stream.send_all(b"".join(map(encode_command, commands)))
    await wait_all_tasks_blocked()
    answers = RemotingParser().feed(await stream.receive_some())
    await stream.aclose()
    return answers


@pytest.mark.parametrize("slice_s", [1.0, 0.0])
async def test_acks_of_one_chunk_are_one_record_however_long_they_take(
    node: Node, monkeypatch: pytest.MonkeyPatch, slice_s: float
) -> None:
    monkeypatch.setattr("ha.broker.processor.TIME_SLICE_S", slice_s)
    messages = await pop_20(node)
    before = node.store.log.next_queue_offset("rmq_sys_halog_pop", 0)
    answers = await acks_of_one_chunk(node, messages)
    assert [(answer.opaque, answer.code) for answer in answers] == [(number, 0) for number in range(20)]
    if slice_s:
        assert node.store.log.next_queue_offset("rmq_sys_halog_pop", 0) == before + 1
    await trio.sleep(20)
    assert await pop_messages(node) == []


@pytest.mark.parametrize("is_master", [True, False])
async def test_acks_of_one_chunk_are_refused_one_by_one(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_master: bool
) -> None:
    def refuse() -> None:
        raise RefusedError(ResponseCode.SYSTEM_BUSY, "")

    messages = await pop_20(node)
    if is_master:
        monkeypatch.setattr(node.broker.pop._pop_log, "call", lambda waiter, count: waiter(NO_MASTER))
    else:
        monkeypatch.setattr(node.broker.pop._pop_log, "ready_state", refuse)
    code = NO_MASTER.status.response_code if is_master else ResponseCode.SYSTEM_BUSY
    answers = await acks_of_one_chunk(node, messages)
    assert sorted((answer.opaque, answer.code) for answer in answers) == [(number, code) for number in range(20)]


async def test_acks_are_served_at_once_unless_the_pop_log_is_being_read(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node)
    node.listener.connect()
    await wait_all_tasks_blocked()
    *_, connection = node.broker.servers[0].connections
    fields = {name: text(value) for name, value in ack_fields(message).items()}
    acks = [RemotingCommand(200051, ext_fields=fields), RemotingCommand(200051, ext_fields={})]
    log = node.broker.pop._pop_log
    state, log.state = log.state, None
    assert node.broker.processor.take(connection, acks) == acks
    log.state = state
    assert node.broker.pop.in_flight_count("g", "TT", 0) == 1
    assert node.broker.processor.take(connection, acks) == []
    assert node.broker.pop.in_flight_count("g", "TT", 0) == 0


async def test_ack_with_a_foreign_handle_has_no_effect(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node, invisibleTime=1000)
    words = message.handle.encode().split(" ")
    words[1] = str(int(words[1]) - 1)
    assert (await ack(node, message, extraInfo=" ".join(words))).code == 0
    assert (await ack(node, message, consumerGroup="h")).code == 0
    assert bodies(await pop_messages(node, pollTime=5000)) == [b"a"]


async def test_handle_used_after_its_time(node: Node) -> None:
    """It acknowledges nothing once the message was delivered again: the new handle is the valid one."""
    await send(node, b"a")
    [old] = await pop_messages(node, invisibleTime=1000)
    [new] = await pop_messages(node, invisibleTime=1000, pollTime=5000)
    assert (await ack(node, old)).code == 0
    answer, _ = await change(node, old, 60_000)
    assert answer.code == 0
    [newest] = await pop_messages(node, pollTime=5000)
    assert newest.record.reconsume_times == new.record.reconsume_times + 1 == 2


async def test_batch_ack(node: Node) -> None:
    await send(node, *(b"%d" % number for number in range(10)))
    messages = await pop_messages(node, invisibleTime=1000)
    pop_time = messages[0].handle.pop_time_ms
    body = (
        b'{"brokerName":"b0","acks":[{"c":"g","t":"TT","r":"0","so":0,"q":0,"rq":0,"pt":%d,"it":1000,"b":"fwM="},'
        b'{"c":"g","t":"TT","r":"0","so":8,"q":0,"rq":0,"pt":%d,"it":1000,"b":"gA=="},'
        b'{"c":"g","t":"none","r":"1","so":8,"q":7,"rq":0,"pt":1,"it":1000,"b":"gA=="}]}' % (pop_time, pop_time)
    )  # 0111 1111, 0000 0011
    assert (await node.ask(200151, body)).code == 0
    assert (await node.ask(200151)).code == 208
    assert (await node.ask(200151, body.replace(b'"b":"gA=="', b'"b":"!"'))).code == 1
    assert bodies(await pop_messages(node, pollTime=5000)) == [b"7"]


async def test_bits_beyond_the_limit_are_not_expanded(node: Node) -> None:
    """1.4 MiB of them took 400 MiB of memory, and a request may have 16 MiB."""
    bits = b64encode(b"\xff" * 8192)
    acks = [b'{"c":"g","t":"TT","r":"0","so":0,"q":0,"rq":0,"pt":1,"it":1000,"b":"%b"}' % bits] * 16
    body = b'{"brokerName":"b0","acks":[%b]}' % b",".join(acks)
    tracemalloc.start()
    try:
        assert (await node.ask(200151, body)).code == 29
        assert tracemalloc.get_traced_memory()[1] < 50 * len(body)
    finally:
        tracemalloc.stop()


async def test_batch_ack_is_limited(node: Node) -> None:
    await send(node, b"a")
    [message] = await pop_messages(node, invisibleTime=1000)
    ack = b'{"c":"g","t":"TT","r":"0","so":0,"q":0,"rq":0,"pt":%d,"it":1000,"b":"%b"}'

    async def code_of(*sizes: int) -> int:
        acks = b",".join(
            ack % (message.handle.pop_time_ms, b64encode(b"\xff" * size if size < 9000 else bytes(size)))
            for size in sizes
        )
        return (await node.ask(200151, b'{"brokerName":"b0","acks":[%b]}' % acks)).code

    assert await code_of(512, 1) == 29
    assert await code_of(9000) == 1
    assert bodies(await pop_messages(node, pollTime=5000)) == [b"a"]
    assert await code_of(512) == 0

"""Pulls with an SQL92 condition: results, progress, long polling; and 46."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.filters import FILTER_COUNT_MAX, _compiled_or_fault
from ha.broker.queue_read import SCAN_COUNT_MIN
from ha.protocol import java_json
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import Node, open_node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path, enable_property_filter=True) as node:
        yield node


def sql(expression: str | None, **changes: Any) -> dict[str, Any]:
    return {"subscription": expression, "expressionType": "SQL92", **changes}


async def fill(node: Node, *numbers: int) -> None:
    """Messages with property a, and its value as body."""
    for number in numbers:
        await node.send(b"%d" % number, i=f"a\x01{number}\x02TAGS\x01TagA\x02")
    await node.dispatched()


def bodies(node: Node, answer: RemotingCommand) -> list[int]:
    return [int(record.body) for record in node.records(answer)]


async def test_matching_messages_are_returned(node: Node) -> None:
    await fill(node, *range(10))
    answer = await node.pull(0, **sql("a BETWEEN 3 AND 5 OR a = 9 AND TAGS = 'TagA'"))
    assert (answer.code, answer.remark, answer.ext_fields["nextBeginOffset"]) == (0, "FOUND", "10")
    assert bodies(node, answer) == [3, 4, 5, 9]
    answer = await node.pull(4, **sql("a <= 5"))
    assert bodies(node, answer) == [4, 5]
    answer = await node.pull(0, **sql("a > 100"))
    assert (answer.code, answer.remark, answer.ext_fields["nextBeginOffset"]) == (20, "NO_MATCHED_MESSAGE", "10")
    assert bytes(answer.body) == b""


async def test_answer_is_bounded(node: Node) -> None:
    """The next pull continues with the first message that did not fit."""
    await fill(node, *range(100))
    answer = await node.pull(0, **sql("a >= 10", maxMsgNums=5))
    assert (bodies(node, answer), answer.ext_fields["nextBeginOffset"]) == ([10, 11, 12, 13, 14], "15")
    answer = await node.pull(0, **sql("a >= 10", maxMsgNums=1000))
    assert (bodies(node, answer), answer.ext_fields["nextBeginOffset"]) == ([*range(10, 42)], "42")
    size = len(answer.body) // 32
    answer = await node.pull(0, **sql("a >= 10", maxMsgBytes=3 * size))
    assert bodies(node, answer) == [10, 11, 12]
    answer = await node.pull(0, **sql("a >= 10", maxMsgBytes=1))
    assert bodies(node, answer) == [10], "one message at least"


async def test_scanned_messages_are_bounded(node: Node) -> None:
    await fill(node, *range(SCAN_COUNT_MIN + 100))
    answer = await node.pull(0, **sql("a = 890"))
    assert answer.code == 20
    next_offset = int(answer.ext_fields["nextBeginOffset"])
    assert SCAN_COUNT_MIN <= next_offset < SCAN_COUNT_MIN + 32
    assert bodies(node, await node.pull(next_offset, **sql("a = 890"))) == [890]


async def test_messages_without_properties(node: Node) -> None:
    await node.send(b"1", i=None)
    await node.send(b"2", i="b\x01x\x02")
    await node.dispatched()
    assert bodies(node, await node.pull(0, **sql("a IS NULL AND (b = 'x' OR b IS NULL)"))) == [1, 2]
    assert (await node.pull(0, **sql("a = 'x'"))).code == 20


async def test_matching_message_wakes_a_held_pull(node: Node) -> None:
    await fill(node, 1)
    began = trio.current_time()

    async def send_later() -> None:
        for number in (2, 3, 70, 4):
            await trio.sleep(1)
            await fill(node, number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_later)
        answer = await node.pull(1, sysFlag=6, **sql("a > 50"))
        assert trio.current_time() - began == 3.0
    assert (bodies(node, answer), answer.ext_fields["nextBeginOffset"]) == ([70], "4")


async def heartbeat(node: Node, expression: str, *, version: int = 7) -> None:
    subscription = {"topic": "TT", "subString": expression, "expressionType": "SQL92", "subVersion": version}
    consumer = {"groupName": "g", "subscriptionDataSet": [subscription]}
    answer = await node.ask(34, java_json.dumps({"clientID": "c", "consumerDataSet": [consumer]}))
    assert answer.code == 0


async def test_condition_registered_by_a_heartbeat(node: Node) -> None:
    await fill(node, *range(5))
    await heartbeat(node, "a > 2")
    registered: dict[str, Any] = {"sysFlag": 0, "subscription": None}
    assert bodies(node, await node.pull(0, subVersion=7, **registered)) == [3, 4]
    assert (await node.pull(0, subVersion=8, **registered)).code == 25
    await heartbeat(node, "a >", version=9)
    answer = await node.pull(0, subVersion=9, **registered)
    assert answer.code == 27
    assert "filter data is not exist" in str(answer.remark)


async def test_invalid_conditions_are_refused(node: Node) -> None:
    await fill(node, 1)
    for expression, kind, code in (
        ("a >", "SQL92", 23),
        ("", "SQL92", 23),
        (None, "SQL92", 23),
        ("a" * 5000, "SQL92", 23),
        ("a > 1", "sql92", 1),
        ("a > 1", "XQUERY", 1),
    ):
        answer = await node.pull(0, subscription=expression, expressionType=kind)
        assert answer.code == code, expression
        assert answer.remark is not None
        assert len(answer.remark) < 500


def check_body(expression: str, kind: str | None = "SQL92") -> bytes:
    subscription = {"topic": "TT", "subString": expression, "subVersion": 1}
    if kind is not None:
        subscription["expressionType"] = kind
    return java_json.dumps({"clientId": "c", "group": "g", "subscriptionData": subscription})


async def test_client_checks_a_condition_before_subscribing(node: Node) -> None:
    for expression, kind, code in (
        ("a > 1", "SQL92", 0),
        ("a >", "SQL92", 23),
        ("", "SQL92", 23),
        ("a || b", "TAG", 0),
        ("a || b", None, 0),
        ("a > 1", "XQUERY", 23),
    ):
        assert (await node.ask(46, check_body(expression, kind))).code == code, expression
    assert (await node.ask(46, b"[")).code == 1


async def test_filters_need_the_configuration_key(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await fill(node, 1)
        remark = "The broker does not support consumer to filter message by SQL92"
        for answer in (await node.pull(0, **sql("a > 0")), await node.ask(46, check_body("a > 1"))):
            assert (answer.code, answer.remark) == (1, remark)
        assert (await node.ask(46, check_body("a", "TAG"))).code == 0


async def test_compiled_conditions_are_bounded(node: Node) -> None:
    await fill(node, 1)
    for number in range(FILTER_COUNT_MAX + 10):
        await node.pull(0, **sql(f"a > {number}"))
        await node.pull(0, **sql(f"a > {number} OR"))
    info = _compiled_or_fault.cache_info()
    assert info.currsize == info.maxsize == FILTER_COUNT_MAX
    await node.pull(0, **sql("a > 265 OR"))
    assert _compiled_or_fault.cache_info().misses == info.misses
    for number in range(10):
        assert (await node.pull(0, **sql(f"a > {number:05000}"))).code == 23
    assert _compiled_or_fault.cache_info().misses == info.misses, "long ones are not kept"

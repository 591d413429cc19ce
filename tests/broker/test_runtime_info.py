"""Runtime statistics, configuration and addresses of a broker: 28, 26, 25, 906."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.options import BrokerRole
from ha.broker.runtime_info import byte_text
from ha.broker.throughput import GroupReads, Throughput
from ha.protocol import java_json
from ha.protocol.batch import encode_batch
from tests.broker.node import Node, open_node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path, ha_address="10.0.0.2:10912") as node:
        yield node


async def runtime(node: Node) -> dict[str, str]:
    answer = await node.ask(28)
    assert answer.code == 0
    table: dict[str, str] = java_json.loads(answer.body)["table"]
    assert all(type(value) is str for value in table.values())
    return table


async def test_statistics_follow_puts_and_pulls(node: Node) -> None:
    empty = await runtime(node)
    assert (empty["commitLogMaxOffset"], empty["earliestMessageTimeStamp"]) == ("0", "-1")
    assert (empty["putTps"], empty["getTransferredTps"]) == ("  ", "  "), "nothing is known yet"
    assert (empty["brokerVersionDesc"], empty["brokerActive"]) == ("V5_3_3", "true")
    for number in range(20):
        await node.send(b"%d" % number)
    await node.send(b="T T")
    await node.dispatched()
    await node.pull(0, maxMsgNums=8)
    await node.pull(20)
    await trio.sleep(10.5)
    table = await runtime(node)

    def rates(name: str) -> list[float]:
        return [float(text) for text in table[name].split(" ") if text]

    for name, expected in (("put", 2), ("getTransferred", 0.8), ("getFound", 0.1), ("getMiss", 0.1), ("getTotal", 0.2)):
        assert rates(f"{name}Tps") == [pytest.approx(expected, rel=0.05)], name
    assert (table["msgPutTotalTodayNow"], table["msgGetTotalTodayNow"]) == ("20", "8")
    assert (table["msgPutTotalTodayMorning"], table["msgPutTotalYesterdayMorning"]) == ("0", "0")
    assert table["commitLogMaxOffset"] == table["putMessageSizeTotal"] == str(node.store.log.max_offset.value)
    assert (table["dispatchBehindBytes"], table["sendThreadPoolQueueSize"]) == ("0", "0")
    [first] = node.records(await node.pull(0, maxMsgNums=1))
    assert table["earliestMessageTimeStamp"] == str(first.store_timestamp_ms)
    assert 0 < float(table["commitLogDiskRatio"]) < 1
    assert table["commitLogDirCapacity"].startswith("Total : ")
    await trio.sleep(60)
    table = await runtime(node)
    assert rates("putTps") == [0, pytest.approx(0, abs=0.4)]
    assert table["runtime"] == "[ 0 days, 0 hours, 1 minutes, 10 seconds ]"


async def test_batch_counts_its_messages_and_refused_sends_do_not_count(node: Node) -> None:
    answer = await node.send(encode_batch([(0, b"a", b""), (0, b"b", b""), (0, b"c", b"")]), code=320, m=True)
    assert answer.code == 0
    assert node.broker.put_service.stored_count == 3
    assert (await node.send(b"x" * (4 << 20) + b"x")).code == 13
    assert (await node.send(i="p\x01" + "x" * 40_000 + "\x02")).code == 13
    assert node.broker.put_service.stored_count == 3


async def test_daily_totals() -> None:
    now_ms = int(time.mktime((2026, 6, 10, 12, 0, 0, 0, 0, -1))) * 1000
    put_count = 5
    reads = GroupReads(key_count_max=1)
    throughput = Throughput(lambda: put_count, reads, wall_clock_ms=lambda: now_ms)
    throughput.take_sample()
    assert tuple(throughput.puts_by_day()) == (0, 0, 5)
    now_ms += 13 * 3_600_000
    throughput.take_sample()
    put_count = 8
    reads.note("g", "T", 0, 1, 2)
    assert tuple(throughput.puts_by_day()) == (0, 5, 8)
    now_ms += 24 * 3_600_000
    throughput.take_sample()
    assert tuple(throughput.puts_by_day()) == (5, 8, 8)
    assert tuple(throughput.gets_by_day()) == (0, 2, 2)


def test_sizes_as_text() -> None:
    texts = [byte_text(size) for size in (0, 1023, 1024, 1536, 1 << 20, 5 << 30, 1 << 63)]
    assert texts == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "8.0 EiB"]


async def test_configuration_is_shown_and_can_not_be_changed(node: Node) -> None:
    node.broker.admin.info.describe = lambda: {"listenPort": "10911", "brokerPermission": "6"}
    answer = await node.ask(26)
    assert bytes(answer.body) == b"brokerPermission=6\nlistenPort=10911\n"
    assert java_json.loads(answer.ext_fields["version"].encode())["counter"] >= 0
    assert (await node.ask(25, bytes(answer.body))).code == 0
    assert (await node.ask(25, b"# x\n\nbrokerPermission = 6\n")).code == 0
    refused = await node.ask(25, b"brokerPermission=4\nfoo=1\n")
    assert refused.code == 16
    assert refused.remark == (
        "nothing can be changed while the broker runs, set it in its file: brokerPermission is 6; foo is no key here"
    )
    assert len((await node.ask(25, b"k%d=1\n" * 5000)).remark or "") <= 1000
    assert (await node.ask(25, b"#" * 70_000)).code == 1


async def test_addresses_for_replicas(node: Node, tmp_path: Path) -> None:
    answer = await node.ask(906)
    expected: dict[str, Any] = {
        "masterHaAddress": "10.0.0.2:10912",
        "masterFlushOffset": "0",
        "masterAddress": "10.0.0.1:10911",
    }
    assert (answer.code, answer.ext_fields) == (0, expected)
    assert (await node.ask(906, masterHaAddress="h:1", masterAddress="h:2")).ext_fields == {}
    async with open_node(tmp_path / "slave", role=BrokerRole.SLAVE) as slave:
        assert (await slave.ask(906)).ext_fields == {}
        assert (await runtime(slave))["brokerActive"] == "false"

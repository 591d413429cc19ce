"""RocketMQ's own mqadmin, run against a real broker and halog: both must show the same.

Each broker first receives the same requests. Addresses, times and ids, which differ from run to run, are normalized;
counts of messages, queues, offsets and groups are compared as they are.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.interop.broker import Broker
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import JavaClient, open_java_client
from tests.interop.mqadmin import MqAdmin, open_mqadmin
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server

TOPIC, ORDERED = "admin", "second"
READERS, WATCHERS, MAKERS = "readers", "watchers", "makers"
COUNT = 12
BORN_MS = 1_700_000_000_000
# Values that differ from run to run.
VOLATILE = (
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d{3})?", "TIME"),
    (r"7F000001[0-9A-F]{24}", "OFFSET-ID"),
    (r"[\d.]+@c\d+", "CLIENT"),
    (r"lastUpdateTimestamp=\d+", "lastUpdateTimestamp=T"),
    (r"(Physic|physic)(Offset|Size)=\d+", "place"),
    (r"(CommitLog Offset: *)\d+", r"\1N"),
    (r"(TPS: *)[\d.]+", r"\1N"),
    (r"(write perm of broker.*OK, )\d+", r"\1N"),
    (r"\d{13}@", "T@"),
    (r"@\d+(?= *$)", "@N"),
    # Values that 4.9.7 does not write into messages, or writes in another order.
    (r"Properties: *\{.*\}", "PROPERTIES"),
    (r"#MasterCommitLogMaxOffset\t\d+", "#MasterCommitLogMaxOffset N"),
    (r"\d+/CLIENT", "T/CLIENT"),
    (r"timestamp\(long\)\[\d+\]", "timestamp(long)[T]"),
)

TOOL = "(CLIENT_INNER_PRODUCER)"
"""mqadmin's own producer, known to a broker after its first heartbeat"""


@dataclass
class Site:
    """A broker with its name server, and mqadmin's output for it."""

    broker: Broker
    tool: MqAdmin
    remoting: RemotingClient
    printed: dict[str, str] = field(default_factory=dict)

    async def run(self, command: str, *arguments: str, kept: bool = True, fails: bool = False) -> str:
        """Runs one command; its output is compared if `kept`. For a failing command only the reason is."""
        text = await self.tool.run(command, *arguments, fails=fails)
        if fails:
            text = "\n".join(re.findall(r"CODE: .*", text))
        if kept:
            plain = [
                re.sub("^7F000001.{24}$", "ID", word.replace(self.broker.address, "ADDRESS")) for word in arguments
            ]
            self.printed[f"{len(self.printed)} {command} {' '.join(plain)}"] = text
        return text

    async def ask(self, code: int, body: bytes = b"", **ext: Any) -> RemotingCommand:
        fields = {name: str(value) for name, value in ext.items()}
        command = RemotingCommand(code, version=399, ext_fields=fields, body=body)
        answer = await self.remoting.invoke(self.broker.address, command, 20)
        assert answer.code == 0, (code, ext, answer)
        return answer

    async def commit(self, group: str, queue_id: int, offset: int) -> None:
        await self.ask(15, consumerGroup=group, topic=TOPIC, queueId=queue_id, commitOffset=offset)


def unique_key(number: int) -> str:
    """A unique key created now, in this month: a query by it searches some hours around that."""
    return f"7F000001000018B4AAC2{number:012X}"


def alike(text: str) -> list[str]:
    """The sorted lines of an output, normalized."""
    for pattern, replacement in VOLATILE:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return sorted(line for line in lines if line and TOOL not in line)


async def fill(site: Site) -> str:
    """Stores twelve messages in two queues, offsets of a group, a producer; returns the first offset message id."""
    first = ""
    for number in range(COUNT):
        properties = {"KEYS": f"k{number % 4} all", "TAGS": f"tag{number % 2}", "UNIQ_KEY": unique_key(number)}
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        sent = await site.ask(
            310, b"%010d" % number, a=MAKERS, b=TOPIC, c="TBW102", d=4, e=number % 2, f=0, g=BORN_MS, h=0, i=text,
            j=0, k="false", m="false",
        )  # fmt: skip
        first = first or sent.ext_fields["msgId"]
    with trio.fail_after(30):
        while int((await site.ask(30, topic=TOPIC, queueId=1)).ext_fields["offset"]) < COUNT // 2:  # noqa: ASYNC110
            await trio.sleep(0.05)  # RocketMQ's queues follow its log
    await site.commit(READERS, 0, 4)
    await site.commit(READERS, 1, 6)
    await site.ask(34, json.dumps({"clientID": "made-up", "producerDataSet": [{"groupName": MAKERS}]}).encode())
    return first


async def change(site: Site) -> None:
    """Commands that change topics, groups and settings."""
    address = site.broker.address
    await site.run("updateTopic", "-b", address, "-t", TOPIC, "-r", "2", "-w", "2")
    await site.run("updateTopic", "-c", "InteropCluster", "-t", ORDERED, "-r", "1", "-w", "1", "-p", "4", "-o", "true")
    await site.run("topicRoute", "-t", ORDERED)
    await site.run("updateTopicPerm", "-t", ORDERED, "-p", "6", "-b", address)
    await site.run("updateSubGroup", "-b", address, "-g", READERS, "-r", "5")
    await site.run("updateTopic", "-b", address, "-t", f"%RETRY%{READERS}", "-r", "1", "-w", "1")  # as a consumer would
    await site.run("getConsumerConfig", "-g", READERS)
    await site.run("updateOrderConf", "-t", TOPIC, "-m", "put", "-v", "broker-a:2")
    await site.run("updateOrderConf", "-t", TOPIC, "-m", "get")
    await site.run("updateKvConfig", "-s", "space", "-k", "key", "-v", "value")
    await site.run("deleteKvConfig", "-s", "space", "-k", "key")
    await site.run("wipeWritePerm", "-b", "broker-a")
    await site.run("topicRoute", "-t", TOPIC)
    await site.run("addWritePerm", "-b", "broker-a")
    await site.run("topicRoute", "-t", TOPIC)
    await site.run("updateBrokerConfig", "-b", address, "-k", "brokerPermission", "-v", "6")


async def show(site: Site, first_id: str) -> None:
    """Commands that show messages, figures and clients."""
    address, release = site.broker.address, site.tool.release
    by_topic = () if release.is_4 else ("-t", TOPIC)
    await site.run("topicStatus", "-t", TOPIC)
    await site.run("topicClusterList", "-t", TOPIC)
    await site.run("allocateMQ", "-t", TOPIC, "-i", "a,b")
    await site.run("queryMsgByKey", "-t", TOPIC, "-k", "k3")
    await site.run("queryMsgByKey", "-t", TOPIC, "-k", "none", fails=True)
    await site.run("queryMsgById", "-i", first_id, *by_topic)
    await site.run("queryMsgByUniqueKey", "-t", TOPIC, "-i", unique_key(5))
    await site.run("queryCq", "-t", TOPIC, "-q", "1", "-i", "2", "-c", "2", "-b", address)
    await site.run("brokerConsumeStats", "-b", address)
    await site.run("producerConnection", "-g", MAKERS, "-t", TOPIC)
    await site.run("producer", "-b", address)
    await site.run("consumerProgress", "-g", READERS)
    await site.run("resetOffsetByTime", "-g", READERS, "-t", TOPIC, "-s", "0", kept=not release.is_4)
    await site.run("consumerProgress", "-g", READERS)
    if not release.is_4:
        await site.run("resetOffsetByTime", "-g", READERS, "-t", TOPIC, "-s", "now")
        await site.run("resetOffsetByTime", "-g", READERS, "-t", TOPIC, "-s", "0", "-b", address, "-q", "1", "-o", "3")
        await site.run("consumerProgress", "-g", READERS)
        await site.run("haStatus", "-b", address)


async def show_consumer(site: Site, client: JavaClient) -> None:
    """Commands that show an online consumer, which is also queried itself."""
    options = {"topic": TOPIC, "group": WATCHERS, "count": 10_000, "limitS": 600, "nameServer": site.tool.name_server}
    watcher = await client.start("push", **options)
    for queue_id in (0, 1):
        await watcher.wait("got", queueId=queue_id, queueOffset=COUNT // 2 - 1)
    await site.run("consumerConnection", "-g", WATCHERS)
    await site.run("consumerStatus", "-g", WATCHERS)


async def check_figures(site: Site) -> None:
    """Output with too many broker-specific values to be compared as a whole."""
    address = site.broker.address
    status = await site.run("brokerStatus", "-b", address, kept=False)
    table = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in status.splitlines())}
    assert (table["msgPutTotalTodayNow"], table["dispatchBehindBytes"]) == (str(COUNT), "0")
    assert int(table["earliestMessageTimeStamp"]) > BORN_MS or isinstance(site.broker, RocketMqBroker)
    assert int(table["commitLogMaxOffset"]) > COUNT * 150
    cluster = await site.run("clusterList", kept=False)
    fields = cluster.splitlines()[-1].split()
    assert fields[:4] == ["InteropCluster", "broker-a", "0", address], cluster
    totals = await site.run("clusterList", "-m", kept=False)
    assert totals.splitlines()[-1].split()[4] == str(COUNT)
    topics = set((await site.run("topicList", kept=False)).split())
    assert {TOPIC, ORDERED, f"%RETRY%{WATCHERS}", "InteropCluster", "broker-a", "TBW102"} <= topics
    assert f"listenPort = {site.broker.port}" in " ".join(
        (await site.run("getBrokerConfig", "-b", address, kept=False)).split()
    )
    assert "listenPort" in await site.run("getNamesrvConfig", kept=False)
    await site.run("consumerProgress", kept=False)
    await site.run("topicList", "-c", kept=False)
    await site.run("statsAll", "-t", TOPIC, kept=False)
    for cleaning in ("cleanExpiredCQ", "cleanUnusedTopic"):
        await site.run(cleaning, "-b", address)


async def delete(site: Site) -> None:
    """Commands that delete topics and groups."""
    await site.run("deleteTopic", "-c", "InteropCluster", "-t", ORDERED)
    await site.run("deleteTopic", "-c", "InteropCluster", "-t", TOPIC)
    await site.run("deleteSubGroup", "-b", site.broker.address, "-g", READERS)
    topics = set((await site.run("topicList", kept=False)).split())
    assert not {TOPIC, ORDERED} & topics
    await site.run("updateTopic", "-b", site.broker.address, "-t", TOPIC, "-r", "2", "-w", "2")
    if isinstance(site.broker, HalogBroker):
        await site.run("consumerProgress", "-g", READERS, kept=False, fails=True)  # 4.9 keeps the offsets


@pytest.mark.usual_release("5.5.0")
async def test_the_same_commands_show_the_same(children: Children, release: Release) -> None:
    real_name_server = await start_name_server(children, release)
    real_broker = RocketMqBroker(children, release, "real", real_name_server, "ASYNC_MASTER")
    name_server = await start_halog_name_server(children)
    broker = HalogBroker(children, "ours", name_server, "ASYNC_MASTER")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(real_broker.start)
        nursery.start_soon(broker.start)
    async with (
        open_mqadmin(children, release, real_name_server) as real_tool,
        open_mqadmin(children, release, name_server) as tool,
        open_java_client(children, release, name_server) as client,
        open_remoting_client() as remoting,
    ):
        real = Site(real_broker, real_tool, remoting)
        ours = Site(broker, tool, remoting)
        for site in (real, ours):
            await change(site)
            first_id = await fill(site)
            await show(site, first_id)
            await show_consumer(site, client)
            await check_figures(site)
            if release.is_4 or site is ours:
                await delete(site)  # a 5.5.0 broker without a timer wheel can't: NullPointerException
        assert [command.split(" ", 1)[1] for command in real.printed] == [
            command.split(" ", 1)[1] for command in list(ours.printed)[: len(real.printed)]
        ]
        for (command, theirs), mine in zip(real.printed.items(), ours.printed.values(), strict=False):
            assert (command, alike(mine)) == (command, alike(theirs)), f"{theirs}\n---\n{mine}"

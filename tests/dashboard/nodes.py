"""Nodes to look at, as a user starts them: a master and its slave with all kinds of content, and an empty one with a
token. What is hostile here would show in the page: it says so by setting `window.harmed`."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ha.protocol.codes import RequestCode
from ha.protocol.properties import encode_properties
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.cli.cluster import status_of, wait_until
from tests.interop.processes import free_ports
from tests.node.processes import Process

TOKEN = "a-token-for-the-dashboard"
TOPIC_COUNT = 1000
QUEUE_COUNT = 4
ORDER_COUNT = 60
HARM = "<script>window.harmed = 1</script>"
HOSTILE = f'{HARM}"><img src=x onerror="window.harmed = 1">'
HOSTILE_TOPIC = "hostile'\"><svg onload=window.harmed=1>"
HOSTILE_GROUP = "group'\"><svg onload=window.harmed=1>"
BINARY = bytes(range(256))
SMALL_FILES = ("mappedFileSizeCommitLog=1048576", "maxHashSlotNum=1000", "maxIndexNum=4000")


class Client:
    """One connection that asks the way clients do."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._parser = RemotingParser()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, code: RequestCode, fields: dict[str, str], body: bytes = b"") -> dict[str, str]:
        """Ask, and return the fields of the answer, which has to be a good one."""
        self._socket.sendall(encode_command(RemotingCommand(code, opaque=1, ext_fields=fields, body=body)))
        while True:
            chunk = self._socket.recv(65536)
            assert chunk, "closed without an answer"
            for answer in filter(lambda command: command.is_response, self._parser.feed(chunk)):
                assert answer.code == 0, answer.remark
                return answer.ext_fields or {}

    def send(self, topic: str, queue_id: int, body: bytes, properties: dict[str, str], sys_flag: int = 0) -> str:
        """Send a message; its message id."""
        fields = {
            "producerGroup": "p", "topic": topic, "defaultTopic": "TBW102", "defaultTopicQueueNums": f"{QUEUE_COUNT}",
            "queueId": f"{queue_id}", "sysFlag": f"{sys_flag}", "bornTimestamp": "1741503901250", "flag": "0",
            "properties": encode_properties(properties).decode(), "reconsumeTimes": "0", "unitMode": "false",
            "batch": "false",
        }  # fmt: skip
        return self.ask(RequestCode.SEND_MESSAGE, fields, body)["msgId"]


class Cluster:
    """Where its nodes are, and what was put into it that a test looks for."""

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        self.master = self.slave = ""
        self.ids: dict[str, str] = {}
        """Message ids by what is special about the message"""
        self._directory = directory
        self._arguments = arguments
        self._master = Process("ha.master", *arguments, directory=directory)
        self._member: Client | None = None

    def wait_master(self) -> str:
        """Wait until the master serves, and have a group's member there; its remoting address."""
        ready = self._master.wait_ready()
        self.master = f"http://{ready['admin']}"
        self._member = _join(ready["remoting"])
        return ready["remoting"]

    def kill_master(self) -> None:
        """SIGKILL."""
        self._master.__exit__(None, None, None)
        if self._member is not None:
            self._member.__exit__()

    def start_master(self) -> None:
        """Start it again, where it was."""
        self._master = Process("ha.master", *self._arguments, directory=self._directory)
        self.wait_master()


def _topics() -> dict[str, object]:
    names = [f"plain-{number:04}" for number in range(TOPIC_COUNT)] + [HOSTILE_TOPIC]
    table = {
        name: {
            "topicName": name, "readQueueNums": QUEUE_COUNT, "writeQueueNums": QUEUE_COUNT, "perm": 6, "order": False,
            "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0,
        }
        for name in names
    }  # fmt: skip
    return {"dataVersion": {"counter": 1, "timestamp": 1}, "topicConfigTable": table}


def _fill(address: str) -> dict[str, str]:
    with Client(address) as client:
        for number in range(ORDER_COUNT):
            body = json.dumps({"order": number, "city": "Zürich"}, ensure_ascii=False).encode()
            properties = {"KEYS": f"order-{number} all", "TAGS": "paid", "UNIQ_KEY": f"{number:032X}"}
            client.send("orders", number % QUEUE_COUNT, body, properties)
        hostile = {"KEYS": HOSTILE, "TAGS": HOSTILE, "UNIQ_KEY": HOSTILE, HOSTILE: HOSTILE}
        ids = {
            "hostile": client.send("special", 0, HOSTILE.encode() + b"\x00\x1b[31m\xe2\x80\xae", hostile),
            "binary": client.send("special", 0, BINARY, {}),
            "large": client.send("special", 0, "ü".encode() * 40_000, {}),
            "json": client.send("special", 0, f'[1,{{"a":1,"a":1e400}},"{HARM}"]'.encode(), {}),
        }
        for queue_id in range(QUEUE_COUNT):
            fields = {"consumerGroup": "billing", "topic": "orders", "queueId": f"{queue_id}", "commitOffset": "10"}
            client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
    return ids


def _join(address: str) -> Client:
    """A member of a group, for as long as the connection lasts, with a name to be afraid of."""
    client = Client(address)
    subscription = {"topic": "orders", "subString": HOSTILE, "expressionType": "TAG", "subVersion": 1}
    consumer = {
        "groupName": "billing", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": [subscription],
    }  # fmt: skip
    client.ask(RequestCode.HEART_BEAT, {}, json.dumps({"clientID": HOSTILE, "consumerDataSet": [consumer]}).encode())
    return client


def settings(**keys: object) -> list[str]:
    """Arguments of a broker with small files."""
    return [part for key in (*SMALL_FILES, *(f"{k}={v}" for k, v in keys.items())) for part in ("--set", key)]


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """A master with 1,000 topics and more, a slave that has it all, and a name server."""
    config = directory / "master" / "config"
    config.mkdir(parents=True)
    (config / "topics.json").write_text(json.dumps(_topics()))
    groups = {HOSTILE_GROUP: {"groupName": HOSTILE_GROUP}}
    table = {"dataVersion": {"counter": 1, "timestamp": 1}, "subscriptionGroupTable": groups}
    (config / "subscriptionGroup.json").write_text(json.dumps(table))
    with ExitStack() as stack:
        names = stack.enter_context(Process("ha.namesrv", "--set", "listenPort=0", directory=directory)).wait_ready()
        ports = [free_ports(), free_ports()]
        common = {"namesrvAddr": names["remoting"], "brokerName": "broker-a", "brokerIP1": "127.0.0.1"}
        made = Cluster(directory, settings(**common, listenPort=ports[0], storePathRootDir=directory / "master"))
        stack.callback(made.kill_master)
        slave = stack.enter_context(
            Process(
                "ha.slave",
                *settings(**common, brokerId=1, listenPort=ports[1], storePathRootDir=directory / "slave"),
                directory=directory,
            )
        )
        remoting = made.wait_master()
        made.slave = f"http://{slave.wait_ready()['admin']}"
        made.ids = _fill(remoting)
        wait_until(lambda: status_of(made.master.removeprefix("http://"))["ha"]["in_sync"] == 1)
        yield made


@contextmanager
def guarded(directory: Path) -> Iterator[str]:
    """The address of an empty master's pages, for which TOKEN is needed; no name server answers it."""
    arguments = settings(
        namesrvAddr="127.0.0.1:1", brokerName="empty", listenPort=0, adminToken=TOKEN, storePathRootDir=directory / "s"
    )
    with Process("ha.master", *arguments, directory=directory) as process:
        yield f"http://{process.wait_ready()['admin']}"

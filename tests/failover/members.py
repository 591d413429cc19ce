"""A group of real member processes on real etcd servers, with a name server and a producer that never stops."""

import base64
import json
import random
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from ha.client import Message, Producer, PullConsumer, ReceivedMessage, SendStatus
from ha.errors import ClientError
from ha.failover.agreement import GroupView
from ha.failover.etcd import EtcdAgreement, EtcdOptions, open_etcd_agreement
from ha.process import EXIT_CONFIG
from tests.failover.etcd_servers import EtcdCluster, open_cluster
from tests.faults import powered_member
from tests.interop.processes import Child, Children, free_ports, open_children

TOPIC = "Failover"
READY_S = 60.0
SETTLE_S = 40.0
LEASE_S = 2
ADMIN_TOKEN = "the token of every member"


async def until(what: str, is_so: Callable[[], bool], timeout_s: float = SETTLE_S) -> None:
    """Poll ten times a second: other processes give no events."""
    with trio.move_on_after(timeout_s):
        while not is_so():  # noqa: ASYNC110
            await trio.sleep(0.1)
        return
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


@dataclass(frozen=True)
class Places:
    """Where processes run: all on loopback, or each member on its own host."""

    own: str = "127.0.0.1"
    """IP address of etcd, of the name server, and of the test"""
    address: Callable[[int], str] = lambda _: "127.0.0.1"
    prefix: Callable[[int], list[str]] = lambda _: []
    """Prefix of a member's command"""


LOOPBACK = Places()


class Members:
    """Made by `open_members`. `view`: the group in etcd."""

    def __init__(
        self, children: Children, etcd: EtcdCluster, agreement: EtcdAgreement, folder: Path, places: Places
    ) -> None:
        self.children = children
        self.keys: Mapping[str, object] = {}
        """Additional settings of each member"""
        self.etcd = etcd
        self.folder = folder
        self._duplicate_count = 0
        self.agreement = agreement
        self.places = places
        self.view = GroupView(revision=0)
        self.name_server = f"{places.own}:{free_ports()}"
        self.ports: dict[int, int] = {}
        self.grpc_ports: dict[int, int] = {}
        """Of the members that are to serve gRPC clients"""
        self.processes: dict[int, Child] = {}

    def root(self, id_: int) -> Path:
        return self.folder / f"store-{id_}"

    async def start_name_server(self) -> None:
        host, _, port = self.name_server.rpartition(":")
        settings = ["--set", f"listenPort={port}", "--set", f"bindAddress={host}"]
        child = self.children.start_soon("namesrv", [sys.executable, "-m", "ha.namesrv", *settings])
        await child.wait_line("^READY", READY_S)

    def start_soon(self, *ids: int) -> None:
        for id_ in ids:
            port = self.ports.setdefault(id_, free_ports())
            self.processes[id_] = self._start_soon(f"member-{id_}", id_, port, self.root(id_), self.grpc_ports.get(id_))

    def _start_soon(self, name: str, id_: int, port: int, root: Path, grpc_port: int | None = None) -> Child:
        address = self.places.address(id_)
        keys = {
            "bindAddress": address,
            "adminBindAddress": address,
            "adminToken": ADMIN_TOKEN,
            "brokerName": "broker-a",
            "brokerId": id_,
            "namesrvAddr": self.name_server,
            "etcdEndpoints": ";".join(self.etcd.endpoints),
            "leaseTtl": LEASE_S * 1000,
            "listenPort": port,
            "storePathRootDir": root,
            "mappedFileSizeCommitLog": 1 << 20,
            "maxHashSlotNum": 1000,
            "maxIndexNum": 4000,
            **self.keys,
        }
        if grpc_port is not None:
            keys["grpcListenPort"] = grpc_port
        settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        return self.children.start_soon(
            name,
            [*self.places.prefix(id_), sys.executable, "-m", powered_member.MODULE, *settings],
            environment=powered_member.ENVIRONMENT,
        )

    def start_duplicate_soon(self, id_: int, *, with_copy: bool) -> Child:
        """Start a second process with the id of a running one, with its own ports and store.

        The store is empty, or a copy of the first one's as it is on disk at this moment. `check_refused` says how the
        process has to end.
        """
        self._duplicate_count += 1
        root = self.folder / f"duplicate-{self._duplicate_count}"
        if with_copy:
            shutil.copytree(self.root(id_), root, ignore=shutil.ignore_patterns("lock"))
        return self._start_soon(f"duplicate-{self._duplicate_count}", id_, free_ports(), root)

    async def check_refused(self, duplicate: Child, id_: int) -> None:
        """Wait until a duplicate of `id_` has ended: by exit code 78, naming the first process, and never READY."""
        with trio.move_on_after(SETTLE_S):
            await duplicate.ended.wait()
        said = duplicate.tail(200)
        assert duplicate.exit_code == EXIT_CONFIG, said
        assert f"brokerId: {id_} belongs to another process, which runs at {self.places.address(id_)}:" in said, said
        assert f":{self.ports[id_]} " in said, said
        assert "READY" not in said, said

    async def lose_power(self, *ids: int, seed: int) -> int:
        """Power off these machines at once; return the lost bytes of their logs. `start_soon` restarts them."""
        for id_ in ids:
            self.processes[id_].send_signal(signal.SIGKILL)
        chance = random.Random(seed)
        return sum([await powered_member.lose_power(self.processes[id_], self.root(id_), chance) for id_ in ids])

    async def wait_ready(self, *ids: int) -> None:
        for id_ in ids:
            await self.processes[id_].wait_line("^READY", READY_S)

    async def follow(self) -> None:
        async with self.agreement.watch() as watch:
            async for seen in watch:
                self.view = seen.view

    @property
    def master_id(self) -> int | None:
        return None if self.view.master is None else self.view.master.broker_id

    @property
    def epoch(self) -> int:
        return 0 if self.view.group is None else self.view.group.epoch

    @property
    def master(self) -> Child:
        assert self.master_id is not None
        return self.processes[self.master_id]

    @property
    def sync_state_set(self) -> frozenset[int]:
        return frozenset() if self.view.group is None else self.view.group.sync_state_set

    async def switch(self, to: int, *, asked: int) -> dict[str, Any]:
        """Request a switch from any member, as `ha switch` does; return the outcome."""
        request = urllib.request.Request(f"http://{self.admin(asked)}/switch?to={to}", method="POST")
        request.add_header("Authorization", f"Bearer {ADMIN_TOKEN}")

        def post() -> dict[str, Any]:
            try:
                with urllib.request.urlopen(request, timeout=30) as page:
                    done: dict[str, Any] = json.load(page)
                    return done
            except urllib.error.HTTPError as error:
                with error:
                    refused: dict[str, Any] = json.load(error)
                    return refused

        return await trio.to_thread.run_sync(post)

    async def ask_to_switch(self, to: int | None) -> None:
        """Write the record, as an operator does with etcdctl."""
        wish = json.dumps({"to": to, "reason": "test"})
        words = ("/halog/DefaultCluster/broker-a/switch", wish)
        key, value = (base64.b64encode(word.encode()).decode() for word in words)
        await self.etcd.ask("/v3/kv/put", {"key": key, "value": value})

    async def put_record_back(self, id_: int) -> None:
        """As docs/failover.md says, from the disk of this member."""
        state = json.loads((self.root(id_) / "memberstate").read_bytes())
        words = ("/halog/DefaultCluster/broker-a/group", json.dumps(state["group"]))
        key, value = (base64.b64encode(word.encode()).decode() for word in words)
        await self.etcd.ask("/v3/kv/put", {"key": key, "value": value})

    async def wait_set(self, *ids: int) -> None:
        await until(f"a master, and the set {ids}", lambda: bool(self.master_id) and self.sync_state_set == set(ids))

    async def wait_another(self, old: int | None) -> int:
        await until("another master", lambda: self.master_id not in (None, old))
        assert self.master_id is not None
        return self.master_id

    def grpc_endpoints(self) -> str:
        """Returns the gRPC addresses of all members, as clients are configured with them."""
        return ";".join(f"{self.places.address(id_)}:{port}" for id_, port in self.grpc_ports.items())

    def admin(self, id_: int) -> str:
        return f"{self.places.address(id_)}:{self.ports[id_] + 2}"

    def status(self, id_: int) -> dict[str, Any]:
        request = urllib.request.Request(f"http://{self.admin(id_)}/status")
        request.add_header("Authorization", f"Bearer {ADMIN_TOKEN}")
        with urllib.request.urlopen(request, timeout=10) as page:
            found: dict[str, Any] = json.load(page)
            return found

    def why_not_master(self, id_: int) -> str:
        """Return a member's reason, "" if it doesn't answer yet."""
        try:
            reason: str = self.status(id_)["member"]["reason"]
        except (OSError, KeyError, TypeError):
            return ""
        return reason

    async def wait_equal(self, *ids: int) -> None:
        """Wait until these have logs of equal length, and compare them byte by byte."""
        ends: list[int] = []

        def same() -> bool:
            ends[:] = [self.status(id_)["commitlog"]["max_offset"] for id_ in ids]
            return len(set(ends)) == 1

        await until("equal logs", same)
        logs = []
        for id_ in ids:
            files = sorted((self.root(id_) / "commitlog").iterdir())
            logs.append(b"".join(file.read_bytes() for file in files if file.name.isdigit())[: ends[0]])
        assert all(log == logs[0] for log in logs)


class Load:
    """A producer that retries for ever, and records what was acknowledged."""

    def __init__(self, name_server: str) -> None:
        self._name_server = name_server
        self.acknowledged: list[bytes] = []
        self.failed: list[str] = []
        self.gap_s_max = 0.0
        self._stop = trio.Event()
        self.stopped = trio.Event()

    async def run(self, in_flight: int) -> None:
        async with Producer(self._name_server, group="failover") as producer, trio.open_nursery() as nursery:
            for number in range(in_flight):
                nursery.start_soon(self._send, producer, number)
        self.stopped.set()

    async def _send(self, producer: Producer, sender: int) -> None:
        number = 0
        last = trio.current_time()
        while not self._stop.is_set():
            body = b"%d/%d" % (sender, number)
            number += 1
            try:
                result = await producer.send(Message(topic=TOPIC, body=body))
            except ClientError as error:
                self.failed.append(str(error))
                await trio.sleep(0.05)
                continue
            if result.status is SendStatus.SEND_OK:
                self.acknowledged.append(body)
                self.gap_s_max = max(self.gap_s_max, trio.current_time() - last)
                last = trio.current_time()
            else:
                self.failed.append(result.status.name)
            await trio.sleep(0.01)

    async def go_on(self, count: int = 50) -> None:
        """Wait until `count` more are acknowledged."""
        wanted = len(self.acknowledged) + count
        await until("more acknowledgements", lambda: len(self.acknowledged) >= wanted)

    async def stop(self) -> None:
        self._stop.set()
        await self.stopped.wait()

    async def lost(self) -> set[bytes]:
        """Return the acknowledged messages that can't be read."""
        return set(self.acknowledged) - {message.body for message in await read_topic(self._name_server, TOPIC)}


async def read_topic(name_server: str, topic: str) -> list[ReceivedMessage]:
    """Returns all messages of a topic, queue by queue."""
    found: list[ReceivedMessage] = []
    async with PullConsumer(name_server, group="check") as consumer:
        for queue in await consumer.queues(topic):
            offset, end = 0, await consumer.max_offset(queue)
            while offset < end:
                result = await consumer.pull(queue, offset)
                found += result.messages
                offset = result.next_offset
    return found


@asynccontextmanager
async def open_group(
    folder: Path, *ids: int, places: Places = LOOPBACK, keys: Mapping[str, object] = {}, serves_grpc: bool = False
) -> AsyncIterator[Members]:
    """Serving members with these ids. `keys`: additional configuration."""
    async with (
        open_cluster(folder, host=places.own) as etcd,
        open_children(folder) as children,
        open_etcd_agreement(EtcdOptions(endpoints=etcd.endpoints), "DefaultCluster", "broker-a") as agreement,
        trio.open_nursery() as nursery,
    ):
        members = Members(children, etcd, agreement, folder, places)
        members.keys = keys
        if serves_grpc:
            members.grpc_ports = {id_: free_ports() for id_ in ids}
        nursery.start_soon(members.follow)
        await members.start_name_server()
        members.start_soon(*ids)
        await members.wait_ready(*ids)
        yield members
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_members(
    folder: Path, *ids: int, in_flight: int = 4, keys: Mapping[str, object] = {}
) -> AsyncIterator[tuple[Members, Load]]:
    """Members with these ids, all in the set, and a running producer."""
    async with open_group(folder, *ids, keys=keys) as members, trio.open_nursery() as nursery:
        load = Load(members.name_server)
        nursery.start_soon(load.run, in_flight)
        await members.wait_set(*ids)
        await load.go_on()
        yield members, load
        nursery.cancel_scope.cancel()

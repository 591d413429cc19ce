"""Shows automatic failover with etcd, a name server, a group of three brokers, and constant load.

Steps: start; kill the master with SIGKILL; restart it as a slave; switch back to it; stop the master for maintenance;
stop the producers, read every message at its acknowledged offset, and compare the three logs byte by byte. A failed
step ends the demo with a message and exit code 1 (2 usage, 69 no etcd, 130 Ctrl-C). The processes are always stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from anyio.from_thread import start_blocking_portal
from rich.table import Table

from ha.client import Message, Producer, PullConsumer, SendStatus
from ha.errors import ClientError
from scripts.demo import TOPIC, check, commitlog_digest, flights, prepare, run, say, step
from scripts.nodes import Node, NodeError, reserved_ports

IDS = (1, 2, 3)
LEASE_MS = 2_000
ADMIN_TOKEN = "the demo's own token"
SETTLE_S = 60.0
FLIGHTS_MAX = 20_000
EXIT_NO_ETCD = 69


class Place(NamedTuple):
    """Position of a message according to its acknowledgement."""

    broker_name: str
    queue_id: int
    queue_offset: int


class Load:
    """Producers of flights, each with one send in flight."""

    def __init__(self, name_server: str, messages: list[Message], in_flight: int) -> None:
        self._name_server = name_server
        self._messages = itertools.cycle(messages)
        self._in_flight = in_flight
        self._is_over = False
        self.acknowledged_at: list[float] = []
        """Times of time.monotonic"""
        self.acknowledged: dict[Place, bytes] = {}
        self.acknowledged_twice = 0
        """Number of positions acknowledged for two messages, which means by more than one master"""
        self.failures: list[str] = []
        """Failed sends, as reported to the application"""

    async def run(self) -> None:
        """Sends until `stop`."""
        async with Producer(self._name_server, group="demo") as producer, anyio.create_task_group() as tasks:
            for sender in range(self._in_flight):
                tasks.start_soon(self._send_on, producer, sender)

    async def _send_on(self, producer: Producer, sender: int) -> None:
        for number in itertools.count():
            flight = next(self._messages)
            body = b'{"sender":%d,"number":%d,"flight":%s}' % (sender, number, flight.body)
            while not self._is_over:
                try:
                    result = await producer.send(Message(TOPIC, body, tags=flight.tags, keys=flight.keys))
                except ClientError as error:
                    self.failures.append(str(error))
                    await anyio.sleep(0.05)
                    continue
                if result.status is not SendStatus.SEND_OK:
                    self.failures.append(result.status.name)
                    continue
                self.acknowledged_at.append(time.monotonic())
                place = Place(result.queue.broker_name, result.queue.queue_id, result.queue_offset)
                self.acknowledged_twice += self.acknowledged.setdefault(place, body) != body
                break
            else:
                return

    def stop(self) -> None:
        """Stops the load after the sends in flight."""
        self._is_over = True

    def wait_more(self, count: int) -> None:
        """Waits until `count` more sends are acknowledged."""
        wanted = len(self.acknowledged_at) + count
        wait(lambda: len(self.acknowledged_at) >= wanted, f"{count} more sends are acknowledged")

    def gap_since(self, number: int) -> float:
        """Returns the longest time in seconds without an acknowledgement since the first `number` acknowledgements."""
        at = self.acknowledged_at[max(0, number - 1) :]
        return max(after - before for before, after in itertools.pairwise(at))


class Group:
    """The processes of the group, with files below `directory`; created by `open_group`."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        names, client, peer, *ports = stack.enter_context(reserved_ports(3 + 3 * len(IDS)))
        self.name_server_address = f"127.0.0.1:{names}"
        self.etcd = f"http://127.0.0.1:{client}"
        self._etcd_peer = f"http://127.0.0.1:{peer}"
        self.name_server = self._node("namesrv", ["-m", "ha.namesrv", "--set", f"listenPort={names}"])
        self.members = {id_: self._member(id_, ports[3 * (id_ - 1) : 3 * id_]) for id_ in IDS}
        self.admins = {id_: f"127.0.0.1:{ports[3 * id_ - 1]}" for id_ in IDS}

    def _node(self, name: str, arguments: list[str]) -> Node:
        node = Node(name, arguments, self._directory, ADMIN_TOKEN)
        self._stack.callback(node.kill)
        return node

    def _member(self, id_: int, ports: list[int]) -> Node:
        keys = {
            "brokerClusterName": "DemoCluster",
            "brokerName": "broker-a",
            "brokerId": id_,
            "namesrvAddr": self.name_server_address,
            "etcdEndpoints": self.etcd,
            "leaseTtl": LEASE_MS,
            "bindAddress": "127.0.0.1",
            "listenPort": ports[0],
            "haListenPort": ports[1],
            "adminListenPort": ports[2],
            "adminToken": ADMIN_TOKEN,
            "storePathRootDir": self.store(id_),
            "mappedFileSizeCommitLog": 16 << 20,
        }
        conf = self._directory / f"member-{id_}.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
        return self._node(f"member-{id_}", ["-m", "ha.member", "--config", str(conf)])

    def store(self, id_: int) -> Path:
        """Returns the store directory of a member."""
        return self._directory / f"store-{id_}"

    def start_etcd(self) -> float:
        """Starts etcd and returns the seconds until it responds. Raises NodeError if it ends, or after SETTLE_S."""
        started = time.monotonic()
        with (self._directory / "etcd.log").open("w") as log:
            process = subprocess.Popen(
                [
                    "etcd",
                    "--name=demo",
                    f"--data-dir={self._directory / 'etcd'}",
                    f"--listen-client-urls={self.etcd}",
                    f"--advertise-client-urls={self.etcd}",
                    f"--listen-peer-urls={self._etcd_peer}",
                    f"--initial-advertise-peer-urls={self._etcd_peer}",
                    f"--initial-cluster=demo={self._etcd_peer}",
                ],
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
                start_new_session=True,  # Ctrl-C reaches only the demo, which then stops all processes in order
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

        def is_healthy() -> bool:
            if process.poll() is not None:
                raise NodeError(f"etcd ended with exit code {process.returncode}: see {self._directory / 'etcd.log'}")
            try:
                with urllib.request.urlopen(f"{self.etcd}/health", timeout=5) as answer:
                    return str(json.load(answer).get("health")) in ("true", "True")
            except (OSError, ValueError, HTTPException):
                return False

        wait(is_healthy, "etcd responds")
        return time.monotonic() - started

    def membership(self, id_: int) -> dict[str, Any]:
        """Returns a member's view of the group; {} while it does not respond."""
        try:
            found: dict[str, Any] = self.members[id_].status()["member"] or {}
        except NodeError:
            return {}
        return found

    def wait_master(self, *, other_than: int = 0, among: tuple[int, ...] = IDS) -> int:
        """Waits until one of these members is master, and returns its ID."""
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [id_ for id_ in among if id_ != other_than and self.membership(id_).get("master_id") == id_]
            return bool(found)

        wait(is_there, "there is a master")
        return found[0]

    def wait_in_sync(self, master_id: int) -> None:
        """Waits until all three members have every acknowledged message."""
        wait(lambda: self.membership(master_id).get("sync_state_set") == list(IDS), "all three are in sync")

    def ha(self, *words: str) -> str:
        """Runs the `ha` command and returns its output. Raises NodeError unless it exits with 0."""
        done = subprocess.run(
            [sys.executable, "-m", "ha.cli", *words],
            env=os.environ | {"HALOG_ADMIN_TOKEN": ADMIN_TOKEN},
            capture_output=True,
            text=True,
            check=False,
        )
        say(f"$ ha {' '.join(words)}")
        for line in (done.stdout + done.stderr).splitlines():
            say(line.rstrip())
        if done.returncode:
            raise NodeError(f"ha {words[0]} ended with exit code {done.returncode}")
        return done.stdout


def wait(is_so: Any, what: str) -> None:
    """Polls `is_so()` 50 times a second until it is true. Raises NodeError, which names `what`, after SETTLE_S."""
    give_up = time.monotonic() + SETTLE_S
    while not is_so():
        if time.monotonic() > give_up:
            raise NodeError(f"timed out after {SETTLE_S:g} s waiting until {what}")
        time.sleep(0.02)  # HTTP offers no notification


@contextmanager
def open_group(directory: Path) -> Iterator[Group]:
    """Yields a Group that is not started, and kills its processes at the end."""
    with ExitStack() as stack:
        yield Group(directory, stack)


@contextmanager
def sending(load: Load) -> Iterator[None]:
    """Runs the load during the block, and waits for its last responses."""
    with start_blocking_portal("trio") as portal:
        running = portal.start_task_soon(load.run)
        try:
            yield
        finally:
            load.stop()
        running.result()


async def read_all(name_server: str) -> dict[Place, bytes]:
    """Returns all messages of the topic by position."""
    found: dict[Place, bytes] = {}
    async with PullConsumer(name_server, group="check") as consumer:
        for queue in await consumer.queues(TOPIC):
            offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
            while offset < end:
                result = await consumer.pull(queue, offset, max_messages=256)
                check(result.next_offset > offset, f"{queue} stopped at {offset:,} of {end:,}: {result.status.name}")
                for message in result.messages:
                    found[Place(queue.broker_name, queue.queue_id, message.queue_offset)] = message.body
                offset = result.next_offset
    return found


# --- the steps


def start(group: Group) -> None:
    """Starts all processes and waits for the first master."""
    step("Starting etcd, a name server and a group of three brokers")
    say(f"etcd     responded after {group.start_etcd():.2f} s")
    for node in (group.name_server, *group.members.values()):
        seconds = node.start()
        say(f"{node.name:<8} ready in {seconds:.2f} s: " + " ".join(f"{k}={v}" for k, v in node.ready.items()))
    group.wait_in_sync(group.wait_master())


def failover(group: Group, load: Load, table: Table, pause_s: float) -> None:
    """Kills, restarts, switches and stops the master."""

    def unavailable(what: str, number: int) -> None:
        load.wait_more(100)
        gap_s = load.gap_since(number)
        say(f"for {gap_s:.2f} s nothing was acknowledged")
        table.add_row(what, f"{gap_s:.2f} s without an acknowledgement")

    load.wait_more(100)
    time.sleep(pause_s)
    killed = group.wait_master()
    step(f"Killing member {killed}, the master (SIGKILL)")
    number = len(load.acknowledged_at)
    group.members[killed].kill()
    heir = group.wait_master(among=tuple(id_ for id_ in IDS if id_ != killed))
    say(f"member {heir} is master: elected after the old master's lease of {LEASE_MS / 1000:g} s expired")
    unavailable("master killed", number)

    time.sleep(pause_s)
    step(f"Restarting member {killed}")
    seconds = group.members[killed].start()
    started = time.monotonic()
    group.wait_in_sync(heir)
    say(f"ready in {seconds:.2f} s, as a slave of member {heir}; in sync {time.monotonic() - started:.2f} s later")
    table.add_row("back in sync", f"{seconds + time.monotonic() - started:.2f} s after its start")

    time.sleep(pause_s)
    step(f"Switching back to member {killed}")
    number, failed = len(load.acknowledged_at), len(load.failures)
    group.ha("switch", "--to", str(killed), "--reason", "demo", "--admin", group.admins[heir])
    unavailable("planned switch", number)
    check(len(load.failures) == failed, f"a send failed during a planned switch: {load.failures[failed:][:1]}")
    group.wait_in_sync(killed)

    time.sleep(pause_s)
    step(f"Stopping member {killed}, the master, for maintenance (SIGTERM)")
    number, failed = len(load.acknowledged_at), len(load.failures)
    say(f"stopped in {group.members[killed].stop():.2f} s, exit code 0")
    say(f"it handed over to member {group.wait_master(other_than=killed)} first")
    unavailable("master stopped", number)
    check(len(load.failures) == failed, f"a send failed while a master was stopped: {load.failures[failed:][:1]}")
    say("no send failed")
    group.members[killed].start()
    group.wait_in_sync(group.wait_master())
    time.sleep(pause_s)


def reckon(group: Group, load: Load, table: Table) -> None:
    """Checks that every acknowledged message is at its position, and that the logs are equal."""
    step("Stopping the producers and reading everything")
    found = anyio.run(read_all, group.name_server_address, backend="trio")
    lost = [place for place, body in load.acknowledged.items() if found.get(place) != body]
    say(f"{len(load.acknowledged_at):,} sends were acknowledged, {len(found):,} messages found")
    say(f"not at the acknowledged position: {len(lost)}; acknowledged by two masters: {load.acknowledged_twice}")
    say(f"failed sends that the application repeated: {len(load.failures)}")
    check(not lost, f"{len(lost)} acknowledged messages are lost, for instance {lost[:1]}")
    check(not load.acknowledged_twice, f"{load.acknowledged_twice} positions were acknowledged for two messages")
    table.add_row("acknowledged", f"{len(load.acknowledged_at):,}")
    table.add_row("acknowledged but lost", "0")
    table.add_row("acknowledged by two masters", "0")
    table.add_row("failed sends", f"{len(load.failures)}")

    step("Comparing the three logs")
    ends: list[int] = []

    def are_equal() -> bool:
        ends[:] = [node.status()["commitlog"]["max_offset"] for node in group.members.values()]
        return len(set(ends)) == 1

    wait(are_equal, "all three logs end at the same byte")
    digests = {id_: commitlog_digest(group.store(id_), 0, ends[0]) for id_ in IDS}
    for id_, digest in digests.items():
        say(f"member {id_}  {ends[0]:,} bytes  SHA-256 {digest}")
    check(len(set(digests.values())) == 1, "the members' logs differ")
    say("byte-identical, including the log of the killed master")
    table.add_row("logs", f"{ends[0]:,} bytes, SHA-256 {digests[1][:16]}…, identical")

    step("Showing ha status")
    group.ha("status", *(word for admin in group.admins.values() for word in ("--admin", admin)))

    step("Stopping")
    for node in (*group.members.values(), group.name_server):
        say(f"{node.name:<8} stopped in {node.stop():.2f} s, exit code 0")


def demo(directory: Path, in_flight: int, pause_s: float) -> Table:
    """Runs all steps and returns the results."""
    table = Table("step", "result", title="halog failover demo", title_justify="left")
    with open_group(directory) as group:
        start(group)
        step(f"Sending flights (New York, 2013) continuously, {in_flight} in flight")
        load = Load(group.name_server_address, flights(FLIGHTS_MAX), in_flight)
        with sending(load):
            failover(group, load, table, pause_s)
        reckon(group, load, table)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo --failover", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--in-flight", type=int, default=16, help="maximum number of messages in flight (default: %(default)s)"
    )
    parser.add_argument(
        "--pause", type=float, default=2.0, help="duration of the load between steps, in seconds (default: %(default)g)"
    )
    directory, options = prepare(parser)
    if options.in_flight < 1 or options.pause < 0:
        parser.error("--in-flight must be at least 1, --pause must not be negative")
    if shutil.which("etcd") is None:
        print("demo: etcd is not on the PATH; on Debian: apt-get install etcd-server", file=sys.stderr)
        return EXIT_NO_ETCD
    return run(directory, lambda: demo(directory, options.in_flight, options.pause))


if __name__ == "__main__":
    sys.exit(main())

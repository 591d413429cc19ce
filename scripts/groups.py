"""Adds and drains broker groups under load: `scripts/groups --groups 4`.

Runs the commands of docs/scaling.md against processes of `ha cluster`, while producers and a consumer of the SDK run:
each round adds a group, then drains and stops the oldest one. Exit code 0 if no send failed, and every message was
consumed once; 1 if not, and the directory is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import trio

from ha.client import Client, ClientOptions, Message, Producer, PushConsumer, ReceivedMessage
from ha.errors import HalogError
from scripts.directories import add_directory_option, create_directory
from scripts.nodes import NodeError

TOPIC, GROUP = "orders", "billing"
_COMMAND_S_MAX = 900.0
_ALL_USED_S_MAX = 120.0
"""Maximum time in seconds until producers send to exactly the expected groups."""
_CONSUMED_S_MAX = 120.0


class Load:
    """The messages sent and consumed."""

    def __init__(self) -> None:
        self.sent: dict[bytes, str] = {}
        """Body -> broker name"""
        self.failures: list[str] = []
        self.consumed: Counter[bytes] = Counter()
        self._numbers = count()

    async def handle(self, message: ReceivedMessage) -> None:
        """Counts a message of the consumer."""
        self.consumed[message.body] += 1

    async def send_on(self, producer: Producer, pause_s: float) -> None:
        """Sends messages one after the other until it is cancelled."""
        while True:
            body = b"%d" % next(self._numbers)
            with trio.CancelScope(shield=True):  # a cancelled send may be stored and yet not in `sent`
                try:
                    result = await producer.send(Message(TOPIC, body))
                    self.sent[body] = result.queue.broker_name
                except HalogError as error:
                    self.failures.append(f"{body.decode()}: {error!r}")
            await trio.sleep(pause_s)

    async def wait_groups(self, names: set[str]) -> None:
        """Waits until the last thousand messages were sent to exactly these groups. Raises NodeError after
        _ALL_USED_S_MAX."""
        give_up = trio.current_time() + _ALL_USED_S_MAX
        while True:
            known = len(self.sent)
            while len(self.sent) < known + 1_000:
                await trio.sleep(0.1)
                if trio.current_time() > give_up:
                    raise NodeError(f"no thousand messages were sent to {sorted(names)}; {self.failures[:3]}")
            if set(list(self.sent.values())[known:]) == names:
                return

    async def wait_consumed(self) -> None:
        """Waits until every message that was sent is consumed; not longer than _CONSUMED_S_MAX."""
        with trio.move_on_after(_CONSUMED_S_MAX):
            while not self.sent.keys() <= self.consumed.keys():  # noqa: ASYNC110, a script may poll
                await trio.sleep(0.1)

    def violations(self) -> list[str]:
        """Returns what should not have happened."""
        lost = sorted(self.sent.keys() - self.consumed.keys())
        twice = sorted(body for body, times in self.consumed.items() if times > 1)
        found = [f"failed send {failure}" for failure in self.failures[:10]]
        for what, bodies in (("not consumed", lost), ("consumed more than once", twice)):
            if bodies:
                found.append(
                    f"{len(bodies):,} messages {what}, such as {bodies[0].decode()} of {self.sent.get(bodies[0])}"
                )
        return found


def ha(*words: object) -> str:
    """Runs the `ha` command and returns its output. Raises NodeError with its errors if it fails."""
    command = [sys.executable, "-m", "ha.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S_MAX, check=False)
    if done.returncode:
        raise NodeError(f"ha {' '.join(map(str, words))} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class Cluster:
    """The cluster in a directory, and the commands for it."""

    def __init__(self, directory: Path, replicas: int) -> None:
        self.directory = directory
        self._replicas = replicas
        self.servers = ""

    async def run(self, *words: object) -> str:
        """Runs a command against the name server."""
        return await trio.to_thread.run_sync(ha, *words, "--servers", self.servers)

    async def up(self, group_count: int) -> list[str]:
        """Starts the nodes of the first `group_count` groups that do not run, and returns the names of the groups."""
        words = (
            "--detach",
            "--groups",
            group_count,
            "--replicas",
            self._replicas,
            "--timeout",
            _COMMAND_S_MAX,
            "--json",
        )
        told = json.loads(await trio.to_thread.run_sync(ha, "cluster", "up", "--dir", self.directory, *words))
        self.servers = told["name_server"]
        return list(dict.fromkeys(node.rpartition("-")[0] for node in told["brokers"]))

    async def down(self, *words: str) -> None:
        """Stops the cluster."""
        await trio.to_thread.run_sync(ha, "cluster", "down", "--dir", self.directory, *words)

    async def remove(self, group: str) -> None:
        """Stops a group and deletes its files."""
        await self.down("--group", group)
        for file in sorted(self.directory.glob(f"{group}-*")):
            shutil.rmtree(file) if file.is_dir() else file.unlink()


async def change_groups(options: argparse.Namespace, directory: Path, say: Callable[[str], None]) -> Load:
    """Runs the cluster, the load and the rounds. Raises NodeError, for example if a group can't be drained."""
    load = Load()
    cluster = Cluster(directory, options.replicas)
    try:
        groups = await cluster.up(options.groups)
        await cluster.run("topic", "create", TOPIC, "--queues", 4)
        await cluster.run("group", "create", GROUP)
        client_options = ClientOptions(route_refresh_interval_s=options.refresh)
        async with (
            Client([cluster.servers], options=client_options) as client,
            PushConsumer(client, load.handle, group=GROUP, subscriptions={TOPIC: "*"}),
            Producer(client, group="shop") as producer,
        ):
            async with trio.open_nursery() as nursery:
                for _ in range(options.senders):
                    nursery.start_soon(load.send_on, producer, options.pause)
                await load.wait_groups(set(groups))
                for _ in range(options.rounds):
                    groups = await change_once(load, cluster, groups, options.settle, say)
                nursery.cancel_scope.cancel()
            await load.wait_consumed()
    finally:
        with trio.CancelScope(shield=True):
            await cluster.down()
    return load


async def change_once(
    load: Load, cluster: Cluster, groups: list[str], settle_s: float, say: Callable[[str], None]
) -> list[str]:
    """Adds a group, and removes the oldest one. Returns the groups after that."""
    [added] = set(await cluster.up(len(groups) + 1)) - set(groups)
    await cluster.run("broker", "join", added)
    await load.wait_groups({*groups, added})
    say(f"{added} added: {len(load.sent):,} messages sent")
    oldest, *groups = [*groups, added]
    await cluster.run("broker", "drain", oldest, "--settle", settle_s)
    await cluster.remove(oldest)
    await load.wait_groups(set(groups))
    say(f"{oldest} drained and stopped: {len(load.sent):,} messages sent")
    return groups


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/groups", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=4, help="groups at the start (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="nodes per group (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="groups to add and to drain (default: %(default)s)")
    parser.add_argument("--senders", type=int, default=16, help="messages in flight (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between sends (default: %(default)s)")
    parser.add_argument(
        "--refresh", type=float, default=30.0, help="interval at which clients look up routes (default: %(default)s)"
    )
    parser.add_argument("--settle", type=float, default=35.0, help="--settle of ha broker drain (default: %(default)s)")
    add_directory_option(parser)
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    directory = create_directory(options.directory, "groups")
    load = trio.run(change_groups, options, directory, say)
    violations = load.violations()
    for violation in violations:
        print(violation)
    say(f"{len(load.sent):,} messages sent, {len(load.failures):,} sends failed, {load.consumed.total():,} consumed")
    if violations:
        say(f"the stores and logs are in {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())

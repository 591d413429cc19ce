"""RocketMQ 5's gRPC clients during failovers of real processes, at the members' own ports and at a front."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import trio

from ha.client import Admin
from ha.errors import ClientError
from ha.protocol.bodies import GroupConfig
from ha.proxy.in_flight import RETURN_S
from tests.checkers.grpc_clients import Acknowledged, Acknowledging, Event, Given, Sent, Stored, check, missing, run_of
from tests.failover.grpc_load import GROUPS, ORDERED, PUSH
from tests.failover.members import READY_S, Members, read_topic, until
from tests.interop.processes import Child, free_ports
from tests.interop.releases import resolve_grpc_client

SETTINGS: Mapping[str, object] = {
    "transactionTimeOut": 3000,
    "transactionCheckInterval": 3000,
    "transactionCheckMax": 1000,
}
"""For each member"""
LANGUAGES = ("python", "java")
"""Clients: rocketmq-python-client (grpc_load.py) and rocketmq-client-java (tests/interop/java5/GrpcLoad.java)"""
JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
TYPES = {"Grpc-normal": "NORMAL", "Grpc-delay": "DELAY", "Grpc-fifo": "FIFO", "Grpc-half": "TRANSACTION"}
RETRIES_MAX = 100
"""More than any message needs here: there must be no dead letters"""
CONSUME_TIMEOUT_MINUTES = 1
"""Invisible time of a PushConsumer's messages"""
PROGRESS_S = 240.0
"""Longest time until clients have found the new master: some ask again every 30 s"""
REST_S = 400.0
"""Longest time until everything is acknowledged after the last failover"""
AGAIN_S = 0.5
SETTLE_S = 15.0
"""Time for messages that come again although they are acknowledged: more than the invisible time"""


class GrpcClients:
    """The processes of clients in some of LANGUAGES, and what they have noted."""

    def __init__(self, members: Members, languages: Sequence[str]) -> None:
        self._members = members
        self._languages = languages
        self._clients: dict[str, Child] = {}
        self._handles: dict[tuple[str, str], int] = {}
        """(group, handle) -> index of the delivery in `events`"""
        self.events: list[Event] = []
        self.failed: Counter[str] = Counter()
        """Calls that failed, by what they were"""
        self._stored: Counter[str] = Counter()
        """Client -> sends answered OK"""
        self._acknowledged: Counter[tuple[str, str]] = Counter()
        """(client, group) -> acknowledgements answered OK"""
        self._repeated = 0

    async def start(self) -> None:
        """Creates topics and groups, and starts a front and the clients."""
        members = self._members
        while True:
            try:
                await _set_up(members.name_server)
                break
            except ClientError:  # a change of master that the load caused
                await trio.sleep(AGAIN_S)
        places = {"members": members.grpc_endpoints(), "front": await self._start_front()}
        for language in self._languages:
            for place, endpoints in places.items():
                await self._start_one(language, place, endpoints)

    async def _start_one(self, language: str, place: str, endpoints: str) -> None:
        name = f"{language}-{place}"
        home = self._members.folder / f"home-{name}"
        home.mkdir()
        if language == "java":
            classes = await trio.to_thread.run_sync(resolve_grpc_client)
            command = ["java", *JVM, f"-Duser.home={home}", "-cp", classes.client_class_path, "GrpcLoad"]
        else:
            command = [sys.executable, "-m", "tests.failover.grpc_load"]
        environment = {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
        self._clients[name] = self._members.children.start_soon(
            f"clients-{name}", [*command, endpoints, name], environment=environment, on_line=partial(self._take, name)
        )

    async def _start_front(self) -> str:
        members, port = self._members, free_ports()
        keys = (f"namesrvAddr={members.name_server}", f"bindAddress={members.places.own}", f"grpcListenPort={port}")
        settings = [word for key in keys for word in ("--set", key)]
        front = members.children.start_soon("front", [sys.executable, "-m", "ha.proxy", *settings])
        await front.wait_line("^READY", READY_S)
        return f"{members.places.own}:{port}"

    def _take(self, client: str, line: str) -> None:
        """Adds a line of a client's output to the events."""
        what, *values = json.loads(line)
        match what:
            case "sent":
                key, kind, fifo, number, due_s = values
                self.events.append(Sent(key.encode(), kind, (fifo, number), due_s))
            case "stored":
                self.events.append(Stored(values[0].encode()))
                self._stored[client] += 1
            case "given":
                group, key, handle, asked_s, given_s = values
                pop_time_ms, invisible_ms = map(int, handle.split(" ")[1:3])
                hidden_to_s = (pop_time_ms + invisible_ms) / 1000
                if group == PUSH:
                    hidden_to_s = min(hidden_to_s, given_s + RETURN_S)
                self._handles[group, handle] = len(self.events)
                self.events.append(Given(group, key.encode(), handle, asked_s, given_s, hidden_to_s))
            case "hidden":
                self._hide(*values)
            case "acknowledging":
                self.events.append(Acknowledging(*values))
            case "acknowledged":
                self.events.append(Acknowledged(*values))
                self._acknowledged[client, values[0]] += 1
            case "failed":
                self.failed[values[0]] += 1

    def _hide(self, group: str, handle: str, hidden_to_s: float) -> None:
        """Changes the time from which a message may come again."""
        at = self._handles[group, handle]
        given = self.events[at]
        assert isinstance(given, Given)
        hidden_to_s = min(hidden_to_s, given.hidden_to_s)
        self.events[at] = Given(group, given.key, handle, given.asked_s, given.given_s, hidden_to_s)

    async def go_on(self, count: int) -> None:
        """Waits until each client got answers to `count` more acknowledgements in each group."""
        before = self._acknowledged.copy()
        await until(
            f"{count} messages for each group of each client",
            lambda: all(
                self._acknowledged[client, group] - before[client, group] >= count
                for client in self._clients
                for group in GROUPS
            ),
            PROGRESS_S,
        )

    async def violations(self) -> list[str]:
        """Stops the senders, waits until everything is acknowledged, and returns the broken promises."""
        for client in self._clients.values():
            await client.stdin.send_all(b"stop\n")
        left = await self._rest()
        await trio.sleep(SETTLE_S)
        copies_s: dict[bytes, list[float]] = {}
        for topic in TYPES:
            for message in await read_topic(self._members.name_server, topic):
                copies_s.setdefault(message.body, []).append(message.store_timestamp_ms / 1000)
        found = [str(violation) for violation in check(self.events, copies_s, GROUPS)]
        self._repeated = sum(len(times) > 1 for times in copies_s.values())
        return found + [f"after {REST_S:g} s, group {group} still has to be given {key!r}" for group, key in left]

    async def _rest(self) -> list[tuple[str, bytes]]:
        """Waits until everything is acknowledged; returns the messages that are not after REST_S."""
        give_up_at = trio.current_time() + REST_S
        while True:
            left = missing(run_of(self.events), GROUPS) or self._in_flight()
            if not left or trio.current_time() > give_up_at:
                return left
            await trio.sleep(1.0)

    def _in_flight(self) -> list[tuple[str, bytes]]:
        """Returns a line if the master still has messages in flight for any group."""
        master = self._members.master_id
        count = -1 if master is None else self._members.status(master)["pop"]["in_flight_count"]
        return [("any", b"%d in flight" % count)] if count else []

    def figures(self) -> Counter[str]:
        """What the clients did, for a table."""
        run = run_of(self.events)
        found = Counter(
            {
                "sends": len(run.sent),
                "sends answered OK": len(run.stored),
                "messages with several copies in the log": self._repeated,
                "deliveries": sum(map(len, run.deliveries.values())),
                "of these again": sum(
                    len(given) - len({each.key for each in given}) for given in run.deliveries.values()
                ),
                "acknowledgements answered OK": len(run.acknowledged_s),
            }
        )
        for name in self._clients:
            found[f"{name}: sends answered OK"] = self._stored[name]
            found[f"{name}: acknowledgements answered OK"] = sum(self._acknowledged[name, group] for group in GROUPS)
        return found + Counter({f"failed: {what}": count for what, count in self.failed.items()})


async def _set_up(name_server: str) -> None:
    """Creates topics and groups. ClientError."""
    async with Admin(name_server) as admin:
        for topic, message_type in TYPES.items():
            await admin.create_topic(topic, queue_count=4, attributes={"message.type": message_type})
            await admin.route(topic)  # on no broker, if none was master
        for group in GROUPS:
            await admin.create_group(
                GroupConfig(
                    group_name=group,
                    consume_message_orderly=group == ORDERED,
                    retry_max_times=RETRIES_MAX,
                    consume_timeout_minute=CONSUME_TIMEOUT_MINUTES,
                )
            )

"""Users of a RocketMQ 5.5.0 broker that are created, changed and deleted while `python -m ha.proxy` serves them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import trio
from rocketmq.grpc_protocol import definition_pb2 as definition

from ha.protocol.acl import AclCredentials
from ha.remoting import open_remoting_client
from tests.interop.acl2_cases import (
    AUTH_SETTINGS,
    SUPER,
    SUPER_PASSWORD,
    Ask,
    acl,
    asker,
    create,
    entry,
    policies,
    request,
    user,
)
from tests.interop.halog import start_halog_name_server
from tests.interop.processes import Children, free_ports
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker
from tests.proxy.site import Client, message
from tests.proxy.test_access import signed
from tests.proxy.test_receiving import ack, receive, receiving

OK, UNAUTHORIZED, FORBIDDEN = definition.OK, definition.UNAUTHORIZED, definition.FORBIDDEN
BOUND_S = 15.0
"""How long a change may take: the 10 s of docs/grpc.md, and some seconds for a busy machine"""
RIGHTS = policies(entry("Topic:Open", "Pub|Sub"), entry("Group:g", "Sub"))
BROKER_SETTINGS = {**AUTH_SETTINGS, "timerWheelEnable": "true", "mappedFileSizeTimerLog": 1 << 20}
"""POP consumers need timers"""
FRONT_SETTINGS = {
    "bindAddress": "127.0.0.1",
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "brokerAccessKey": SUPER,
    "brokerSecretKey": SUPER_PASSWORD,
}


class Users:
    """The broker's users, and clients of the front in their names."""

    def __init__(self, ask: Ask, endpoint: str) -> None:
        self._ask = ask
        self._endpoint = endpoint

    async def change(self, code: int, fields: dict[str, Any], body: bytes = b"") -> None:
        """Makes a request to the broker as its super user."""
        answer = await self._ask(SUPER, request(code, fields, body))
        assert answer.code == 0, answer

    async def create(self, name: str, secret: str) -> None:
        await self.change(3001, {"username": name}, user(name, password=secret))
        await self.allow(name)

    async def allow(self, name: str) -> None:
        """Gives a user all rights that it ever has."""
        await self.change(3006, {"subject": f"User:{name}"}, acl(f"User:{name}", RIGHTS))

    async def set_secret(self, name: str, secret: str) -> None:
        await self.change(3002, {"username": name}, user(name, password=secret))

    def client(self, name: str, secret: str) -> Client:
        return signed(self._endpoint, name, secret)

    async def send(self, name: str, secret: str, topic: str = "Open") -> int:
        """The code of a send as this user."""
        found: int = (await self.client(name, secret).send(message(topic))).status.code
        return found

    async def wait_accepted(self, name: str, secret: str) -> None:
        """Returns when a send as this user is accepted, which may take as long as a change."""
        with trio.fail_after(BOUND_S):
            while await self.send(name, secret) != OK:  # noqa: ASYNC110 - another process decides
                await trio.sleep(0.5)


async def start_front(children: Children, name_server: str) -> str:
    """Starts `python -m ha.proxy`; returns its gRPC address."""
    port = free_ports()
    settings = {**FRONT_SETTINGS, "namesrvAddr": name_server, "grpcListenPort": port}
    config = children.folder / "front.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    config.chmod(0o600)
    front = children.start_soon("front", [sys.executable, "-m", "ha.proxy", "--config", str(config)])
    await front.wait_line("^READY", 60)
    return f"127.0.0.1:{port}"


@pytest.mark.parametrize("release", ["5.5.0"], indirect=True)  # 4.9 has no users
async def test_users_change_while_a_front_serves_them(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    root = AclCredentials(SUPER, SUPER_PASSWORD)
    broker = RocketMqBroker(
        children, release, "broker", name_server, "ASYNC_MASTER", extra=BROKER_SETTINGS, credentials=root
    )
    await broker.start()
    endpoint = await start_front(children, name_server)
    async with open_remoting_client() as client:
        users = Users(asker(broker.address, client), endpoint)
        for topic in ("Open", "Closed"):
            await users.change(*create(topic))
        await check_changes(users)


async def check_changes(users: Users) -> None:
    for name in ("alice", "carol", "dave", "erin"):
        await users.create(name, f"secret of {name}")
        assert await users.send(name, f"secret of {name}") == OK
    assert await users.send("alice", "wrong secret") == UNAUTHORIZED
    assert await users.send("alice", "secret of alice", "Closed") == FORBIDDEN
    assert await users.send("bob", "secret of bob") == UNAUTHORIZED, "nobody has created bob"
    await consume(users.client("alice", "secret of alice"))

    # The front still has the old rights and passwords, but signs with them, so the broker refuses at once.
    await users.change(3008, {"subject": "User:erin"})
    assert await users.send("erin", "secret of erin") == FORBIDDEN
    await users.set_secret("alice", "another secret")
    assert await users.send("alice", "secret of alice") != OK
    await users.change(3003, {"username": "carol"})
    assert await users.send("carol", "secret of carol") != OK
    # The front has then read these two again.
    assert await users.send("alice", "secret of alice") == UNAUTHORIZED
    assert await users.send("alice", "another secret") == OK
    assert await users.send("carol", "secret of carol") == UNAUTHORIZED

    # What only the front would refuse is accepted when it has read the users again.
    await users.create("bob", "secret of bob")
    await users.create("carol", "third secret")
    await users.set_secret("dave", "another secret")
    await users.allow("erin")
    async with trio.open_nursery() as nursery:
        for name, secret in {
            "bob": "secret of bob",
            "carol": "third secret",
            "dave": "another secret",
            "erin": "secret of erin",
        }.items():
            nursery.start_soon(users.wait_accepted, name, secret)
    for name in ("carol", "dave"):
        assert await users.send(name, f"secret of {name}") == UNAUTHORIZED


async def consume(client: Client) -> None:
    """Receives and acknowledges a message."""
    wanted = receiving("Open")
    wanted.message_queue.broker.name = "broker-a"
    received: list[definition.Message] = []
    with trio.fail_after(30):
        while not received:
            assert (await client.send(message("Open"))).status.code == OK
            code, received = await receive(client, wanted)
            assert code in (OK, definition.MESSAGE_NOT_FOUND)
    assert (await ack(client, *received, topic="Open")).status.code == OK

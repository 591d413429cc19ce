"""Users as a table: in a failover group's log, on slaves, and of the configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.options import BrokerRole
from ha.broker.slave_sync import SlaveSync
from ha.node.messages import MessageBrowser
from ha.protocol import java_json
from ha.protocol.access_bodies import SUPER, PolicyEntryInfo, PolicyInfo, UserConfig
from ha.protocol.acl import AclCredentials
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, RemotingConnection
from tests.broker.group_member import copy_log, open_member
from tests.broker.node import open_node
from tests.interop.acl2_cases import ALICE, PASSWORD, SUPER_PASSWORD, entry
from tests.interop.acl2_cases import SUPER as ROOT_NAME
from tests.security.brokers import Client
from tests.security.test_acl2_guard import create, refusal
from tests.security.users import ROOT, open_users
from tests.store.disks import MemoryDisk

BOB = UserConfig(
    username="bob",
    password="the-secret-of-bob",
    policies=[PolicyInfo(policy_type="Custom", entries=[PolicyEntryInfo(resource="*", actions=["All"])])],
)
EVE = UserConfig(username="eve", password="the-secret-of-eve", user_type=SUPER)


async def test_members_have_the_users_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    old, new = MemoryDisk(), MemoryDisk()
    async with open_member(old) as master, open_member(new, 2) as slave:
        await master.become_master(1)
        assert await master.tables.users.put(BOB) == ""
        assert await master.tables.users.put(EVE) == ""
        assert await master.tables.users.delete("eve") == ""
        await master.settled()
        await copy_log(master.store, slave.store, master.end)
        await slave.settled()
        assert dict(slave.tables.users.table) == dict(master.tables.users.table) == {"bob": BOB}
        await slave.become_master(2)
        assert slave.tables.users.get("bob") == BOB
        await slave.group_log.save()
        # The dashboard does not show the records, which contain the passwords.
        queue = slave.store.queues.get("rmq_sys_halog_tables", 0)
        assert queue is not None
        for each in queue.read(0, 10):
            shown = str(await MessageBrowser(slave.store).message(each.physical_offset, 1000))
            assert "can contain passwords" in shown
    async with open_member(new, 2) as again:
        assert dict(again.tables.users.table) == {"bob": BOB}
    assert "user.logged" in caplog.text
    assert "the-secret" not in caplog.text


async def test_unacknowledged_user_is_dropped_with_the_term() -> None:
    async with open_member(MemoryDisk()) as member:
        assert await member.tables.users.put(BOB) != ""  # not a master
        assert member.tables.users.get("bob") is None
        await member.become_master(1)
        await member.settled()
        member.tables.users._set("bob", BOB)
        member.standing.become_slave(2)
        assert member.tables.users.get("bob") is None


async def test_configured_users_are_created_once() -> None:
    async with open_member(MemoryDisk()) as member:
        await member.become_master(1)
        await member.tables.users.create_missing([EVE])
        changed = UserConfig(username="eve", password="another")
        assert await member.tables.users.put(changed) == ""
        await member.tables.users.create_missing([EVE, BOB])
        assert dict(member.tables.users.table) == {"eve": changed, "bob": BOB}


async def test_a_configured_user_does_not_replace_one_that_is_being_created(tmp_path: Path) -> None:
    async with open_node(tmp_path, keeps_tables_in_log=True) as node:
        users = node.broker.tables.users
        admins = UserConfig(username="eve", password="another")
        async with trio.open_nursery() as nursery, node.store.log.appends_held():
            nursery.start_soon(users.put, admins)
            await wait_all_tasks_blocked()
            nursery.start_soon(users.create_missing, [EVE])
            await wait_all_tasks_blocked()
        assert users.get("eve") == admins


async def test_users_created_at_the_same_time_are_limited(tmp_path: Path) -> None:
    """Those that were being written to the group's log did not count."""
    with patch("ha.broker.users.USER_COUNT_MAX", 3):
        async with open_node(tmp_path, keeps_tables_in_log=True) as node:
            users = node.broker.tables.users
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(users.put, UserConfig(username=f"u{number}", password="p"))
            assert len(users) == 3
            assert await users.put(UserConfig(username=min(users.table), password="q")) == ""


async def test_a_change_whose_connection_closed_is_not_undone_by_the_next(tmp_path: Path) -> None:
    """The next request took the user as it was before the change that was being written."""
    async with open_node(tmp_path, keeps_tables_in_log=True, authentication_enabled=True) as node:
        assert await node.broker.tables.users.put(BOB) == ""
        update_acl = node.broker.admin.handlers()[RequestCode.AUTH_UPDATE_ACL]

        async def add(topic: str) -> None:
            body = java_json.dumps({"policies": [entry(f"Topic:{topic}", "Pub")]})
            command = RemotingCommand(RequestCode.AUTH_UPDATE_ACL, ext_fields={"subject": "User:bob"}, body=body)
            await update_acl(cast(RemotingConnection, None), command)

        async with trio.open_nursery() as nursery, node.store.log.appends_held():
            async with trio.open_nursery() as connection:
                connection.start_soon(add, "A")
                await wait_all_tasks_blocked()
                connection.cancel_scope.cancel()
            nursery.start_soon(add, "B")
            await wait_all_tasks_blocked()
        bob = node.broker.tables.users.get("bob")
        assert bob is not None
        assert [each.resource for policy in bob.policies for each in policy.entries or ()] == [
            "*",
            "Topic:A",
            "Topic:B",
        ]


class SignedClient:
    """Signs what a slave asks its master, as a node's own client does."""

    def __init__(self, client: RemotingClient, credentials: AclCredentials) -> None:
        self._client = client
        self._credentials = credentials

    async def invoke(self, address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        self._credentials.sign(command)
        return await self._client.invoke(address, command, timeout_s)


async def test_slave_copies_users_and_their_policies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on: dict[str, Any] = {"authentication_enabled": True, "authorization_enabled": True, "cluster_name": "C"}
    async with (
        open_users(tmp_path / "master", cluster_name="C") as master,
        open_node(tmp_path / "slave", role=BrokerRole.SLAVE, **on) as slave,
    ):
        await create(master, entry("Topic:A", "Get|Sub", ips=["10.0.0.0/8"]), entry("*", "Get", kind="Default"))
        tables = slave.broker.tables
        client = SignedClient(master.client, AclCredentials(ROOT_NAME, SUPER_PASSWORD))
        sync = SlaveSync(client, lambda: "broker", tables, slave.broker.options)  # type: ignore[arg-type]
        assert await sync.sync_once()
        assert dict(tables.users.table) == dict(master.broker.tables.users.table)
        assert tables.users.table.keys() == {ALICE, ROOT_NAME}

        # An account that is no super user gets no passwords: the slave's users stay.
        await create(master, entry("Cluster:*", "Get"), name="slave")
        before = dict(tables.users.table)
        client = SignedClient(master.client, AclCredentials("slave", PASSWORD))
        sync = SlaveSync(client, lambda: "broker", tables, slave.broker.options)  # type: ignore[arg-type]
        assert not await sync.sync_once()
        assert tables.users.table == before
        assert "the user of brokerAccessKey or innerClientAuthenticationCredentials has to be one" in caplog.text

    async with open_node(tmp_path / "slave", role=BrokerRole.SLAVE, **on) as slave:
        assert dict(slave.broker.tables.users.table) == before


async def test_slave_refuses_changes(tmp_path: Path) -> None:
    async with open_users(tmp_path / "master") as master:
        await create(master)
    async with open_users(tmp_path / "master", role=BrokerRole.SLAVE) as slave:
        root = Client(slave, AclCredentials(ROOT_NAME, SUPER_PASSWORD))
        assert await refusal(root, 3004, username=ALICE) == ""
        for code in (3001, 3002, 3003, 3006, 3007, 3008):
            answer = await root.ask(code, b"{}", username="x", subject="User:x")
            assert (answer.code, answer.remark) == (
                1,
                "Can't change users on a slave: it takes over its master's users",
            )
        assert slave.broker.tables.users.get(ROOT_NAME) == ROOT

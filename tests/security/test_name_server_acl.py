"""Access control on a name server: registrations, permissions of brokers, settings and routes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import ha
from ha.acl import NAME_SERVER_RULES, AclGuard, AclGuardOptions
from ha.acl.origins import AdminOrigins
from ha.acl.requirements import Needs
from ha.cli import run
from ha.config import NameServerConfig, SecretStr
from ha.namesrv.__main__ import serve_name_server
from ha.protocol.acl import AclCredentials
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from tests.namesrv.brokers import Site, open_site, register, route, unregister
from tests.node.test_library import attached, config
from tests.remoting.wire import Peer
from tests.security.brokers import SECRET, policy
from tests.security.test_acl_guard import EXCEPTION

ADMIN = AclCredentials("admin-key", "the-secret-of-admin")
ALICE = AclCredentials("alice-key", SECRET)
WRONG = AclCredentials("admin-key", "the-secret-of-nobody")


def guard(accounts: str | None = None, options: AclGuardOptions | None = None) -> AclGuard:
    return AclGuard(policy() if accounts is None else policy(accounts), options)


async def ask(peer: Peer, command: RemotingCommand, who: AclCredentials | None) -> RemotingCommand:
    if who is not None:
        who.sign(command)
    return await peer.ask(command)


async def own(site: Site) -> Peer:
    """A connection from the name server's own process."""
    ours, theirs = trio.testing.memory_stream_pair()
    site.nursery.start_soon(partial(site.name_server.server.handle, theirs, is_own=True))
    return Peer(ours)


async def test_changes_need_an_admin() -> None:
    async with open_site(guard=guard()) as site:
        peer = site.connect()
        assert (await ask(peer, register(), ADMIN)).code == 0
        for who, why in (
            (None, "No accessKey is configured"),
            (WRONG, "Check signature failed for accessKey=admin-key"),
            (ALICE, "Need admin permission for request code={}, but accessKey=alice-key is not"),
        ):
            for command in (
                RemotingCommand(205, 4, ext_fields={"brokerName": "b0"}),
                unregister(),
                register(address="evil:1", broker_id=0),
                RemotingCommand(216, 5, ext_fields={"topic": "T1"}),
                RemotingCommand(100, 6, ext_fields={"namespace": "n", "key": "k", "value": "v"}),
            ):
                answer = await ask(peer, command, who)
                assert (answer.code, answer.remark) == (1, EXCEPTION + why.format(command.code))
        answer = await ask(peer, route("T1"), ALICE)
        assert answer.code == 0
        assert b"10.0.0.1:10911" in bytes(answer.body)
        assert b'"perm":6' in bytes(answer.body)
        assert (await ask(peer, RemotingCommand(205, 4, ext_fields={"brokerName": "b0"}), ADMIN)).code == 0
        assert (await ask(peer, unregister(), ADMIN)).code == 0


async def test_every_name_server_code_enforces_its_rule() -> None:
    async with open_site(guard=guard()) as site:
        assert set(site.name_server.codes) == NAME_SERVER_RULES.keys()
        for code, rule in NAME_SERVER_RULES.items():
            peer = site.connect()
            answer = await ask(peer, RemotingCommand(code, 1), ALICE)
            needs_admin = f"{EXCEPTION}Need admin permission for request code={code}, but accessKey=alice-key is not"
            assert (answer.remark == needs_admin) == (rule.kind is not Needs.SIGNATURE), code
            assert (await ask(peer, RemotingCommand(code, 2), None)).remark == EXCEPTION + "No accessKey is configured"
            answer = await ask(peer, RemotingCommand(code, 3), ADMIN)
            assert not (answer.remark or "").startswith(EXCEPTION), code


async def test_a_broker_in_the_same_process_needs_no_account() -> None:
    async with open_site(guard=guard()) as site:
        peer = await own(site)
        assert (await ask(peer, register(), None)).code == 0


async def test_unsigned_brokers_are_admitted_by_address() -> None:
    """RocketMQ 4.9's brokers as shipped. Only * matches the peer of a memory stream."""
    async with open_site(guard=guard("{globalWhiteRemoteAddresses: ['*'], accounts: []}")) as site:
        assert (await ask(site.connect(), register(), None)).code == 0


async def test_without_a_policy_everything_is_allowed() -> None:
    async with open_site() as site:
        peer = site.connect()
        assert (await ask(peer, register(), None)).code == 0
        assert (await ask(peer, unregister(), None)).code == 0


# Origins of signed requests


async def test_signed_requests_on_plain_connections_are_refused_where_tls_is_required() -> None:
    async with open_site(guard=guard(options=AclGuardOptions(requires_tls=True))) as site:
        for who in (ADMIN, ALICE, WRONG, None):
            answer = await ask(site.connect(), route("T1"), who)
            assert answer.code == 1
            assert answer.remark == EXCEPTION + (
                "aclRequireTls: this connection is not encrypted, so the request was not looked at; connect with TLS"
            )
        assert (await ask(await own(site), register(), None)).code == 0


@pytest.mark.parametrize(("origins", "is_taken"), [("tls", False), ("tls;10.0.0.*", False), ("*", True), ("", True)])
async def test_admin_changes_can_be_limited_to_origins(origins: str, is_taken: bool) -> None:
    options = AclGuardOptions(admin_origins=AdminOrigins(origins) if origins else None)
    async with open_site(guard=guard(options=options)) as site:
        peer = site.connect()
        answer = await ask(peer, register(), ADMIN)
        said = "aclAdminFrom: request code=103 is not taken from here; it needs TLS or an address that is listed"
        assert (answer.code, answer.remark) == ((0, None) if is_taken else (1, EXCEPTION + said))
        assert (await ask(peer, RemotingCommand(319, 2), ADMIN)).code == 0  # which changes nothing
        assert (await ask(peer, RemotingCommand(106, 3), ALICE)).code == 0


@pytest.mark.parametrize("text", ["", ";", "ssl", "10.0.0.256", "tls;;x", "10.0.0.1 tls"])
def test_invalid_origins_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tls|address|IPv4|part"):
        AdminOrigins(text)


# Brokers, SDK and CLI together

ACCOUNTS = """
accounts:
  - {accessKey: alice-key, secretKey: the-secret-of-alice, defaultTopicPerm: PUB|SUB, defaultGroupPerm: SUB}
  - {accessKey: admin-key, secretKey: the-secret-of-admin, admin: true}
"""


async def test_brokers_sdk_and_cli_with_a_guarded_name_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    acl: dict[str, Any] = {"acl_enable": True, "acl_file": str(file)}

    async def command(*words: str) -> int:
        return await trio.to_thread.run_sync(run, words)

    async with serve_name_server(NameServerConfig(listen_port=0, **acl)) as ready:
        servers = ready.rpartition("=")[2]
        own = {**acl, "broker_access_key": "admin-key", "broker_secret_key": SecretStr("the-secret-of-admin")}
        master_config = config(tmp_path / "master", name_server_addresses=servers, **own)
        async with ha.open_master(master_config) as master:
            assert [state.is_registered for state in master.registration.states.values()] == [True]
            slave_config = config(tmp_path / "slave", broker_role="SLAVE", name_server_addresses=servers, **own)
            async with ha.open_slave(slave_config) as slave:
                await attached(master)  # whose address the name server has told it
                assert slave.master_addresses is not None
            to = ("--servers", servers)
            for name, codes in (("", {1}), ("alice", {0}), ("admin", {0})):
                if name:
                    monkeypatch.setenv("HALOG_ACCESS_KEY", f"{name}-key")
                    monkeypatch.setenv("HALOG_SECRET_KEY", f"the-secret-of-{name}")
                assert await command("produce", "T", "--body", "hello", *to) in codes, capfd.readouterr().err
                assert await command("topic", "list", *to) in codes, capfd.readouterr().err
            assert await command("topic", "delete", "T", "--yes", *to) == 0, capfd.readouterr().err

            # Changed at run time: only the admin remains.
            file.write_text("accounts: [{accessKey: admin-key, secretKey: the-secret-of-admin, admin: true}]")
            async with open_remoting_client() as client:
                with trio.fail_after(10):
                    while True:
                        asked = RemotingCommand(106)
                        ALICE.sign(asked)
                        if (await client.invoke(servers, asked, 5)).code:
                            break
                        await trio.sleep(0.05)


async def test_a_broker_without_an_account_is_not_registered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    name_server = NameServerConfig(listen_port=0, acl_enable=True, acl_file=str(file))
    async with serve_name_server(name_server) as ready:
        servers = ready.rpartition("=")[2]
        async with ha.open_master(config(tmp_path / "master", name_server_addresses=servers)) as master:
            [state] = master.registration.states.values()
            assert not state.is_registered
            assert state.error == f"code 1 {EXCEPTION}No accessKey is configured"

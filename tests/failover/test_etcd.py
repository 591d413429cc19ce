"""etcd's servers killed, frozen and restarted, answers lost, users and certificates."""

import base64
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trustme

from ha.failover.agreement import AgreementUnavailable, GroupRecord, GroupView, Outdated, Seen, SwitchRequest
from ha.failover.etcd import EtcdAgreement, EtcdOptions, open_etcd_agreement
from tests.failover.contract import EMPTY, MEMBER, elect, master, retry_until_available, until
from tests.failover.etcd_servers import LEASE_MIN_S, EtcdCluster, open_cluster, require_etcd
from tests.failover.proxy import Proxy, open_proxy

pytestmark = pytest.mark.processes

replace = msgspec.structs.replace
FIRST = replace(EMPTY, epoch=1, master_id=1)
PASSWORD = "correct horse"


@pytest.fixture(autouse=True)
def _etcd() -> None:
    require_etcd()


@asynccontextmanager
async def open_agreement(*endpoints: str, **options: object) -> AsyncIterator[EtcdAgreement]:
    made = msgspec.structs.replace(EtcdOptions(endpoints=endpoints), **options)
    async with open_etcd_agreement(made, "DefaultCluster", "broker-a") as agreement:
        yield agreement


@asynccontextmanager
async def open_two_ways(cluster: EtcdCluster, **options: object) -> AsyncIterator[tuple[EtcdAgreement, Proxy]]:
    """An agreement with two ways to one server, and the way that it tries first."""
    async with open_proxy(cluster.servers[0].port) as first, open_proxy(cluster.servers[0].port) as second:
        ways = [f"http://127.0.0.1:{proxy.port}" for proxy in (first, second)]
        async with open_agreement(*ways, **options) as agreement:
            yield agreement, first


def key(name: str) -> str:
    return base64.b64encode(f"/halog/DefaultCluster/broker-a/{name}".encode()).decode()


# servers lost, frozen, restarted


async def test_a_killed_leader_causes_only_a_pause(tmp_path: Path) -> None:
    async with open_cluster(tmp_path, 3) as cluster:
        leader = await cluster.leader()
        others = [server.endpoint for server in cluster.servers if server is not leader]
        async with open_agreement(leader.endpoint, *others) as agreement, agreement.watch() as watch:
            taken = await elect(agreement, 1)
            lease = await agreement.grant_lease(30)
            await agreement.put_member(1, MEMBER, lease=lease)
            await until(watch, lambda view: bool(view.members))
            await leader.kill()
            await retry_until_available(lambda: agreement.renew(lease))
            changed = await retry_until_available(
                lambda: agreement.change_group(FIRST, group_revision=taken, master_revision=taken, timeout_s=5)
            )
            seen = await until(watch, lambda view: view.group_revision == changed)
            assert [each.is_restart for each in seen] == [False]
            view = await agreement.view()
            assert (view.master_revision, view.members) == (taken, {1: MEMBER})
            assert agreement.statistics().endpoint in others
            await cluster.start(leader)
            assert await retry_until_available(agreement.view) == view


@pytest.mark.parametrize("who", ["leader", "follower"])
async def test_a_frozen_server_is_skipped(tmp_path: Path, who: str) -> None:
    async with open_cluster(tmp_path, 3) as cluster:
        leader = await cluster.leader()
        frozen = next(server for server in cluster.servers if (server is leader) == (who == "leader"))
        others = [server.endpoint for server in cluster.servers if server is not frozen]
        async with open_agreement(frozen.endpoint, *others) as agreement, agreement.watch() as watch:
            taken = await elect(agreement, 1)
            lease = await agreement.grant_lease(30)
            await until(watch, lambda view: view.master is not None)
            frozen.pause()
            assert await retry_until_available(lambda: agreement.renew(lease)) == 30
            assert agreement.statistics().endpoint != frozen.endpoint
            asked = await retry_until_available(lambda: agreement.request_switch(SwitchRequest(to=2)))
            # The watch hung on the frozen server, whose connection is as good as ever.
            seen = await until(watch, lambda view: view.switch_revision == asked)
            assert not any(each.is_restart for each in seen)
            frozen.resume()
            assert (await agreement.view()).master_revision == taken


async def test_a_server_without_a_quorum_answers_nothing(tmp_path: Path) -> None:
    async with (
        open_cluster(tmp_path, 3) as cluster,
        open_agreement(*cluster.endpoints) as agreement,
        agreement.watch() as watch,
    ):
        taken = await elect(agreement, 1)
        await until(watch, lambda view: view.revision == taken)
        for server in cluster.servers[:2]:
            await server.kill()
        with pytest.raises(AgreementUnavailable):
            await agreement.view(timeout_s=1)
        with pytest.raises(AgreementUnavailable):
            await agreement.request_switch(SwitchRequest(to=1), timeout_s=1)
        await cluster.start(*cluster.servers[:2])
        asked = await retry_until_available(lambda: agreement.request_switch(SwitchRequest(to=2)))
        seen = await until(watch, lambda view: view.switch_revision == asked)
        assert not any(each.is_restart for each in seen)


async def test_a_restarted_server_is_used_again(tmp_path: Path) -> None:
    async with (
        open_cluster(tmp_path) as cluster,
        open_agreement(*cluster.endpoints) as agreement,
        agreement.watch() as watch,
    ):
        lease = await agreement.grant_lease(5)
        await agreement.put_member(1, MEMBER, lease=lease)
        taken = await elect(agreement, 1)
        await until(watch, lambda view: view.revision == taken)
        await cluster.servers[0].kill()
        with pytest.raises(AgreementUnavailable) as caught:
            await agreement.request_switch(SwitchRequest(to=1), timeout_s=0.5)
        assert not caught.value.outcome_unknown  # nobody was there to take it
        await cluster.start()
        assert await retry_until_available(lambda: agreement.renew(lease)) == 5
        asked = await agreement.request_switch(SwitchRequest(to=2))
        seen = await until(watch, lambda view: view.switch_revision == asked)
        assert [each.is_restart for each in seen] == [False]
        assert seen[-1].view == await agreement.view()


async def test_a_watch_starts_over_after_etcd_lost_its_history(tmp_path: Path) -> None:
    async with (
        open_cluster(tmp_path) as cluster,
        open_agreement(*cluster.endpoints) as agreement,
        agreement.watch() as watch,
    ):
        for number in range(5):
            await agreement.request_switch(SwitchRequest(to=number))
        await until(watch, lambda view: view.switch == SwitchRequest(to=4))
        server = cluster.servers[0]
        await server.kill()
        server.folder = tmp_path / "empty"
        await cluster.start()
        created = await retry_until_available(lambda: agreement.create_group(EMPTY))
        seen = await until(watch, lambda view: view.group is not None)
        assert any(each.is_restart for each in seen)
        assert (seen[-1].view.group_revision, seen[-1].view.switch) == (created, None)
        assert agreement.statistics().watch_restart_count >= 1


async def test_a_connected_watch_survives_compaction(cluster: EtcdCluster) -> None:
    async with open_agreement(*cluster.endpoints) as agreement, agreement.watch() as watch:
        seen: list[Seen] = []
        for number in range(5):
            await agreement.request_switch(SwitchRequest(to=number))
            # Only revisions that it has seen are compacted.
            seen += await until(watch, lambda view: view.switch is not None and view.switch.to == number)  # noqa: B023
            await cluster.compact()
        assert not any(each.is_restart for each in seen[1:])


# answers lost, requests late


async def test_a_change_whose_answer_is_lost_is_recognised(cluster: EtcdCluster) -> None:
    """Each is sent twice and carried out once, and its revision is that of the first."""
    async with open_agreement(*cluster.endpoints) as agreement:
        created = await agreement.create_group(EMPTY)
        lease = await agreement.grant_lease(60)

        async with open_two_ways(cluster) as (one, way):
            way.loses_answers = True
            taken = await one.take_mastership(FIRST, master(1, 1), lease=lease, group_revision=created)
            assert taken == created + 1
        async with open_two_ways(cluster) as (one, way):
            way.loses_answers = True
            group = replace(FIRST, sync_state_set=frozenset({1}))
            changed = await one.change_group(group, group_revision=taken, master_revision=taken)
            assert changed == taken + 1
        async with open_two_ways(cluster) as (one, way):
            way.loses_answers = True
            assert await one.request_switch(SwitchRequest(to=2)) == changed + 1
        async with open_two_ways(cluster) as (one, way):
            way.loses_answers = True
            assert await one.put_member(1, MEMBER, lease=lease) == changed + 2
        async with open_two_ways(cluster) as (one, way):
            way.loses_answers = True
            wanted = replace(group, master_id=2)
            handed = await one.hand_over(wanted, group_revision=changed, master_revision=taken)
            assert handed == changed + 3
        view = await agreement.view()
        assert (view.group, view.group_revision, view.revision) == (wanted, handed, handed)


async def test_an_ambiguous_outcome_is_reported_as_unknown(cluster: EtcdCluster) -> None:
    """Another may have created the same group."""
    async with open_two_ways(cluster, attempt_timeout_s=60.0) as (agreement, first):
        first.loses_answers = True
        with pytest.raises(AgreementUnavailable) as caught:
            await agreement.create_group(EMPTY)
        assert caught.value.outcome_unknown
        assert (await agreement.view()).group == EMPTY


async def test_a_failed_change_is_reported_even_if_an_answer_was_lost(cluster: EtcdCluster) -> None:
    async with open_agreement(*cluster.endpoints) as agreement:
        taken = await elect(agreement, 1)
        async with open_two_ways(cluster) as (other, way):
            lease = await other.grant_lease(60)
            way.loses_answers = True
            with pytest.raises(Outdated) as caught:
                await other.take_mastership(FIRST, master(2, 2), lease=lease, group_revision=taken)
        assert caught.value.view.master == master(1, 1)


@asynccontextmanager
async def open_late_way(cluster: EtcdCluster) -> AsyncIterator[tuple[EtcdAgreement, EtcdAgreement, Proxy]]:
    """An agreement, another one with two ways to the same server, and the way that the other tries first."""
    async with (
        open_agreement(*cluster.endpoints) as prepared,
        open_two_ways(cluster, attempt_timeout_s=2.0) as (agreement, first),
    ):
        yield prepared, agreement, first


async def assert_stays(agreement: EtcdAgreement, holds: Callable[[GroupView], bool]) -> None:
    """Requests that were held have the time to arrive, and change nothing."""
    for _ in range(10):
        assert holds(await agreement.view())
        await trio.sleep(0.03)


async def test_a_late_attempt_has_no_effect(cluster: EtcdCluster) -> None:
    async with open_late_way(cluster) as (prepared, agreement, first):
        taken = await elect(prepared, 1)
        lease = await prepared.grant_lease(60)
        groups = [replace(FIRST, ack_count=number) for number in (1, 2, 3)]
        first.requests.shut()
        changed = await agreement.change_group(groups[0], group_revision=taken, master_revision=taken)
        again = await agreement.change_group(groups[1], group_revision=changed, master_revision=taken)
        sent = first.request_bytes
        assert sent > 0
        await agreement.put_member(1, MEMBER, lease=lease)
        first.heal()
        last = await agreement.change_group(groups[2], group_revision=again, master_revision=taken)
        await assert_stays(agreement, lambda view: (view.group, view.group_revision) == (groups[2], last))


async def test_the_last_member_record_counts(cluster: EtcdCluster) -> None:
    async with open_late_way(cluster) as (prepared, agreement, first):
        lease = await prepared.grant_lease(60)
        first.requests.shut()
        await agreement.put_member(1, replace(MEMBER, max_offset=900), lease=lease)
        assert first.request_bytes > 0
        await agreement.put_member(1, MEMBER, lease=lease)
        first.heal()
        await assert_stays(agreement, lambda view: view.members == {1: MEMBER})


async def test_an_attempt_may_be_executed_after_the_time_for_another_is_over(
    cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second way answers that the key exists, and there is no time left to replace it."""
    async with open_late_way(cluster) as (prepared, agreement, first):
        lease = await prepared.grant_lease(60)
        await prepared.put_member(1, replace(MEMBER, max_offset=900), lease=lease)
        call, limits = agreement._client.call, [2.0, 0.0]

        async def call_in_time(*given: Any, timeout_s: float, changes: bool) -> tuple[bytes, bool]:
            return await call(*given, timeout_s=limits.pop(0), changes=changes)

        monkeypatch.setattr(agreement._client, "call", call_in_time)
        first.requests.shut()
        with pytest.raises(AgreementUnavailable, match="no time was given") as caught:
            await agreement.put_member(1, MEMBER, lease=lease)
        assert first.request_bytes > 0
        assert caught.value.outcome_unknown


async def test_a_served_switch_request_is_not_repeated(cluster: EtcdCluster) -> None:
    async with open_late_way(cluster) as (prepared, agreement, first):
        await prepared.create_group(EMPTY)
        first.requests.shut()
        asked = await agreement.request_switch(SwitchRequest(to=2))
        assert first.request_bytes > 0
        refused = SwitchRequest(to=2, refusal="no such member", refused_revision=asked)
        await agreement.refuse_switch(refused, switch_revision=asked)
        first.heal()
        await assert_stays(agreement, lambda view: view.switch == refused)


async def test_endpoints_share_a_short_timeout(cluster: EtcdCluster) -> None:
    async with open_two_ways(cluster, attempt_timeout_s=60.0) as (agreement, first):
        first.cut()
        # Less than one try may take otherwise.
        assert (await agreement.view(timeout_s=6)).group is None


@pytest.mark.parametrize("host", ["etcd..example.com", "10.0.0.256"])
async def test_an_endpoint_with_an_invalid_host_is_skipped(cluster: EtcdCluster, host: str) -> None:
    wrong = f"http://{host}:2379"
    async with open_agreement(wrong, *cluster.endpoints) as agreement, agreement.watch() as watch:
        assert await agreement.view(timeout_s=10) == (await anext(watch)).view
        assert agreement.statistics().last_error.startswith(f"{wrong}: ")


async def test_a_watch_over_a_slow_network(cluster: EtcdCluster) -> None:
    """An answer takes longer than an attempt of the first round may."""
    async with open_proxy(cluster.servers[0].port) as proxy:
        proxy.answers.wait = partial(trio.sleep, 0.15)  # type: ignore[method-assign]
        endpoint = f"http://127.0.0.1:{proxy.port}"
        async with open_agreement(endpoint, attempt_timeout_s=0.1) as agreement, agreement.watch() as watch:
            await anext(watch)
            asked = await agreement.request_switch(SwitchRequest(to=1), timeout_s=10)
            await until(watch, lambda view: view.switch_revision == asked)


async def test_a_refused_connection_has_no_unknown_outcome(tmp_path: Path) -> None:
    async with open_agreement("http://127.0.0.1:1", "http://127.0.0.1:2") as agreement:
        with pytest.raises(AgreementUnavailable) as caught:
            await agreement.create_group(EMPTY, timeout_s=2)
        assert not caught.value.outcome_unknown
        assert agreement.statistics().failed_attempt_count >= 2


# users


async def test_password_authentication(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_cluster(tmp_path) as cluster:
        await cluster.turn_authentication_on("root", PASSWORD)
        options = EtcdOptions(endpoints=cluster.endpoints, user="root", password=lambda: PASSWORD)
        async with open_etcd_agreement(options, "DefaultCluster", "broker-a") as agreement:
            async with agreement.watch() as watch:
                taken = await elect(agreement, 1)
                await until(watch, lambda view: view.revision == taken)
                await cluster.servers[0].kill()
                await cluster.start()
                asked = await retry_until_available(lambda: agreement.request_switch(SwitchRequest(to=2)))
                seen = await until(watch, lambda view: view.switch_revision == asked)
                assert not any(each.is_restart for each in seen)
            shown = f"{options!r} {agreement!r} {agreement.statistics()!r} {caplog.text}"
        assert PASSWORD not in shown
        assert base64.b64encode(PASSWORD.encode()).decode() not in shown
        # One attempt, however slow the machine is: after one that timed out the outcome would be in doubt.
        async with open_agreement(*cluster.endpoints, attempt_timeout_s=30.0) as stranger:
            with pytest.raises(AgreementUnavailable, match="user name is empty") as caught:
                await stranger.create_group(EMPTY, timeout_s=30.0)
            assert not caught.value.outcome_unknown


async def test_a_wrong_password_is_reported_at_once_without_being_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_cluster(tmp_path) as cluster:
        await cluster.turn_authentication_on("root", PASSWORD)
        async with open_agreement(*cluster.endpoints, user="root", password=lambda: "incorrect") as agreement:
            with pytest.raises(AgreementUnavailable, match="invalid user ID or password") as caught:
                await agreement.view()
            assert "incorrect" not in f"{caught.value} {caplog.text}"


async def test_an_expired_token_is_replaced(tmp_path: Path) -> None:
    async with open_cluster(tmp_path, options=["--auth-token-ttl=1"]) as cluster:
        await cluster.turn_authentication_on("root", PASSWORD)
        asked = 0

        def password() -> str:
            nonlocal asked
            asked += 1
            return PASSWORD

        async with open_agreement(*cluster.endpoints, user="root", password=password) as agreement:
            lease = await agreement.grant_lease(60)
            await agreement.create_group(EMPTY)
            before = asked
            await trio.sleep(4)  # it looks for ended tokens each second
            view = await agreement.view()
            assert view.group == EMPTY
            assert asked > before
            await trio.sleep(4)
            assert await agreement.put_member(1, MEMBER, lease=lease) == view.revision + 1


async def test_concurrent_calls_share_one_token(tmp_path: Path) -> None:
    """etcd makes checking a password dear on purpose."""
    async with open_cluster(tmp_path) as cluster:
        await cluster.turn_authentication_on("root", PASSWORD)
        asked = 0

        def password() -> str:
            nonlocal asked
            asked += 1
            return PASSWORD

        async with open_agreement(
            *cluster.endpoints, user="root", password=password, attempt_timeout_s=30.0
        ) as agreement:
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(lambda: agreement.view(timeout_s=30))
            assert asked == 1


async def test_authentication_may_be_turned_on_later(tmp_path: Path) -> None:
    async with (
        open_cluster(tmp_path) as cluster,
        open_agreement(*cluster.endpoints, user="root", password=lambda: PASSWORD) as agreement,
    ):
        await agreement.create_group(EMPTY)
        await cluster.turn_authentication_on("root", PASSWORD)
        assert (await agreement.view()).group == EMPTY


async def test_missing_permission_is_reported(tmp_path: Path) -> None:
    async with open_cluster(tmp_path) as cluster:
        await cluster.ask("/v3/auth/user/add", {"name": "guest", "password": PASSWORD})
        await cluster.turn_authentication_on("root", PASSWORD)
        async with open_agreement(*cluster.endpoints, user="guest", password=lambda: PASSWORD) as agreement:
            with pytest.raises(AgreementUnavailable, match="permission denied"):
                await agreement.view()
            async with agreement.watch() as watch:
                with pytest.raises(trio.TooSlowError), trio.fail_after(1):
                    await watch.__anext__()
            assert agreement.statistics().call_count < 40


# TLS


class Certificates:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.authority = trustme.CA()
        self.trust = folder / "trust.pem"
        self.authority.cert_pem.write_to_path(str(self.trust))
        pair = self.authority.issue_cert("127.0.0.1")
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        pair.cert_chain_pems[0].write_to_path(str(self.certificate))
        pair.private_key_pem.write_to_path(str(self.key))
        self.server_options = [f"--cert-file={self.certificate}", f"--key-file={self.key}"]

    def context(self, *, with_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.trust))
        if with_certificate:
            self.authority.issue_cert("member@halog").configure_cert(context)
        return context


async def test_server_certificates_are_verified(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "own")
    stranger = Certificates(tmp_path / "stranger").context()
    context = stranger
    async with (
        open_cluster(tmp_path, options=certificates.server_options, scheme="https") as cluster,
        open_agreement(*cluster.endpoints, tls=lambda: context) as agreement,
    ):
        with pytest.raises(AgreementUnavailable, match="CERTIFICATE_VERIFY_FAILED") as caught:
            await agreement.create_group(EMPTY, timeout_s=0.5)
        assert not caught.value.outcome_unknown
        # The files have changed.
        context = certificates.context()
        async with agreement.watch() as watch:
            created = await agreement.create_group(EMPTY)
            await until(watch, lambda view: view.group_revision == created)
            context = certificates.context()
            asked = await agreement.request_switch(SwitchRequest(to=2))
            await until(watch, lambda view: view.switch_revision == asked)


async def test_client_certificates(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "own")
    options = [*certificates.server_options, "--client-cert-auth", f"--trusted-ca-file={certificates.trust}"]
    known, unknown = certificates.context(with_certificate=True), certificates.context()
    async with open_cluster(tmp_path, options=options, scheme="https") as cluster:
        async with open_agreement(*cluster.endpoints, tls=lambda: known) as agreement:
            await agreement.create_group(EMPTY)
        async with open_agreement(*cluster.endpoints, tls=lambda: unknown) as agreement:
            with pytest.raises(AgreementUnavailable):
                await agreement.view(timeout_s=1)


async def test_a_hanging_tls_handshake_leaks_no_connection(nursery: trio.Nursery) -> None:
    come, gone = trio.Event(), trio.Event()

    async def swallow(stream: trio.SocketStream) -> None:
        come.set()
        async for _ in stream:
            pass
        gone.set()

    listeners = await nursery.start(partial(trio.serve_tcp, swallow, 0, host="127.0.0.1"))
    endpoint = f"https://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    async with open_agreement(endpoint) as agreement:
        with trio.fail_after(30):
            while not come.is_set():  # a busy machine may need longer to connect at all
                with pytest.raises(AgreementUnavailable, match="no answer within"):
                    await agreement.view(timeout_s=0.2)
            await gone.wait()


# what is there


async def test_a_lease_has_whole_seconds_and_a_minimum(cluster: EtcdCluster) -> None:
    async with open_agreement(*cluster.endpoints) as agreement:
        assert [(await agreement.grant_lease(ttl_s)).ttl_s for ttl_s in (0.2, 2.1, 7)] == [LEASE_MIN_S, 3, 7]


async def test_groups_do_not_interfere(cluster: EtcdCluster) -> None:
    options = EtcdOptions(endpoints=cluster.endpoints)
    for number, (name, broker) in enumerate([("c", "b"), ("c", "b/members"), ("c/b", "x"), ("c", "bb")]):
        async with open_etcd_agreement(options, name, broker) as agreement:
            await agreement.create_group(replace(EMPTY, ack_count=number))
    async with open_etcd_agreement(options, "c", "b") as agreement:
        assert (await agreement.view()).group == replace(EMPTY, ack_count=0)


async def test_an_invalid_record_is_refused_until_it_is_fixed(cluster: EtcdCluster) -> None:
    async with open_agreement(*cluster.endpoints, attempt_timeout_s=5.0) as agreement, agreement.watch() as watch:
        await agreement.create_group(EMPTY)
        await until(watch, lambda view: view.group is not None)
        value = base64.b64encode(b'{"epoch":"two"}').decode()
        await cluster.ask("/v3/kv/put", {"key": key("group"), "value": value})
        with pytest.raises(AgreementUnavailable, match="holds no GroupRecord"):
            await agreement.view()
        later = GroupRecord(epoch=7, master_id=None, sync_state_set=frozenset({1}))
        value = base64.b64encode(msgspec.json.encode(later)).decode()
        await cluster.ask("/v3/kv/put", {"key": key("group"), "value": value})
        assert (await agreement.view()).group == later
        await until(watch, lambda view: view.group == later)


async def test_unknown_fields_of_a_record_are_ignored(cluster: EtcdCluster) -> None:
    """Written by a later release."""
    async with open_agreement(*cluster.endpoints) as agreement:
        value = base64.b64encode(b'{"to":3,"reason":"x","since":1}').decode()
        await cluster.ask("/v3/kv/put", {"key": key("switch"), "value": value})
        await cluster.ask("/v3/kv/put", {"key": key("a-later-release"), "value": ""})
        assert (await agreement.view()).switch == SwitchRequest(to=3, reason="x")

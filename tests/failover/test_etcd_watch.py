"""What a watch makes of a stream's bytes, with no server: whole, byte by byte, damaged, more than anybody takes."""

import base64
import json
from functools import partial
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ha.failover.agreement import AgreementUnavailable, GroupView, Seen, SwitchRequest
from ha.failover.etcd import EtcdAgreement, open_etcd_agreement
from ha.failover.etcd_client import ANSWER_SIZE_MAX, EtcdClient, EtcdOptions, open_etcd_client
from ha.failover.etcd_values import (
    KeyValue,
    group_prefix,
    value_of,
)
from ha.failover.etcd_watch import QUEUE_COUNT_MAX, EtcdWatch
from ha.failover.switchover import is_open
from tests.failover.contract import EMPTY, MEMBER, master
from tests.failover.group import until
from tests.fuzz.agreement import PREFIX


def text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def put(name: str, record: Any, revision: int, *, created: int = 0, lease: int = 0) -> dict[str, Any]:
    kv = {"key": text(PREFIX + name.encode()), "mod_revision": str(revision), "version": "1"}
    kv |= {"create_revision": str(created or revision), "value": text(value_of(record))}
    return {"kv": kv | ({"lease": str(lease)} if lease else {})}


def gone(name: str, revision: int) -> dict[str, Any]:
    return {"type": "DELETE", "kv": {"key": text(PREFIX + name.encode()), "mod_revision": str(revision)}}


def line(**result: Any) -> bytes:
    return json.dumps({"result": {"header": {"revision": "99"}, **result}}).encode() + b"\n"


CREATED = line(created=True)
STREAM = (
    CREATED
    + line(events=[put("group", EMPTY, 5)])
    # One change of several keys, and another behind it, in one answer.
    + line(
        events=[put("group", EMPTY, 6), put("master", master(1, 1), 6, lease=77), put("members/1", MEMBER, 7, lease=77)]
    )
    + line(events=[put("switch", SwitchRequest(to=2), 8)])
    + line(events=[gone("master", 9), gone("members/1", 9)])
)
G6: dict[str, Any] = {"group": EMPTY, "group_revision": 6}
M6: dict[str, Any] = {"master": master(1, 1), "master_revision": 6, "master_lease_id": 77}
ONE: dict[str, Any] = {"members": {1: MEMBER}, "member_lease_ids": {1: 77}}
S8: dict[str, Any] = {"switch": SwitchRequest(to=2), "switch_revision": 8}
VIEWS = [
    GroupView(revision=5, group=EMPTY, group_revision=5),
    GroupView(revision=6, **G6, **M6),
    GroupView(revision=7, **G6, **M6, **ONE),
    GroupView(revision=8, **G6, **M6, **S8, **ONE),
    GroupView(revision=9, **G6, **S8),
]


def watch_at(revision: int) -> EtcdWatch:
    """One that has begun with no keys at `revision`."""
    watch = EtcdWatch(EtcdClient(EtcdOptions(endpoints=("http://127.0.0.1:1",))), PREFIX)
    watch._publish({}, revision, is_restart=True)
    watch._queue.clear()
    return watch


async def told(watch: EtcdWatch) -> list[Seen]:
    return [await watch.__anext__() for _ in range(len(watch._queue))]


@pytest.mark.parametrize("size", [1, 7, 64, len(STREAM)])
async def test_one_view_per_revision_from_chunks_of_any_size(size: int) -> None:
    watch = watch_at(4)
    for begin in range(0, len(STREAM), size):
        assert watch._take(STREAM[begin : begin + size])
    assert await told(watch) == [Seen(view, is_restart=False) for view in VIEWS]


@pytest.mark.parametrize("revision", range(4, 10))
async def test_published_revisions_are_not_published_again(revision: int) -> None:
    """A new stream may start with events of the previous one."""
    watch = watch_at(revision)
    assert watch._take(STREAM)
    assert watch._take(STREAM)
    assert [seen.view.revision for seen in await told(watch)] == list(range(revision + 1, 10))


@pytest.mark.parametrize(
    ("ending", "starts_over"),
    [
        (line(canceled=True, compact_revision="8"), True),
        (line(canceled=True, cancel_reason="etcdserver: no leader"), False),
        (b'{"error":{"grpc_code":14,"http_code":503,"message":"transport is closing"}}\n', False),
        (b'{"result":[]}\n', False),
        (b"<html>\n", False),
        (line(events=[put("group", MEMBER, 5)]), True),  # not what halog writes there
    ],
)
async def test_ends_of_a_stream(ending: bytes, *, starts_over: bool) -> None:
    watch = watch_at(4)
    assert watch._take(CREATED)
    assert not watch._take(ending)
    assert watch._end_reason
    assert (watch._keys is None) == starts_over
    assert not watch._queue


@pytest.mark.parametrize("value", [b'{"to": "2"}', b"2", b"{to: 2}", b"\xff"])
async def test_an_invalid_switch_request_hides_nothing_else(value: bytes) -> None:
    """An operator may write it by hand. Elections go on."""
    watch = watch_at(4)
    invalid = put("switch", EMPTY, 5)
    invalid["kv"]["value"] = text(value)
    assert watch._take(CREATED + line(events=[invalid]) + line(events=[put("group", EMPTY, 6)]))
    [_, seen] = await told(watch)
    assert (seen.view.group, seen.view.switch_revision) == (EMPTY, 5)
    assert not is_open(seen.view.switch)
    assert seen.view.switch is not None
    assert "switch holds no SwitchRequest" in seen.view.switch.refusal


async def test_a_slow_reader_gets_the_newest_view(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = watch_at(0)
    for revision in range(1, QUEUE_COUNT_MAX + 4):
        assert watch._take(line(events=[put("switch", SwitchRequest(to=revision), revision)]))
        assert len(watch._queue) <= QUEUE_COUNT_MAX
    seen = await told(watch)
    assert [each.is_restart for each in seen] == [True, False, False]
    assert seen[-1].view.switch == SwitchRequest(to=QUEUE_COUNT_MAX + 3)


def key_value(name: str, record: Any, revision: int) -> dict[bytes, KeyValue]:
    key = PREFIX + name.encode()
    return {key: KeyValue(key=key, value=value_of(record), mod_revision=revision)}


@pytest.mark.parametrize(
    ("found", "is_older"),
    [
        (key_value("group", EMPTY, 6), False),
        (key_value("group", EMPTY, 5), True),
        (key_value("group", MEMBER, 6), True),
        (key_value("group", EMPTY, 20), False),
        ({}, False),
    ],
    ids=["as told", "older", "another of this revision", "newer", "deleted"],
)
async def test_an_older_key_shows_a_restored_backup(found: dict[bytes, KeyValue], *, is_older: bool) -> None:
    """The service's revision has passed the published one, through other writes since the restore."""
    watch = watch_at(4)
    assert watch._take(STREAM)
    assert watch._went_back(found, 30) is is_older


async def test_events_after_a_failed_check_are_ignored() -> None:
    watch = watch_at(4)
    watch._end_reason, watch._keys = "etcd has lost changes that it had reported", None
    assert not watch._take(STREAM)
    assert not watch._queue


async def test_a_read_older_than_the_published_view_shows_nothing() -> None:
    watch = watch_at(4)
    assert watch._take(STREAM)
    assert not watch._went_back(key_value("group", EMPTY, 5), 5)


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_no_prefix_contains_another_groups_keys(cluster: str, name: str, other_cluster: str, other_name: str) -> None:
    one, other = group_prefix(cluster, name), group_prefix(other_cluster, other_name)
    assert other.startswith(one) == ((cluster, name) == (other_cluster, other_name))


@pytest.mark.parametrize(
    "options",
    [
        {"endpoints": ()},
        {"endpoints": ("127.0.0.1:2379",)},
        {"endpoints": ("ftp://127.0.0.1:2379",)},
        {"endpoints": ("http://127.0.0.1:2379/v3",)},
        {"endpoints": ("http://root:secret@127.0.0.1:2379",)},
        {"endpoints": ("http://127.0.0.1:2379",), "attempt_timeout_s": 0},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"endpoint|http|timeout") as caught:
        EtcdOptions(**options)
    assert "secret" not in str(caught.value)


async def test_an_endless_answer_is_aborted(caplog: pytest.LogCaptureFixture) -> None:
    """A call's and a watch's."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    sent: list[int] = []

    async def flood(stream: trio.SocketStream) -> None:
        sent.append(0)
        number = len(sent) - 1
        try:
            await stream.receive_some()
            await stream.send_all(head)
            while True:
                await stream.send_all(chunk)
                sent[number] += len(chunk)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, flood, 0, host="127.0.0.1"))
        options = EtcdOptions(
            endpoints=(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}",), attempt_timeout_s=20.0
        )
        async with open_etcd_client(options) as client:
            with pytest.raises(AgreementUnavailable):
                await client.call("asking", "/v3/kv/range", {}, timeout_s=5, changes=False)
            assert "an answer of more than" in caplog.text
            watch = EtcdWatch(client, PREFIX)
            watch._publish({}, 1, is_restart=True)
            assert await client.follow(0, "/v3/watch", {}, watch._take, timeout_s=20.0) == ""
            assert watch._end_reason.startswith("a line of more than")
        nursery.cancel_scope.cancel()
    assert max(sent) < 4 * ANSWER_SIZE_MAX  # plus what the sockets hold


async def test_a_record_that_an_operator_damaged_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a member that starts then would wait for its first view without a reason."""
    kvs = [{"key": text(PREFIX + b"group"), "mod_revision": "5", "value": text(b"null")}]
    answer = json.dumps({"header": {"revision": "5"}, "kvs": kvs}).encode()

    async def serve(stream: trio.SocketStream) -> None:
        while not (await stream.receive_some()).endswith(b"}"):
            pass
        await stream.send_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        endpoint = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        async with open_etcd_client(EtcdOptions(endpoints=(endpoint,))) as client:
            nursery.start_soon(EtcdWatch(client, PREFIX).run)
            with trio.fail_after(5):
                await until(lambda: "holds no GroupRecord" in client.statistics().last_error)
            nursery.cancel_scope.cancel()
    assert "holds no GroupRecord" in caplog.text


async def test_a_call_that_outlives_its_client_ends_in_time(autojump_clock: trio.testing.MockClock) -> None:
    outcomes: list[bool] = []

    async def ask(agreement: EtcdAgreement) -> None:
        with pytest.raises(AgreementUnavailable) as caught:
            await agreement.create_group(EMPTY, timeout_s=5)
        outcomes.append(caught.value.outcome_unknown)

    async with (
        trio.open_nursery() as nursery,
        open_etcd_agreement(EtcdOptions(endpoints=("http://127.0.0.1:1",)), "c", "b") as agreement,
    ):
        nursery.start_soon(ask, agreement)
        await trio.sleep(1)
    assert outcomes == [False]

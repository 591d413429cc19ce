"""HAService: which slaves count, and the explanations for producers."""

import logging
import math
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from ha.protocol.codes import PutStatus
from ha.protocol.ha_frame import encode_report
from ha.replication.group_transfer import ANY_SLAVE, AckRequest
from ha.replication.ha_service import ENDS_IN_WORDS, HAService
from ha.replication.options import HAOptions
from ha.replication.peers import identify_by_address
from ha.replication.progress import CloseReason, SlaveState
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog
from tests.replication.slave_side import SlaveSide

END = SEGMENT_SIZE


def new_service(**options: int) -> tuple[MemoryLog, HAService]:
    log = MemoryLog(bytes(END))
    return log, HAService(log, HAOptions(**options))  # type: ignore[arg-type]


async def connected(nursery: trio.Nursery, service: HAService, peer: str, *reports: int) -> SlaveSide:
    slave = SlaveSide(service, peer)
    slave.start(nursery)
    await wait_all_tasks_blocked()
    for report in reports:
        await slave.report(report)
        await wait_all_tasks_blocked()
    return slave


async def test_two_connections_of_one_slave_count_once(nursery: trio.Nursery) -> None:
    _, service = new_service()
    await connected(nursery, service, "10.0.0.1:1111", 1, 100)
    await connected(nursery, service, "10.0.0.1:2222", 1, 300)
    await connected(nursery, service, "10.0.0.2:3333", 1, 200)
    assert service.acknowledged() == [300, 200]
    assert service.in_sync_replicas_nums(END) == 3
    assert service.connection_count == 3


async def test_on_loopback_every_connection_is_a_slave(nursery: trio.Nursery) -> None:
    _, service = new_service()
    await connected(nursery, service, "127.0.0.1:1", 100)
    await connected(nursery, service, "[::1]:2", 100)
    assert service.in_sync_replicas_nums(END) == 3


@pytest.mark.parametrize(
    ("peer", "identity"),
    [
        ("10.1.2.3:555", "10.1.2.3"),
        ("127.0.0.1:555", "127.0.0.1:555"),
        ("[::1]:555", "[::1]:555"),
        ("[2001:db8::7]:555", "2001:db8::7"),
        ("stapledstream-7f", "stapledstream-7f"),
    ],
)
def test_identity_is_the_address(peer: str, identity: str) -> None:
    assert identify_by_address(peer) == identity


def test_every_close_reason_has_a_text() -> None:
    assert set(ENDS_IN_WORDS) == set(CloseReason)


async def test_a_silent_connection_does_not_count(nursery: trio.Nursery) -> None:
    _, service = new_service()
    assert service.explain(END) == "no slave is connected"
    await connected(nursery, service, "10.0.0.1:1")
    assert service.connection_count == 1
    assert not service.is_slave_ok(0)
    assert service.in_sync_replicas_nums(0) == 1
    assert service.explain(END) == "1 connected, not yet reported an offset"


class SlowToClose(trio.abc.Stream):
    """A stream whose peer closes at once, and whose own close blocks until `may_close` is set."""

    def __init__(self) -> None:
        self.may_close = trio.Event()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            await self.may_close.wait()


async def test_a_closing_connection_does_not_count() -> None:
    """A put then gets as explanation that the slave disconnected, not that one can't connect."""
    _, service = new_service()
    service.record_table_copy("10.0.0.1")
    stream = SlowToClose()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.handle, stream, "10.0.0.1:1")
        await wait_all_tasks_blocked()
        stream.may_close.set()
        assert service.connection_count == 1
        assert not service.is_slave_ok(0)
        assert service.explain(END) == "no slave is connected; the last one, 10.0.0.1:1, closed its connection, 0 s ago"


async def test_the_gap_is_strict(nursery: trio.Nursery) -> None:
    _, service = new_service(fall_behind_max_bytes=1000)
    await connected(nursery, service, "10.0.0.1:1", 500)
    assert service.is_slave_ok(1499)
    assert service.explain(1499) == ""
    assert not service.is_slave_ok(1500)
    assert service.explain(1500) == "slave 10.0.0.1 is 1000 bytes behind, 1000 or more is too far"
    assert service.in_sync_replicas_nums(1499) == 2
    assert service.in_sync_replicas_nums(1500) == 1


async def test_push2_offset_stays_when_its_slave_disconnects(nursery: trio.Nursery) -> None:
    _, service = new_service()
    slave = await connected(nursery, service, "10.0.0.1:1", 1, 700)
    slave_gone = slave.stream.send_stream
    await slave_gone.aclose()
    await wait_all_tasks_blocked()
    assert service.push2_slave_max_offset == 700
    assert not service.is_slave_ok(700)


async def test_what_a_slave_requests_acknowledges_no_put(nursery: trio.Nursery) -> None:
    """Its log may have the history from before the master lost its tail. It compares its end, and disconnects."""
    _, service = new_service()
    done: list[PutStatus] = []
    nursery.start_soon(service.group_transfer.run)
    await connected(nursery, service, "10.0.0.1:1", 1, 10)
    await service.group_transfer.submit_channel.send([AckRequest(100, ANY_SLAVE, math.inf, done.append)])
    other = await connected(nursery, service, "10.0.0.2:1", 200, 200)
    assert service.in_sync_replicas_nums(END) == 3
    assert not done
    await other.report(201)
    await wait_all_tasks_blocked()
    assert done == [PutStatus.PUT_OK]


async def test_a_slave_that_requests_the_end_of_the_log_acknowledges_all(nursery: trio.Nursery) -> None:
    """RocketMQ's slaves compare nothing, and report no more until there is more."""
    _, service = new_service()
    await connected(nursery, service, "10.0.0.1:1", END)
    assert service.acknowledged() == [END]


async def test_retention_keeps_what_a_disconnected_slave_needs(nursery: trio.Nursery) -> None:
    _, service = new_service()
    await connected(nursery, service, "10.0.0.1:1", 700)
    away = await connected(nursery, service, "10.0.0.2:1", 300)
    await away.stream.send_stream.aclose()
    await wait_all_tasks_blocked()
    assert service.connection_count == 1
    assert service.lowest_needed_offset() == 300
    liar = await connected(nursery, service, "10.0.0.3:1", 200)
    await liar.report(END + 1)
    await wait_all_tasks_blocked()
    assert service.lowest_needed_offset() == 300
    await connected(nursery, service, "10.0.0.2:2", 400)
    assert service.lowest_needed_offset() == 400


async def test_retention_keeps_nothing_for_a_connection_whose_slave_is_back(nursery: trio.Nursery) -> None:
    """The master of a slave that was cut off notices that the old connection is lost after the slave has a new one."""
    _, service = new_service()
    lost = await connected(nursery, service, "10.0.0.1:1", 300)
    back = await connected(nursery, service, "10.0.0.1:2", 400)
    await lost.stream.send_stream.aclose()
    await wait_all_tasks_blocked()
    assert service.connection_count == 1
    await back.report(900)
    await wait_all_tasks_blocked()
    assert service.lowest_needed_offset() == 900
    await back.stream.send_stream.aclose()
    await wait_all_tasks_blocked()
    assert service.lowest_needed_offset() == 900


async def test_retention_keeps_what_a_slave_needs_while_another_one_has_its_address(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """As behind NAT. A slave that is back reports nothing on its old connection."""
    _, service = new_service()
    behind = await connected(nursery, service, "10.0.0.1:1", 300)
    await connected(nursery, service, "10.0.0.1:2", 900)
    autojump_clock.jump(1)
    await behind.report(300)
    await wait_all_tasks_blocked()
    await behind.stream.send_stream.aclose()
    await wait_all_tasks_blocked()
    assert service.connection_count == 1
    assert service.lowest_needed_offset() == 300


async def test_retention_keeps_what_each_disconnected_slave_of_a_host_needs(nursery: trio.Nursery) -> None:
    _, service = new_service()
    slaves = [
        await connected(nursery, service, f"127.0.0.1:{port}", position)
        for port, position in enumerate((900, 300, 700))
    ]
    for slave in slaves:
        await slave.stream.send_stream.aclose()
        await wait_all_tasks_blocked()
        assert service.lowest_needed_offset() == 300


async def test_retention_recognizes_a_slave_at_another_address(nursery: trio.Nursery) -> None:
    """As a pod that was restarted, if it is known by its certificate or its broker id."""
    service = HAService(MemoryLog(bytes(END)), identify=lambda peer: f"slave {peer[-1]}")
    away, other = [await connected(nursery, service, peer, 300) for peer in ("10.0.0.2:1", "10.0.0.2:3")]
    for slave in (away, other):
        await slave.stream.send_stream.aclose()
    await wait_all_tasks_blocked()
    await connected(nursery, service, "10.0.0.7:1", 400)
    assert service.lowest_needed_offset() == 300
    await connected(nursery, service, "10.0.0.8:3", 500)
    assert service.lowest_needed_offset() == 400


async def test_retention_forgets_a_position_that_is_deleted(nursery: trio.Nursery) -> None:
    log, service = new_service()
    log.put(bytes(500))
    early = await connected(nursery, service, "127.0.0.1:1", 300)
    late = await connected(nursery, service, "127.0.0.1:2", END + 300)
    await early.stream.send_stream.aclose()
    await wait_all_tasks_blocked()
    log.delete_before(END)
    await late.stream.send_stream.aclose()
    await wait_all_tasks_blocked()
    assert service.lowest_needed_offset() == END + 300


async def test_retention_keeps_what_the_slowest_slave_needs(nursery: trio.Nursery) -> None:
    _, service = new_service()
    assert service.lowest_needed_offset() is None
    await connected(nursery, service, "10.0.0.1:1", 700)
    await connected(nursery, service, "10.0.0.2:1", 300)
    await connected(nursery, service, "10.0.0.3:1")
    assert service.lowest_needed_offset() == 300


async def test_acks_of_an_empty_slave_in_a_later_segment_are_withheld(nursery: trio.Nursery) -> None:
    """A put at the end of a segment waits for two slaves; a new one that starts in the next must not be the second."""
    log, service = new_service()
    done: list[tuple[float, PutStatus]] = []
    began = trio.current_time()
    nursery.start_soon(service.group_transfer.run)
    await connected(nursery, service, "10.0.0.1:1", END)
    await connected(nursery, service, "10.0.0.2:1", 1, 10)
    await service.group_transfer.submit_channel.send(
        [AckRequest(END, 3, began + 3, lambda status: done.append((trio.current_time() - began, status)))]
    )
    log.put(bytes(30))
    fresh = await connected(nursery, service, "10.0.0.3:1", 0, END, END + 30)
    assert done == []
    assert service.acknowledged() == [END, 10]
    assert "slave 10.0.0.3 has just started at offset 4096" in service.explain(END)
    await trio.sleep_until(began + 4)
    assert done == [(3.0, PutStatus.FLUSH_SLAVE_TIMEOUT)]
    await fresh.report(END + 30)
    await wait_all_tasks_blocked()
    assert service.acknowledged() == [END + 30, END, 10]


async def test_silent_connections_are_evicted_when_full(nursery: trio.Nursery) -> None:
    _, service = new_service(connection_count_max=2)
    stranger = await connected(nursery, service, "10.9.9.9:1")
    await connected(nursery, service, "10.0.0.1:1", 1, 10)
    await connected(nursery, service, "10.0.0.2:1", 1, 20)
    assert stranger.close_reason is CloseReason.TOO_MANY_CONNECTIONS
    assert service.acknowledged() == [20, 10]
    refused = await connected(nursery, service, "10.0.0.3:1")
    assert refused.close_reason is CloseReason.TOO_MANY_CONNECTIONS
    assert refused.closed_at == 0
    assert service.acknowledged() == [20, 10]


async def test_a_repeated_close_reason_is_logged_once_and_always_counted(caplog: pytest.LogCaptureFixture) -> None:
    _, service = new_service()
    with caplog.at_level(logging.INFO):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                await connected(nursery, service, "10.0.0.1:1", END + 1)
    assert caplog.text.count("reason=report_beyond_end") == 1
    assert service.statistics().closed_counts[CloseReason.REPORT_BEYOND_END] == 5


async def test_checks_of_the_port_are_logged_once(nursery: trio.Nursery, caplog: pytest.LogCaptureFixture) -> None:
    """Anybody can open connections at any rate."""
    _, service = new_service()
    with caplog.at_level(logging.INFO):
        for port in range(5):
            check = await connected(nursery, service, f"127.0.0.1:{port}")
            await check.stream.send_eof()
            await wait_all_tasks_blocked()
    assert caplog.text.count("ha.slave_connected") == 1
    assert caplog.text.count("ha.slave_disconnected") == 1
    assert service.statistics().closed_counts[CloseReason.SLAVE_CLOSED] == 5


@pytest.mark.parametrize(
    ("opening", "event"),
    [
        (b"\xff" * 16, "ha.reader_disconnected"),
        (encode_report(END + 100), "ha.transfer_started"),
        (encode_report(100), "ha.slave_out_of_range"),
    ],
)
async def test_what_anybody_can_cause_is_logged_once(
    opening: bytes, event: str, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    log, service = new_service()
    log.put(bytes(500))
    log.delete_before(END)
    with caplog.at_level(logging.INFO):
        for port in range(5):
            stranger = await connected(nursery, service, f"127.0.0.1:{port}")
            await stranger.stream.send_all(opening)
            await stranger.stream.send_eof()
            await wait_all_tasks_blocked()
    assert caplog.text.count(event) == 1


async def test_statistics_have_lag_and_rate(nursery: trio.Nursery) -> None:
    _, service = new_service()
    await connected(nursery, service, "10.0.0.1:1", 96, 1096)
    await trio.sleep(1.5)
    statistics = service.statistics()
    assert (statistics.max_offset, statistics.push2_slave_max_offset, statistics.slave_count) == (END, 1096, 1)
    (slave,) = statistics.slaves
    assert (slave.request_offset, slave.ack_offset, slave.transfer_offset) == (96, 1096, END)
    assert slave.lag_bytes == END - 1096
    assert slave.state is SlaveState.TRANSFER
    assert slave.is_in_sync
    assert slave.transferred_bytes == slave.transferred_bytes_per_s == END - 96 + 12
    assert slave.last_report_age_s == 1.5


async def test_waiting_for_states(nursery: trio.Nursery) -> None:
    _, service = new_service()
    seen: list[str] = []

    async def note(text: str, state: SlaveState, peer: str | None) -> None:
        await service.wait_state(state, peer)
        seen.append(text)

    nursery.start_soon(note, "two", SlaveState.TRANSFER, "10.0.0.2")
    nursery.start_soon(note, "any", SlaveState.TRANSFER, None)
    await connected(nursery, service, "10.0.0.1:1", 10)
    assert seen == ["any"]
    slave = await connected(nursery, service, "10.0.0.2:1", 10)
    assert seen == ["any", "two"]
    nursery.start_soon(note, "two is gone", SlaveState.SHUTDOWN, "10.0.0.2:1")
    await wait_all_tasks_blocked()
    await slave.stream.send_stream.aclose()
    await wait_all_tasks_blocked()
    assert seen == ["any", "two", "two is gone"]


async def test_no_task_and_no_connection_outlives_serve() -> None:
    _, service = new_service()
    before = trio.lowlevel.current_statistics().tasks_living
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(service.serve, listeners)
        streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        for stream in streams:
            await stream.send_all((10).to_bytes(8, "big"))
            host, port = stream.socket.getsockname()[:2]
            with trio.fail_after(5):
                await service.wait_state(SlaveState.TRANSFER, f"{host}:{port}")
        assert len(service.acknowledged()) == 3
        nursery.cancel_scope.cancel()
    assert service.connection_count == 0
    assert trio.lowlevel.current_statistics().tasks_living == before
    for stream in streams:
        with trio.fail_after(5), suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass
        await stream.aclose()


async def test_a_memory_stream_has_a_unique_name(nursery: trio.Nursery) -> None:
    _, service = new_service()
    ours, theirs = memory_stream_pair()
    nursery.start_soon(service.handle, theirs)
    await ours.send_all((10).to_bytes(8, "big"))
    await wait_all_tasks_blocked()
    assert service.statistics().slaves[0].peer.startswith("stapledstream-")


@pytest.mark.parametrize(("reports", "had_slave"), [((), False), ((END + 1,), False), ((1, END), True)])
async def test_only_a_peer_that_reported_was_a_slave(
    nursery: trio.Nursery, reports: tuple[int, ...], had_slave: bool
) -> None:
    """Not a check of the port, nor a slave of another log: an ASYNC_MASTER without slaves is no reason to warn."""
    _, service = new_service()
    peer = await connected(nursery, service, "10.0.0.1:1111", *reports)
    await peer.stream.send_eof()
    await wait_all_tasks_blocked()
    assert sum(service.statistics().closed_counts.values()) == 1
    assert service.statistics().had_slave is had_slave

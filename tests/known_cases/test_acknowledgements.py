"""Acknowledgements of bytes that the slave can't have."""

from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.options import BrokerRole
from ha.protocol.codes import ResponseCode
from ha.protocol.ha_frame import encode_report
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason
from tests.broker.node import open_node
from tests.replication.slave_side import SlaveSide

STRANGE = [
    encode_report(1 << 62),
    b"GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n",
    Random(3015).randbytes(64),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(48)),
    (-2).to_bytes(8, "big", signed=True) + encode_report(1 << 40),
]


@pytest.mark.parametrize("said", STRANGE, ids=["huge", "http", "random", "tls", "negative"])
async def test_3015_bytes_from_a_stranger_acknowledge_nothing(said: bytes, tmp_path: Path) -> None:
    """apache/rocketmq#3015: any eight bytes sent to the HA port were taken for a slave's offset and raised
    push2SlaveMaxOffset, so a SYNC_MASTER answered SEND_OK for messages that no slave had. RocketMQ 4.9 closes such a
    connection, 5.x accepts anything again.

    Halog closes the connection, acknowledges nothing, and logs the sender.
    """
    async with open_node(tmp_path, role=BrokerRole.SYNC_MASTER) as node, trio.open_nursery() as nursery:
        await node.send()
        stranger = SlaveSide(node.ha, "10.6.6.6:666")
        stranger.start(nursery)
        await stranger.stream.send_all(said)
        await wait_all_tasks_blocked()
        assert stranger.close_reason in (CloseReason.REPORT_BEYOND_END, CloseReason.MALFORMED_REPORT)
        assert node.ha.push2_slave_max_offset == 0
        answer = await node.send()
        assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
        assert "the last one, 10.6.6.6:666" in (answer.remark or "")


async def test_1155_slave_with_a_longer_log_does_not_acknowledge_new_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """apache/rocketmq#1155: a slave ahead of its master (which had lost its tail) reported an offset beyond the
    master's end; push2SlaveMaxOffset stayed that high, and every put up to there was reported as replicated.

    In halog such a report never counts: puts before and after it wait for a slave that has them.
    """
    options = HAOptions()
    async with (
        open_node(tmp_path, role=BrokerRole.SYNC_MASTER, ha_options=options, slave_timeout_s=3.0) as node,
        trio.open_nursery() as nursery,
    ):
        await node.send()
        end = node.store.log.max_offset.value
        ahead = SlaveSide(node.ha, "10.0.0.2:40000")
        ahead.start(nursery)
        await ahead.report(end + 5000)
        await wait_all_tasks_blocked()
        assert ahead.close_reason is CloseReason.REPORT_BEYOND_END
        answer = await node.send()
        assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
        why = f"it claims to hold offset {end + 5000}, the log here ends at {end}"
        assert why in (answer.remark or "")
        assert any("ha.slave_disconnected" in record.message and why in record.message for record in caplog.records)

        # A slave that follows and then reports more than it was sent is treated alike.
        liar = SlaveSide(node.ha, "10.0.0.3:40000")
        liar.start(nursery)
        await liar.report(node.store.log.max_offset.value)
        await wait_all_tasks_blocked()
        acknowledged = node.ha.push2_slave_max_offset
        assert acknowledged == node.store.log.max_offset.value
        await liar.report(node.store.log.max_offset.value + 1)
        await wait_all_tasks_blocked()
        assert liar.close_reason is CloseReason.REPORT_BEYOND_END
        assert node.ha.push2_slave_max_offset == acknowledged

        # A correct slave makes puts SEND_OK again, by its own acknowledgement alone.
        honest = SlaveSide(node.ha, "10.0.0.4:40000")
        honest.start(nursery)
        await honest.report(node.store.log.max_offset.value)
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as sends:
            answers = []

            async def send() -> None:
                answers.append(await node.send())

            sends.start_soon(send)
            await trio.sleep(1)
            assert answers == []
            await honest.report(node.store.log.max_offset.value)
        assert [answer.code for answer in answers] == [ResponseCode.SUCCESS]
        nursery.cancel_scope.cancel()


async def test_1535_message_in_many_transfers_is_acknowledged_by_the_last(tmp_path: Path) -> None:
    """apache/rocketmq#1535: GroupTransferService checked only five times whether the slave had a message, once per
    acknowledgement; a message larger than 5 × haTransferBatchSize got FLUSH_SLAVE_TIMEOUT although the slave received
    it in time.

    In halog the status depends on the offset and the deadline, not on the number of reports.
    """
    options = HAOptions(transfer_batch_size_bytes=1024)
    async with (
        open_node(tmp_path, role=BrokerRole.SYNC_MASTER, ha_options=options) as node,
        trio.open_nursery() as nursery,
    ):
        await node.send()
        slave = SlaveSide(node.ha, "10.0.0.2:40000")
        slave.start(nursery)
        held = node.store.log.max_offset.value
        await slave.report(held)

        async def acknowledge_each() -> None:
            seen = 0
            while True:
                await trio.sleep(0.01)
                end = max((offset + len(body) for _, offset, body in slave.frames[seen:] if body), default=0)
                seen = len(slave.frames)
                if end:
                    await slave.report(end)

        nursery.start_soon(acknowledge_each)
        await wait_all_tasks_blocked()
        answer = await node.send(bytes(200_000))
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert len(slave.frames) > 190
        nursery.cancel_scope.cancel()

"""Data that a power loss can take back must never be visible."""

import trio
from trio.testing import MockClock, memory_stream_pair

from ha.replication.ha_client import HAClient
from ha.replication.options import HAOptions
from tests.replication.members import SLAVE, Member, leading


async def test_8239_unflushed_messages_are_not_confirmed_in_a_group(autojump_clock: MockClock) -> None:
    """apache/rocketmq#8239: with SYNC_FLUSH consumers received messages that were not on the disk yet, and committed
    offsets behind them. A crash removed the messages; the next ones got their queue offsets, and were skipped.

    In halog queues and index follow the flushed end. In a failover group with SYNC_FLUSH consumers of any member see
    only what each member of the set, including the master, has on its disk, so that it survives a power loss of all.
    """
    master, slave = await Member(bytes(1000)).begin((1, 0)), await Member(bytes(1000)).begin((1, 0))
    options = HAOptions(start_from="first", ack_flushed=True, reconnect_interval_s=0.1)
    service = leading(master, SLAVE, options=options)
    async with trio.open_nursery() as nursery:

        async def connect(address: str) -> trio.abc.Stream:
            ours, theirs = memory_stream_pair()
            nursery.start_soon(service.handle, theirs, "10.0.0.2:40000")
            return ours

        client = HAClient(slave.log, options, connect, member=slave, broker_id=SLAVE)
        client.set_master("10.0.0.1:10912")
        nursery.start_soon(client.run)
        await trio.sleep(10)
        assert (master.log.dispatch_limit.value, slave.log.dispatch_limit.value) == (1000, 1000)
        for number, late in enumerate((slave, master)):
            before, after = 1000 + 50 * number, 1050 + 50 * number
            late.log.flushes = False
            master.log.put(b"x" * 50)
            await trio.sleep(60)
            assert slave.log.max_offset.value == master.log.max_offset.value == after
            assert late.log.flushed_offset.value == before
            assert (master.log.dispatch_limit.value, slave.log.dispatch_limit.value) == (before, before)
            late.log.flush()
            late.log.flushes = True
            await trio.sleep(10)
            assert (master.log.dispatch_limit.value, slave.log.dispatch_limit.value) == (after, after)
        nursery.cancel_scope.cancel()

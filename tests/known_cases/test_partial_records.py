"""Records of which a slave has only a part."""

import logging

import pytest
from trio.testing import wait_all_tasks_blocked

from ha.protocol.topic_names import HALF_TOPIC
from tests.store.stores import SEGMENT, all_bytes, check_derived, message, open_small, records


@pytest.mark.parametrize("flush_mode", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_9002_dispatch_waits_for_the_rest_of_a_record(flush_mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """apache/rocketmq#9002: replication copies bytes, so a slave's log often ends inside a record. Dispatch then met a
    BufferUnderflowException, logged it as an error, and retried until the rest had arrived.

    In halog such an end is no error: a partial record, including half messages of transactions, is neither dispatched
    nor logged; with its last byte the record is in its queue.
    """
    caplog.set_level(logging.WARNING)
    async with open_small() as master, open_small(is_slave=True, flush_mode=flush_mode) as slave:
        for number in range(40):
            topic, queue_id = (HALF_TOPIC, 0) if number % 3 == 0 else ("T", number % 2)
            await master.log.put([message(number, topic=topic, queue_id=queue_id)])
        log = await all_bytes(master)
        assert len(log) > SEGMENT  # the filler of a segment is such a record, too
        ends = [record.physical_offset + record.total_size for record in await records(master)]
        for at in range(len(log)):
            await slave.log.append_raw(at, log[at : at + 1])
            if at % 16 and at + 1 not in ends and at not in ends:
                continue
            await wait_all_tasks_blocked()
            whole = [end for end in ends if end <= at + 1]
            assert slave.log.dispatched_offset.value >= (whole or [0])[-1]
            assert sum(queue.max_offset for queue in slave.queues) == len(whole), at
            assert slave.statistics().dispatch_paused_reason == ""
        await check_derived(slave)
    assert [record.getMessage() for record in caplog.records] == []

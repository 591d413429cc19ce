"""Replication between a master and a slave of either make, and the comparison of their stores."""

from pathlib import Path

from tests.interop.broker import Broker
from tests.interop.java_client import JavaClient, read_acks
from tests.interop.processes import eventually
from tests.interop.stored_files import LogCursor, LogRange, RecordHead, compare_commitlogs, heads_at

# Maximum time until a slave is attached: two intervals of 5 s until it knows its master, then its first report.
ATTACH_TIMEOUT_S = 60.0
_CATCH_UP_TIMEOUT_S = 60.0
# Messages that only probe whether the slave is attached have sequences from here on.
PROBE_SEQUENCE = 9_000_000


async def wait_attached(client: JavaClient, topic: str) -> None:
    """Waits until a send to the SYNC_MASTER is acknowledged by its slave."""
    await client.send_until(topic, "SEND_OK", ATTACH_TIMEOUT_S, first=PROBE_SEQUENCE)


async def wait_equal(master: Broker, slave: Broker) -> LogRange:
    """Waits until the slave's log ends where the master's does, and checks that all bytes are equal."""
    source, copy = LogCursor(master.commitlog), LogCursor(slave.commitlog)

    def ends_equal() -> bool:
        return source.advance().end == copy.advance().end

    try:
        await eventually("both logs end at the same offset", ends_equal, _CATCH_UP_TIMEOUT_S)
    except AssertionError as error:
        error.add_note(f"master {source.advance()}, slave {copy.advance()}")
        raise
    common = compare_commitlogs(master.commitlog, slave.commitlog)
    assert common == source.advance(), "the slave holds less than the master"
    return common


def check_acknowledged(acks_path: Path, store: Broker) -> set[int]:
    """Checks that each acknowledged message is at its offset message id; returns their sequences."""
    acks = read_acks(acks_path)
    heads = heads_at(store.commitlog, (ack.physical_offset for ack in acks))
    for ack, head in zip(acks, heads, strict=True):
        assert head == RecordHead(ack.sequence, ack.queue_id, ack.queue_offset, ack.size, ack.crc)
    return {ack.sequence for ack in acks}

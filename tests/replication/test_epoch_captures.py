"""Replays the traffic of two brokers of RocketMQ 5.5.0 in controller mode, at the times at which it was captured.

As in test_captures.py: what our master sends to the real slave's messages must be the real master's bytes, what our
slave sends to the real master's must be the real slave's, heartbeats and all.
"""

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.replication.ha_client import HAClient
from ha.replication.options import HAOptions
from tests.protocol.golden import ha_connections
from tests.replication.members import SLAVE, MasterOfMembers, Member, MemberSide, leading

CONNECTIONS = [
    pytest.param(connection, id=f"conn{connection['connection']}") for connection in ha_connections("5.5.0-autoswitch")
]
AS_ROCKETMQ = HAOptions(transfer_batch_size_bytes=32768, overlap_bytes_max=0, start_from="first")
SEGMENT = 1 << 30
HEADER_SIZE = 36


def frames_of(connection: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [frame for frame in connection["frames"] if frame["type"] in kinds]


def bytes_of(connection: dict[str, Any], frame: dict[str, Any]) -> bytes:
    stream: bytes = connection[frame["dir"]]
    begin: int = frame["pos"]
    return stream[begin : begin + frame["length"]]


def puts_of(connection: dict[str, Any]) -> list[tuple[float, bytes]]:
    """Return the puts and their times: bodies without a report in between are one put."""
    puts: list[tuple[float, bytes]] = []
    last = ""
    for frame in connection["frames"]:
        if frame["type"] == "data":
            body = bytes_of(connection, frame)[HEADER_SIZE:]
            if last == "data":
                puts[-1] = (puts[-1][0], puts[-1][1] + body)
            else:
                puts.append((frame["t"], body))
        last = frame["type"]
    return puts


def first_offset_of(connection: dict[str, Any]) -> int:
    first: int = frames_of(connection, "report")[0]["maxOffset"]
    return first


@pytest.mark.parametrize("connection", CONNECTIONS)
async def test_master_sends_the_bytes_of_rocketmqs_master(connection: dict[str, Any]) -> None:
    first, puts = first_offset_of(connection), puts_of(connection)
    master = await Member(bytes(first), segment_size=SEGMENT).begin((1, 0))
    if first:
        # Put while the slave was away.
        master.log.put(puts.pop(0)[1])
    service = leading(master, options=AS_ROCKETMQ)
    leadership = service.leadership
    assert leadership is not None
    slave = MemberSide(service)
    said = [frame for frame in connection["frames"] if frame["dir"] == "s2m"]
    events = [(frame["t"], bytes_of(connection, frame), b"") for frame in said]
    events += [(at, b"", body) for at, body in puts]
    async with trio.open_nursery() as nursery:
        slave.start(nursery)
        for at, message, body in sorted(events):
            await trio.sleep_until(slave.began + at)
            if message:
                await slave.stream.send_all(message)
            else:
                master.log.put(body)
            await wait_all_tasks_blocked()
            if leadership.proposed_set.value is not None:
                leadership.confirm_set(leadership.proposed_set.value)  # the real controller was quick, too
        await trio.sleep_until(slave.began + connection["frames"][-1]["t"] + 1)
        assert service.acknowledged_by_set() == said[-1]["maxOffset"]
        nursery.cancel_scope.cancel()
    assert slave.received == connection["m2s"]


@pytest.mark.parametrize("connection", CONNECTIONS)
async def test_slave_sends_the_bytes_of_rocketmqs_slave(connection: dict[str, Any]) -> None:
    """RocketMQ's slave sends its request five seconds after its handshake, ours as soon as that is answered."""
    first, said = first_offset_of(connection), frames_of(connection, "report")
    slave = Member(bytes(first), segment_size=SEGMENT)
    if first:
        await slave.begin((1, 0))
    async with trio.open_nursery() as nursery:
        master = MasterOfMembers(nursery)
        client = HAClient(slave.log, AS_ROCKETMQ, master.connect, member=slave, broker_id=SLAVE)
        nursery.start_soon(client.run)
        client.set_master("master:10912")
        began = trio.current_time()
        ends_at = said[-1]["t"] + 4  # it was ended when its next heartbeat was due
        for frame in connection["frames"]:
            if frame["dir"] == "m2s" and frame["t"] < ends_at:
                await trio.sleep_until(began + (said[0]["t"] if frame["type"] == "handshake" else frame["t_last"]))
                await master.streams[-1].send_all(bytes_of(connection, frame))
                await wait_all_tasks_blocked()
        await trio.sleep_until(began + ends_at)
        nursery.cancel_scope.cancel()
    assert master.received == connection["s2m"]
    assert slave.log.content[first:] == b"".join(body for _, body in puts_of(connection))
    assert slave.history == [(1, 0)]
    assert slave.log.dispatch_limit.value == frames_of(connection, "data", "heartbeat")[-1]["confirmOffset"]

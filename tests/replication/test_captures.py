"""Replays captured bytes of real brokers, at the times at which they were captured.

Master side: a log with the captured content grows when the real master's did, the real slave's reports arrive when they
did; what the master sends must be the real master's bytes. Slave side: the real master's frames arrive when they did;
what the slave sends must be the real slave's bytes. Both compare whole streams, heartbeats included.
"""

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from tests.protocol.golden import ha_connections
from tests.replication.master_side import MasterSide
from tests.replication.memory_log import MemoryLog
from tests.replication.slave_side import SlaveSide

CAPTURES = [(version, number) for version in ("5.5.0", "4.9.7") for number in (0, 1)]
AS_ROCKETMQ = HAOptions(transfer_batch_size_bytes=32768, overlap_bytes_max=0)
SEGMENT = 1 << 30


class Capture:
    """One connection: its frames in order of time, and the two byte streams."""

    def __init__(self, version: str, number: int) -> None:
        connection = ha_connections(f"{version}-default")[number]
        self.to_slave: bytes = connection["m2s"]
        self.to_master: bytes = connection["s2m"]
        self.frames: list[dict[str, Any]] = connection["frames"]
        # Not the FIN: RocketMQ looks at its clock some 10 ms late each time, and one heartbeat more fits in before it.
        self.ends_at: float = self.frames[-1]["t"] + 1
        self.reports = [frame for frame in self.frames if frame["type"] == "report"]
        self.first_offset: int = self.reports[0]["offset"]

    def bytes_of(self, frame: dict[str, Any]) -> bytes:
        stream = self.to_slave if frame["dir"] == "m2s" else self.to_master
        position: int = frame["pos"]
        return stream[position : position + frame["length"]]

    def bursts(self) -> list[tuple[float, bytes]]:
        """Return the puts and their times: bodies in direct succession are one put, split by the master."""
        bursts: list[tuple[float, bytes]] = []
        last = -1.0
        for frame in self.frames:
            if frame["type"] == "data":
                body = self.bytes_of(frame)[12:]
                if frame["t"] - last < 0.0005:
                    bursts[-1] = (bursts[-1][0], bursts[-1][1] + body)
                else:
                    bursts.append((frame["t"], body))
                last = frame["t_last"]
        return bursts


@pytest.mark.parametrize(("version", "number"), CAPTURES)
async def test_master_sends_the_bytes_of_rocketmqs_master(version: str, number: int) -> None:
    capture = Capture(version, number)
    log = MemoryLog(bytes(capture.first_offset), segment_size=SEGMENT, first_offset=0)
    service = HAService(log, AS_ROCKETMQ)
    slave = SlaveSide(service)
    bursts = capture.bursts()
    if number == 1:
        # The messages put while the slave was away: there before it connects.
        log.put(bursts.pop(0)[1])
    reports = [(frame["t"], 1, capture.bytes_of(frame)) for frame in capture.reports]
    events = sorted(reports + [(at, 0, body) for at, body in bursts])
    async with trio.open_nursery() as nursery:
        slave.start(nursery)
        for at, kind, content in events:
            await trio.sleep_until(slave.began + at)
            if kind:
                await slave.stream.send_all(content)
            else:
                log.put(content)
            await wait_all_tasks_blocked()
        await trio.sleep_until(slave.began + capture.ends_at)
        nursery.cancel_scope.cancel()
    assert slave.received == capture.to_slave
    assert service.push2_slave_max_offset == capture.reports[-1]["offset"]


@pytest.mark.parametrize(("version", "number"), CAPTURES)
async def test_slave_sends_the_bytes_of_rocketmqs_slave(version: str, number: int) -> None:
    capture = Capture(version, number)
    log = MemoryLog(bytes(capture.first_offset), segment_size=SEGMENT)
    async with trio.open_nursery() as nursery:
        master = MasterSide(nursery)
        client = HAClient(log, AS_ROCKETMQ, master.connect)
        nursery.start_soon(client.run)
        # 4.9 sends its first report after five seconds; a slave of ours, like 5.x, at once.
        began = trio.current_time() + (capture.reports[0]["t"] if version == "4.9.7" else 0)
        await trio.sleep_until(began)
        client.set_master("master:10912")
        began = trio.current_time() - capture.reports[0]["t"]
        for frame in capture.frames:
            if frame["dir"] == "m2s":
                await trio.sleep_until(began + frame["t_last"])
                await master.streams[-1].send_all(capture.bytes_of(frame))
                await wait_all_tasks_blocked()
        await trio.sleep_until(began + capture.ends_at)
        nursery.cancel_scope.cancel()
    assert b"".join(value.to_bytes(8, "big") for value in master.values) == capture.to_master
    assert len(master.connected_at) == 1
    content = b"".join(body for _, body in capture.bursts())
    assert log.content[capture.first_offset :] == content

"""A master that is killed again and again while messages wait in it: each arrives, and only the last ones twice."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import trio

from ha.protocol.properties import encode_properties
from ha.protocol.record import MessageRecord, decode_records
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.broker.node import PULL, SEND_V2, text
from tests.interop.processes import eventually
from tests.node.processes import Process

pytestmark = pytest.mark.processes

LEVELS_S = (1, 2, 3)
SAVE_MS = 500
"""flushDelayOffsetInterval"""
KILL_COUNT = 4


def broker(folder: Path, module: str = "ha.master", store: str = "store", **more: object) -> Process:
    keys = {
        "brokerName": "b",
        "storePathRootDir": folder / store,
        "listenPort": 0,
        "messageDelayLevel": " ".join(f"{level}s" for level in LEVELS_S),
        "flushDelayOffsetInterval": SAVE_MS,
        "mappedFileSizeCommitLog": 1 << 24,
        **more,
    }
    settings = [part for name, value in keys.items() for part in ("--set", f"{name}={value}")]
    return Process(module, *settings, directory=folder)


async def send_delayed(client: RemotingClient, address: str, first: int, acknowledged: dict[int, float]) -> None:
    """Send until the broker is gone; a message is acknowledged with the time by which it is due, at the latest."""
    number = first
    while True:
        level = 1 + number % 3
        fields = {**SEND_V2, "i": encode_properties({"DELAY": str(level)}).decode()}
        ext = {name: text(value) for name, value in fields.items()}
        try:
            answer = await client.invoke(address, RemotingCommand(310, ext_fields=ext, body=b"%d" % number), 5)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            return
        if answer.code == 0:
            acknowledged[number] = trio.current_time() + LEVELS_S[level - 1]
        number += 1
        await trio.sleep(0.005)


async def read_all(client: RemotingClient, address: str) -> list[MessageRecord]:
    """Everything in queue 0 of TT."""
    found: list[MessageRecord] = []
    while True:
        ext = {name: text(value) for name, value in {**PULL, "queueOffset": len(found), "maxMsgNums": 32}.items()}
        answer = await client.invoke(address, RemotingCommand(11, ext_fields=ext), 10)
        if answer.code != 0:
            return found
        found += decode_records(answer.body)


async def test_what_waits_outlives_kills(tmp_path: Path) -> None:
    chance = random.Random(36)
    acknowledged: dict[int, float] = {}
    kills_ms: list[int] = []
    async with open_remoting_client() as client:
        for round_number in range(KILL_COUNT):
            with broker(tmp_path) as process:
                ready = await trio.to_thread.run_sync(process.wait_ready)
                async with trio.open_nursery() as nursery:
                    first = round_number * 1_000_000
                    nursery.start_soon(send_delayed, client, ready["remoting"], first, acknowledged)
                    await trio.sleep(1.5 + 2 * chance.random())
                    process.signal(signal.SIGKILL)
                    kills_ms.append(time.time_ns() // 1_000_000)
        with broker(tmp_path) as process:
            ready = await trio.to_thread.run_sync(process.wait_ready)
            await trio.sleep(max(0.0, max(acknowledged.values()) - trio.current_time()) + 2)
            found = await read_all(client, ready["remoting"])
            assert process.stop() == 0

    repeated = check(found, acknowledged)
    for copy in repeated:
        assert any(-100 <= kill_ms - copy.store_timestamp_ms <= 3 * SAVE_MS + 500 for kill_ms in kills_ms), copy


def check(found: list[MessageRecord], acknowledged: dict[int, float]) -> list[MessageRecord]:
    """All that was acknowledged is there, most of it once, and each level in order; the copies that came again."""
    copies: dict[int, list[MessageRecord]] = {}
    for record in found:
        assert record.topic == "TT"
        copies.setdefault(int(record.body), []).append(record)
    assert len(acknowledged) > 50
    assert copies.keys() >= acknowledged.keys()
    for level in range(3):
        numbers = [int(r.body) for r in found if int(r.body) % 3 == level and len(copies[int(r.body)]) == 1]
        assert numbers == sorted(numbers)
    repeated = [copy for each in copies.values() for copy in each[:-1]]
    assert len(repeated) < len(copies)
    return repeated


async def test_what_waits_outlives_its_master(tmp_path: Path) -> None:
    """The slave's files, opened as a master's: all that both had acknowledged is delivered."""
    acknowledged: dict[int, float] = {}
    async with open_remoting_client() as client:
        with Process("ha.namesrv", "--set", "listenPort=0", directory=tmp_path) as names:
            servers = {"namesrvAddr": (await trio.to_thread.run_sync(names.wait_ready))["remoting"]}
            with (
                broker(tmp_path, brokerRole="SYNC_MASTER", **servers) as master,
                broker(tmp_path, "ha.slave", "copy", **servers) as slave,
            ):
                ready = await trio.to_thread.run_sync(master.wait_ready)
                await trio.to_thread.run_sync(slave.wait_ready)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send_delayed, client, ready["remoting"], 0, acknowledged)
                    copied = tmp_path / "copy" / "config" / "delayOffset.json"

                    def is_far_enough() -> bool:
                        return copied.exists() and len(acknowledged) > 150

                    await eventually("the slave has delay offsets and acknowledged some", is_far_enough, 60)
                    await trio.sleep(2)
                    master.signal(signal.SIGKILL)
                killed_ms = time.time_ns() // 1_000_000
                assert slave.stop() == 0
        with broker(tmp_path, store="copy") as heir:
            ready = await trio.to_thread.run_sync(heir.wait_ready)
            await trio.sleep(max(0.0, max(acknowledged.values()) - trio.current_time()) + 2)
            found = await read_all(client, ready["remoting"])
            assert heir.stop() == 0
    for copy in check(found, acknowledged):
        assert killed_ms - copy.store_timestamp_ms <= 11_000 + 3 * SAVE_MS, copy

"""A master that is killed again and again while transactions are open in it: none is lost, none that was rolled back
appears, and what nobody ended is asked about until it is."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.codes import RequestCode
from ha.protocol.message_id import decode_message_id
from ha.protocol.properties import encode_properties
from ha.protocol.record import MessageRecord, decode_record, decode_records
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand
from ha.remoting import RemotingClient, RemotingConnection, open_remoting_client
from tests.broker.node import PULL, SEND_V2, text
from tests.node.processes import Process

pytestmark = pytest.mark.processes

KILL_COUNT = 3
COMMIT, ROLLBACK = 8, 12
HALF = encode_properties({"TRAN_MSG": "true", "PGROUP": "pg"}).decode()
GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


def broker(folder: Path) -> Process:
    keys = {
        "brokerName": "b",
        "storePathRootDir": folder / "store",
        "listenPort": 0,
        "transactionTimeOut": 300,
        "transactionCheckInterval": 700,
        "transactionCheckMax": 1000,
        "flushConsumerOffsetInterval": 500,
        "mappedFileSizeCommitLog": 1 << 24,
    }
    settings = [part for name, value in keys.items() for part in ("--set", f"{name}={value}")]
    return Process("ha.master", *settings, directory=folder)


def ending(number: int) -> int:
    """What the transaction of message `number` ends with, whoever asks and when."""
    return COMMIT if number % 2 else ROLLBACK


class Producer:
    """Sends half messages, ends two of three itself, and answers what it is asked about the others, or all."""

    def __init__(self) -> None:
        self.client: RemotingClient | None = None
        self.acknowledged: set[int] = set()
        self.asked: list[int] = []
        self.was_asked = trio.Event()

    async def ask(self, address: str, code: int, body: bytes = b"", **ext: Any) -> RemotingCommand:
        assert self.client is not None
        fields = {name: text(value) for name, value in ext.items()}
        return await self.client.invoke(address, RemotingCommand(code, ext_fields=fields, body=body), 5)

    async def on_request(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> None:
        for command in commands:
            if command.code != RequestCode.CHECK_TRANSACTION_STATE:
                continue
            number = int(decode_record(command.body).body)
            self.asked.append(number)
            self.was_asked.set()
            self.was_asked = trio.Event()
            places = {name: command.ext_fields[name] for name in ("tranStateTableOffset", "commitLogOffset", "msgId")}
            fields = {"producerGroup": "pg", "commitOrRollback": str(ending(number)), "fromTransactionCheck": "true"}
            connection.send_oneway(
                RemotingCommand(RequestCode.END_TRANSACTION, flag=FLAG_ONEWAY, ext_fields={**fields, **places})
            )

    async def wait_quiet(self, quiet_s: float) -> None:
        """Until it has not been asked for so long."""
        while True:
            with trio.move_on_after(quiet_s):
                await self.was_asked.wait()
                continue
            return

    async def greet(self, address: str) -> None:
        body = java_json.dumps({"clientID": "c1", "producerDataSet": [{"groupName": "pg"}]})
        assert (await self.ask(address, RequestCode.HEART_BEAT, body)).code == 0

    async def produce(self, address: str, first: int) -> None:
        """Until the broker is gone."""
        number = first
        while True:
            try:
                half = await self.ask(
                    address, 310, b"%d" % number, **{**SEND_V2, "i": HALF, "f": 4, "g": time.time_ns() // 1_000_000}
                )
                if half.code == 0:
                    self.acknowledged.add(number)
                    if number % 3:
                        ended = await self.ask(
                            address,
                            RequestCode.END_TRANSACTION,
                            producerGroup="pg",
                            tranStateTableOffset=half.ext_fields["queueOffset"],
                            commitLogOffset=decode_message_id(half.ext_fields["msgId"])[2],
                            commitOrRollback=ending(number),
                            msgId="X",
                        )
                        assert ended.code == 0
            except GONE:
                return
            number += 1
            await trio.sleep(0.005)

    async def read_all(self, address: str) -> list[MessageRecord]:
        """Everything in queue 0 of TT."""
        found: list[MessageRecord] = []
        while True:
            answer = await self.ask(address, 11, **{**PULL, "queueOffset": len(found)})
            if answer.code != 0:
                return found
            found += decode_records(answer.body)


async def test_transactions_outlive_kills(tmp_path: Path) -> None:
    chance = random.Random(37)
    producer = Producer()
    async with open_remoting_client(handler=producer.on_request) as client:
        producer.client = client
        for round_number in range(KILL_COUNT):
            with broker(tmp_path) as process:
                ready = await trio.to_thread.run_sync(process.wait_ready)
                await producer.greet(ready["remoting"])
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(producer.produce, ready["remoting"], round_number * 1_000_000)
                    await trio.sleep(1.5 + 2 * chance.random())
                    process.signal(signal.SIGKILL)
        with broker(tmp_path) as process:
            ready = await trio.to_thread.run_sync(process.wait_ready)
            await producer.greet(ready["remoting"])
            with trio.fail_after(60):
                await producer.wait_quiet(4)
            found = await producer.read_all(ready["remoting"])
            assert process.stop() == 0

    numbers = [int(record.body) for record in found]
    acknowledged = producer.acknowledged
    assert len(acknowledged) > 50
    assert {number % 3 for number in producer.asked} >= {0}
    assert set(numbers) >= {number for number in acknowledged if ending(number) == COMMIT}
    assert all(ending(number) == COMMIT for number in numbers)
    assert len(numbers) < 1.5 * len(set(numbers))

"""bench/pop_load.py pops and acknowledges all messages of a topic at a real broker."""

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from ha.client import Admin, Message, Producer
from tests.spark.clusters import running_broker

pytestmark = pytest.mark.processes
COUNT = 100


async def fill(servers: str) -> str:
    """Sends the messages; returns the broker's address."""
    async with Producer(servers) as producer:
        for number in range(COUNT):
            await producer.send(Message("pop", b"%d" % number))
    async with Admin(servers) as admin:
        [broker] = (await admin.route("pop")).masters()
        return broker


def test_every_message_is_acknowledged(tmp_path: Path) -> None:
    with running_broker(tmp_path) as servers:
        place = ["--broker", anyio.run(fill, servers), "--broker-name", "broker-t", "--topic", "pop"]
        load = ["--connections", "2", "--warm", "0", "--seconds", "1"]
        for group, words in (("g", []), ("h", ["--batches"])):
            command = [sys.executable, "-m", "bench.pop_load", *place, *load, "--group", group, *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            found = json.loads(done.stdout)
            assert found["acknowledged"] == COUNT
            assert found["empty"] > 0  # pops wait for more until the end

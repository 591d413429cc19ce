"""Checks an installed halog, for scripts/wheels and cibuildwheel: compiled modules, and a message through a master.

python -P scripts/wheel_check.py compiled|pure
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path

import ha.cli
import ha.testing
from ha.client import Message, Producer, SimpleConsumer

TIMEOUT_S = 60


async def send_and_receive(name_server: str) -> bytes:
    """Sends a message, receives and acknowledges it, and returns its body."""
    async with Producer(name_server) as producer:
        await producer.send(Message("greetings", b"hello"))
    async with SimpleConsumer(name_server, group="readers", subscriptions={"greetings": "*"}) as consumer:
        while True:
            for message in await consumer.receive():
                await message.ack()
                return message.body


def check_version(kind: str) -> str:
    """Returns the version, which says how many modules run compiled. Raises SystemExit unless all do (`kind` compiled)
    or none does (pure)."""
    version = ha.cli.version()
    found = re.search(r"\((\d+) of (\d+) modules run compiled", version)
    expected = found and (found[2] if kind == "compiled" else "0")
    if found is None or found[1] != expected:
        sys.exit(f"{kind}: {version}")
    return version


async def main(kind: str) -> None:
    version = check_version(kind)
    with tempfile.TemporaryDirectory() as directory, ha.testing.running_master(Path(directory)) as master:
        async with asyncio.timeout(TIMEOUT_S):
            body = await send_and_receive(master.name_server_address)
    if body != b"hello":
        sys.exit(f"received {body!r}")
    print(f"Python {sys.version.split()[0]}: halog {version}: a message was sent and received")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""One cluster for all tests of the SDK: a name server and a master, of real RocketMQ or of halog.

It runs in a thread of its own with its own trio loop, so that tests can use asyncio or trio.
"""

import itertools
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import trio

from ha.config.model import Config
from tests.interop.broker import Broker
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.processes import Children, open_children
from tests.interop.releases import resolve
from tests.interop.rocketmq import RocketMqBroker, start_name_server

T = TypeVar("T")

HALOG = "halog"
# Off by default in tests and in RocketMQ.
_TIMERS = {"timerWheelEnable": "true", "recallMessageEnable": "true"}
# Additional settings of both makes: SQL92, early checks of half messages, and short delays.
_SETTINGS: dict[str, object] = {
    "enablePropertyFilter": "true",
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 2000,
    # by default 5.x records ended transactions every 3 s, and until then also checks those
    "transactionOpBatchInterval": 300,
    "messageDelayLevel": "1s 2s 1s 2s 3s 4s 5s 6s 7s 8s 9s 10s 11s 12s 13s 14s 15s 16s",
}
_numbers = itertools.count(1)


@dataclass
class SdkCluster:
    """`make` is "halog" or a version of RocketMQ."""

    make: str
    name_server: str
    broker: Broker
    children: Children = field(repr=False)
    _token: trio.lowlevel.TrioToken = field(repr=False)

    @property
    def is_halog(self) -> bool:
        return self.make == HALOG

    def call(self, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Runs `function` in the cluster's own loop, from any other thread."""
        return trio.from_thread.run(function, *arguments, trio_token=self._token)

    def name(self, stem: str) -> str:
        """A unique name for a topic or group."""
        return f"{stem}-{os.getpid()}-{next(_numbers)}"


@contextmanager
def running_cluster(make: str, folder: Path) -> Iterator[SdkCluster]:
    """Runs the cluster while the block runs."""
    started: list[SdkCluster] = []
    failed: list[BaseException] = []
    is_ready = threading.Event()
    stop = trio.Event()

    async def serve() -> None:
        async with open_children(folder) as children:
            name_server, broker = await _start(make, children)
            started.append(SdkCluster(make, name_server, broker, children, trio.lowlevel.current_trio_token()))
            is_ready.set()
            await stop.wait()

    def run() -> None:
        try:
            trio.run(serve)
        except BaseException as error:
            failed.append(error)
        is_ready.set()

    thread = threading.Thread(target=run, name=f"cluster-{make}")
    thread.start()
    is_ready.wait()
    try:
        if failed:
            raise failed[0]
        yield started[0]
    finally:
        if started and thread.is_alive():
            started[0]._token.run_sync_soon(stop.set)
        thread.join()


async def _start(make: str, children: Children) -> tuple[str, Broker]:
    broker: Broker
    if make == HALOG:
        name_server = await start_halog_name_server(children)
        broker = HalogBroker(children, "master", name_server, "ASYNC_MASTER", extra=halog_settings())
    else:
        release = resolve(make)
        name_server = await start_name_server(children, release)
        broker = RocketMqBroker(
            children,
            release,
            "master",
            name_server,
            "ASYNC_MASTER",
            extra={**_SETTINGS, **_TIMERS},
        )
    await broker.start()
    return name_server, broker


def halog_settings() -> dict[str, object]:
    """The settings that halog has a key for."""
    known = {each.encode_name for each in msgspec.structs.fields(Config)}
    return {name: value for name, value in _SETTINGS.items() if name in known}

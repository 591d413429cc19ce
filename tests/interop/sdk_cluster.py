"""One cluster for all tests of the SDK: a name server and a master, of real RocketMQ or of halog.

It runs in a thread of its own with its own trio loop, so that tests can use asyncio or trio.
"""

import itertools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

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
    portal: BlockingPortal = field(repr=False)

    @property
    def is_halog(self) -> bool:
        return self.make == HALOG

    def call(self, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Runs `function` in the cluster's own loop, from any other thread."""
        return self.portal.call(function, *arguments)

    def name(self, stem: str) -> str:
        """A unique name for a topic or group."""
        return f"{stem}-{os.getpid()}-{next(_numbers)}"


@contextmanager
def running_cluster(make: str, folder: Path) -> Iterator[SdkCluster]:
    """Runs the cluster while the block runs."""
    with (
        start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(open_children(folder)) as children,
    ):
        name_server, broker = portal.call(_start, make, children)
        yield SdkCluster(make, name_server, broker, children, portal)


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

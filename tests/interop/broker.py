"""The common part of real and halog brokers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.interop.processes import Child, Children

SEGMENT_SIZE = 32 * 1024 * 1024
CONSUME_QUEUE_FILE_SIZE = 600_000
INDEX_SLOT_COUNT, INDEX_ENTRY_COUNT = 100_000, 500_000


class Broker(ABC):
    """One broker's folder, ports and settings, through all its starts; `child` is the current process."""

    children: Children
    name: str
    name_server: str
    role: str
    broker_id: int
    extra: Mapping[str, object]
    port: int
    store: Path
    child: Child | None

    def __post_init__(self) -> None:
        if self.store == Path():
            self.store = self.children.folder / f"{self.name}-store"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def ha_address(self) -> str:
        return f"127.0.0.1:{self.port + 1}"

    @property
    def commitlog(self) -> Path:
        return self.store / "commitlog"

    def common_settings(self) -> dict[str, object]:
        """Settings for both kinds of broker."""
        return {
            "brokerClusterName": "InteropCluster",
            "brokerName": "broker-a",
            "brokerId": self.broker_id,
            "brokerRole": self.role,
            "brokerIP1": "127.0.0.1",
            "namesrvAddr": self.name_server,
            "listenPort": self.port,
            "haListenPort": self.port + 1,
            "storePathRootDir": self.store,
            "storePathCommitLog": self.commitlog,
            "slaveReadEnable": "true",
            "haSendHeartbeatInterval": 1000,
            "mappedFileSizeCommitLog": SEGMENT_SIZE,
            "mappedFileSizeConsumeQueue": CONSUME_QUEUE_FILE_SIZE,
            "maxHashSlotNum": INDEX_SLOT_COUNT,
            "maxIndexNum": INDEX_ENTRY_COUNT,
            "flushDiskType": "ASYNC_FLUSH",
            "deleteWhen": "04",
            "fileReservedTime": 72,
            "diskMaxUsedSpaceRatio": 95,
        }

    @abstractmethod
    async def start(self) -> Any:
        """Returns when the broker is ready."""

    @abstractmethod
    async def stop(self) -> None:
        """Sends SIGTERM and waits for the end."""

    async def kill(self) -> None:
        assert self.child is not None
        await self.child.kill()

"""halog's own processes, started as users start them: `python -m ha.master --config FILE`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.interop.broker import Broker
from tests.interop.processes import Child, Children, free_ports

_START_TIMEOUT_S = 60.0


@dataclass
class HalogBroker(Broker):
    """A halog broker, through all its starts."""

    children: Children
    name: str
    name_server: str
    role: str
    broker_id: int = 0
    extra: Mapping[str, object] = field(default_factory=dict)
    port: int = field(default_factory=free_ports)
    store: Path = Path()
    child: Child | None = None
    entry_point: str = ""

    async def start(self) -> str:
        """Returns its READY line."""
        settings = {**self.common_settings(), **self.extra}
        entry_point = self.entry_point or ("ha.slave" if self.role == "SLAVE" else "ha.master")
        self.child, line = await _start(self.children, self.name, entry_point, settings)
        return line

    async def stop(self) -> None:
        """Sends SIGTERM; the exit code must be that of a clean stop."""
        assert self.child is not None
        assert await self.child.stop() == 0, self.child.tail()


async def start_halog_name_server(children: Children, extra: Mapping[str, object] | None = None) -> str:
    """Starts `python -m ha.namesrv`; returns its address."""
    port = free_ports()
    await _start(children, "ha-namesrv", "ha.namesrv", {"listenPort": port, **(extra or {})})
    return f"127.0.0.1:{port}"


async def _start(children: Children, name: str, entry_point: str, settings: dict[str, object]) -> tuple[Child, str]:
    config = children.folder / f"{name}.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    child = children.start_soon(name, [sys.executable, "-m", entry_point, "--config", str(config)])
    return child, (await child.wait_line(r"^READY .*", _START_TIMEOUT_S))[0]

"""RocketMQ's own command mqadmin, in one JVM for any number of commands (java/MqAdmin.java)."""

import json
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tests.interop.processes import Child, Children
from tests.interop.releases import Release

_JVM = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_TIMEOUT_S = 60.0
_PAUSE_S = 1.0
# Two registration intervals of a real broker.
_TRY_S = 60.0


class MqAdmin:
    """One JVM with the tools of one release, for one name server: some commands keep their first name server."""

    def __init__(self, release: Release, name_server: str) -> None:
        self.release = release
        self.name_server = name_server
        self.child: Child | None = None
        self._send, self._receive = trio.open_memory_channel[str](100)

    async def run(self, command: str, *arguments: str, fails: bool = False) -> str:
        """Returns the output of a command. AssertionError if it fails, or, with `fails`, if it does not.

        Retried for a while: a tool that gets no answer in time, on a loaded machine, sees an empty cluster, and a
        registration rejected by a real name server is repeated with the broker's next one.
        """
        assert self.child is not None
        words = [command, *arguments, "-n", self.name_server]
        give_up_at = trio.current_time() + _TRY_S
        while True:
            await self.child.stdin.send_all(("\t".join(words) + "\n").encode())
            with trio.fail_after(_TIMEOUT_S):
                text: str = json.loads(await self._receive.receive())
            if ("\n\tat org.apache." in text) is fails:
                return text
            if trio.current_time() >= give_up_at:
                break
            await trio.sleep(_PAUSE_S)
        raise AssertionError(f"mqadmin {' '.join(words)}\n{text}")

    def take(self, line: str) -> None:
        if line.startswith('"'):
            self._send.send_nowait(line)


@asynccontextmanager
async def open_mqadmin(children: Children, release: Release, name_server: str) -> AsyncIterator[MqAdmin]:
    """Ends with the block."""
    tool = MqAdmin(release, name_server)
    home = children.folder / "mqadmin-home"
    (home / "conf").mkdir(parents=True, exist_ok=True)
    shutil.copy(release.classes / "logback.xml", home / "conf" / "logback_tools.xml")  # 4.9 requires one
    command = [
        "java",
        *_JVM,
        f"-Duser.home={home}",
        f"-Drocketmq.home.dir={home}",
        "-Drocketmq.client.logUseSlf4j=true",
    ]
    command += [f"-XX:SharedArchiveFile={release.shared_classes}", "-cp", release.client_class_path, "MqAdmin"]
    tool.child = children.start_soon(f"mqadmin-{release.version}", command, on_line=tool.take)
    try:
        yield tool
    finally:
        tool.child.send_signal(signal.SIGKILL)

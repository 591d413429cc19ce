"""Real RocketMQ name servers, brokers and proxies as processes on loopback, each with its own folders below the test's.

The settings depend on these facts: a broker uses listenPort, listenPort-2 and the HA port, which is listenPort+1 here
because 4.9 supports nothing else; a SYNC_MASTER of 5.x waits for a slave only from inSyncReplicas=2 on; 4.9 needs its
conf/logback_*.xml, and on Java 17 the opened modules; a slave of 4.9 sends its first report haSendHeartbeatInterval
after it connected, one of 5.x looks for its master every 5 s.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from ha.protocol.acl import AclCredentials
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.interop.broker import Broker
from tests.interop.processes import Child, Children, free_ports, open_children
from tests.interop.releases import Release, locked

# Quick to start, small, and with few threads, because many of them share two processors.
_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_BROKER_MEMORY = ("-Xms128m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m")
_NAME_SERVER_MEMORY = ("-Xms64m", "-Xmx128m")
_PROXY_MEMORY = ("-Xms64m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m")
OPENED = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
)
_START_TIMEOUT_S = 90.0
_REGISTER_TIMEOUT_S = 5.0
_UPDATE_BROKER_CONFIG = 25


@dataclass
class RocketMqBroker(Broker):
    """A RocketMQ broker, through all its starts."""

    children: Children
    release: Release
    name: str
    name_server: str
    role: str
    broker_id: int = 0
    extra: Mapping[str, object] = field(default_factory=dict)
    port: int = field(default_factory=free_ports)
    store: Path = Path()
    child: Child | None = None
    jvm: tuple[str, ...] = ()
    credentials: AclCredentials | None = None
    """For requests to this broker and its name server, if they check signatures"""

    async def start(self) -> None:
        """Returns when the broker logs "boot success"."""
        settings: dict[str, object] = {
            **self.common_settings(),
            "brokerIP2": "127.0.0.1",
            "autoCreateTopicEnable": "true",
            # On a loaded machine too, no message is rejected.
            "brokerFastFailureEnable": "false",
            "osPageCacheBusyTimeOutMills": 10_000,
        }
        if not self.release.is_4:
            settings["timerWheelEnable"] = "false"
            # 5.5.0 busy-loops through its first interval (10 s): TransactionMetricsFlushService.
            settings["transactionMetricFlushInterval"] = 1000
            if self.role == "SYNC_MASTER":
                settings["inSyncReplicas"] = 2
        self.child = await _start_jvm(
            self.children,
            self.release,
            self.name,
            "org.apache.rocketmq.broker.BrokerStartup",
            _settings_of(self.children, self.name, {**settings, **self.extra}),
            _BROKER_MEMORY,
            r"The broker\[.*boot success",
            self.jvm,
        )
        if not self.release.is_4:
            await self._register_now()

    async def _register_now(self) -> None:
        """Makes 5.5.0 register, which it first does ten seconds after its start, but also when brokerPermission is set.

        If it has not found a responding name server yet, it skips that silently, so this is retried. Does not wait for
        the normal registration if there is no name server, or if it rejects this broker."""
        request = RemotingCommand(code=_UPDATE_BROKER_CONFIG, body=b"brokerPermission=6\n")
        if self.credentials is not None:
            self.credentials.sign(request)
        async with open_remoting_client() as remoting:
            with trio.move_on_after(_REGISTER_TIMEOUT_S):
                while True:
                    response = await remoting.invoke(self.address, request, 10.0)
                    assert response.code == ResponseCode.SUCCESS, response
                    if await self._is_registered(remoting):
                        return
                    await trio.sleep(0.1)

    async def _is_registered(self, remoting: RemotingClient) -> bool:
        """Whether the name server knows the broker; True if there is no name server."""
        request = RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO)
        if self.credentials is not None:
            self.credentials.sign(request)
        try:
            response = await remoting.invoke(self.name_server, request, 10.0)
        except OSError:
            return True
        return f'"{self.address}"'.encode() in response.body

    async def wait_sampled(self) -> None:
        """Waits until the broker answers GET_BROKER_RUNTIME_INFO without an error, after its first sample a second
        after its start."""
        request = RemotingCommand(RequestCode.GET_BROKER_RUNTIME_INFO)
        async with open_remoting_client() as remoting:
            with trio.fail_after(_START_TIMEOUT_S):
                while True:
                    response = await remoting.invoke(self.address, request, 10.0)
                    if response.code == ResponseCode.SUCCESS:
                        return
                    await trio.sleep(0.1)

    async def stop(self) -> None:
        assert self.child is not None
        await self.child.stop(40.0)


async def start_name_server(
    children: Children, release: Release, *jvm: str, settings: Mapping[str, object] | None = None
) -> str:
    """Starts a real name server; returns its address. `jvm`: JVM options instead of the default class archive."""
    port = free_ports()
    arguments = _settings_of(children, "namesrv", {"listenPort": port, **(settings or {})})
    main = "org.apache.rocketmq.namesrv.NamesrvStartup"
    ready = r"The Name Server boot success"
    await _start_jvm(children, release, "namesrv", main, arguments, _NAME_SERVER_MEMORY, ready, jvm)
    return f"127.0.0.1:{port}"


async def start_proxy(children: Children, release: Release, name_server: str, cluster: str) -> str:
    """Starts RocketMQ's proxy in cluster mode; returns its gRPC address. A broker of the cluster must be registered."""
    port = free_ports()
    config = children.folder / "rmq-proxy.json"
    settings = {"rocketMQClusterName": cluster, "localServeAddr": "127.0.0.1", "enablePrintJstack": False}
    config.write_text(json.dumps({**settings, "grpcServerPort": port, "remotingListenPort": port + 1}))
    arguments = ["-pm", "cluster", "-n", name_server, "-pc", str(config)]
    main = "org.apache.rocketmq.proxy.ProxyStartup"
    ready = r"rocketmq-proxy startup successfully"
    await _start_jvm(children, release, "proxy", main, arguments, _PROXY_MEMORY, ready)
    return f"127.0.0.1:{port}"


async def archive_shared_classes(release: Release) -> None:
    """Starts and stops a broker once, unless that was done before, so that the JVM archives the classes it loads."""
    archive = release.shared_classes
    with locked(archive.with_suffix(".lock")):
        if archive.exists():
            return
        with TemporaryDirectory() as folder:
            partial = Path(folder, archive.name)
            async with open_children(Path(folder)) as children:
                broker = RocketMqBroker(children, release, "broker", "127.0.0.1:1", "ASYNC_MASTER")
                broker.jvm = (f"-XX:ArchiveClassesAtExit={partial}",)
                await broker.start()
                await broker.stop()
            shutil.copy(partial, archive.with_suffix(".partial"))
        archive.with_suffix(".partial").rename(archive)


def _settings_of(children: Children, name: str, settings: Mapping[str, object]) -> list[str]:
    """Writes a configuration file; returns the arguments that name it."""
    properties = children.folder / f"{name}.properties"
    properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return ["-c", str(properties)]


async def _start_jvm(
    children: Children,
    release: Release,
    name: str,
    main: str,
    arguments: Sequence[str],
    memory: tuple[str, ...],
    ready: str,
    jvm: tuple[str, ...] = (),
) -> Child:
    home = children.folder / f"{name}-home"
    conf = home / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    for part in ("broker", "namesrv", "tools"):
        (conf / f"logback_{part}.xml").write_text(
            '<configuration><appender name="F" class="ch.qos.logback.core.FileAppender">'
            f"<file>{home}/logs/{part}.log</file>"
            "<encoder><pattern>%d{HH:mm:ss.SSS} %p %c{0} %t - %m%n</pattern></encoder></appender>"
            '<root level="INFO"><appender-ref ref="F"/></root></configuration>'
        )
    jvm = jvm or (f"-XX:SharedArchiveFile={release.shared_classes}",)
    command = ["java", *memory, *_JVM, *jvm, *OPENED, f"-Duser.home={home}", "-Drocketmq.namesrv.domain=127.0.0.1:1"]
    command += ["-cp", str(release.jars / "*"), main, *arguments]
    child = children.start_soon(name, command, environment={"ROCKETMQ_HOME": str(home), "RMQ_PROXY_HOME": str(home)})
    await child.wait_line(ready, _START_TIMEOUT_S)
    return child

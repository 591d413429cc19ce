"""The TLS credentials of a node's ports and connections, by role.

role    used for                                        own certificate      certificate of the peer
server  remoting ports and embedded name server         tls.server.certPath  see tls.server.need.client.auth
grpc    gRPC port, with the ALPN protocol h2            tls.server.certPath  see tls.server.need.client.auth
ha      HA port                                         tls.server.certPath  required, see haTlsTrustCertPath
admin   admin port                                      tls.server.certPath  not requested
client  with tls.enable, connections to name servers    tls.client.certPath  see tls.client.authServer
        and to remoting ports of other brokers; with
        haTls=enforcing, connections to the master's
        HA port
etcd    connections to etcd with https                  etcdCertPath         required, see etcdTrustCertPath
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
import trio

from ha.config import Config
from ha.errors import HandshakeFailed
from ha.remoting import PortTls
from ha.tls.credentials import Credentials, CredentialStatus
from ha.tls.files import TlsFiles, client_context, server_context
from ha.tls.handshake import HANDSHAKE_RECORD, HANDSHAKE_TIMEOUT_S, Handshakes, PrefixedStream, common_name
from ha.tls.ports import (
    SERVER_KEYS,
    Connect,
    connecting,
    keep_fresh,
    load,
    load_client,
    load_server,
    securing,
    server_files,
)

from .platform import Platform

HA_KEYS = (*SERVER_KEYS[:2], "haTlsTrustCertPath")
ETCD_KEYS = ("etcdCertPath", "etcdKeyPath", "etcdTrustCertPath")
FIRST_BYTES = 4096


class NodeTls:
    """TLS of a node's ports and connections, created by `load_tls`. The properties of a port are None if it has no
    TLS."""

    def __init__(self, config: Config, platform: Platform) -> None:
        """Loads all files that `config` names. Blocks. Raises ConfigError with the key of an unusable file."""
        clock = platform.wall_clock_ms
        self._config = config
        self._platform = platform
        self.handshakes = Handshakes()
        self._server = load_server(config, clock)
        self._ha = self._admin = self._client = self._etcd = self._grpc = None
        if config.grpc_listen_port:
            self._grpc = load_server(config, clock, role="grpc", protocols=("h2",))
        if config.ha_tls != "disabled":
            files = msgspec.structs.replace(server_files(config), trust=config.ha_tls_trust_cert_path)
            make = partial(server_context, client_certificates=ssl.CERT_REQUIRED)
            self._ha = load("ha", files, make, HA_KEYS, clock)
        if config.admin_tls == "enforcing":
            self._admin = load("admin", server_files(config), server_context, SERVER_KEYS, clock)
        if config.tls_enable or config.ha_tls == "enforcing":
            self._client = load_client(config, clock)
        if config.etcd_endpoints.startswith("https"):
            files = TlsFiles(
                certificate=config.etcd_cert_path, key=config.etcd_key_path, trust=config.etcd_trust_cert_path
            )
            self._etcd = load("etcd", files, client_context, ETCD_KEYS, clock)

    @property
    def _all(self) -> list[Credentials]:
        return [
            each
            for each in (self._server, self._grpc, self._ha, self._admin, self._client, self._etcd)
            if each is not None
        ]

    async def keep_fresh(self) -> None:
        """Reloads changed files until cancelled. Returns at once if the node uses no TLS."""
        if self._all:
            await keep_fresh(self._all, self._platform.file_check_interval_s, self._platform.run_blocking)

    def status(self) -> Mapping[str, object]:
        """Returns modes, certificates in use and counts of handshakes, for /status."""
        return {
            "remoting_mode": self._config.tls_server_mode if self._server is not None else "disabled",
            "ha_mode": self._config.ha_tls,
            "admin_mode": self._config.admin_tls,
            "is_enabled_towards_others": self._config.tls_enable,
            "credentials": self.credentials(),
            "handshakes": self.handshakes.statistics(),
        }

    def credentials(self) -> dict[str, CredentialStatus]:
        """Returns the certificates in use by role: server, grpc, ha, admin, client, etcd."""
        return {each.role: each.status() for each in self._all}

    # Ports

    @property
    def remoting_port(self) -> PortTls | None:
        """TLS of the broker's ports and of the embedded name server."""
        if self._server is None:
            return None
        is_required = self._config.tls_server_mode == "enforcing"
        return PortTls(secure=securing(self.handshakes, self._server), is_required=is_required)

    @property
    def grpc_port(self) -> PortTls | None:
        """TLS of the gRPC port; required if it is required on the remoting ports."""
        if self._grpc is None:
            return None
        is_required = self._config.tls_server_mode == "enforcing"
        return PortTls(secure=securing(self.handshakes, self._grpc), is_required=is_required)

    @property
    def secure_admin(self) -> Callable[[trio.abc.Stream], Awaitable[trio.abc.Stream]] | None:
        """The function that encrypts a stream of the admin port; None if the port has no TLS."""
        if self._admin is None:
            return None
        secure = securing(self.handshakes, self._admin)
        return lambda stream: secure(stream, b"")

    @property
    def secure_slave(self) -> Callable[[trio.abc.Stream], Awaitable[tuple[trio.abc.Stream, str | None]]] | None:
        """The function that encrypts a stream of the HA port; None if the port has no TLS."""
        return None if self._ha is None else self._secure_slave

    async def _secure_slave(self, stream: trio.abc.Stream) -> tuple[trio.abc.Stream, str | None]:
        """Returns a slave's stream and the common name in the slave's certificate (None for plaintext).

        Closes the stream and raises HandshakeFailed if the slave sends nothing in time, sends plaintext although
        haTls=enforcing, fails the handshake, or has a name that haTlsSubjects does not contain.
        """
        assert self._ha is not None
        config = self._config
        # RocketMQ's slaves send nothing before haSendHeartbeatInterval; with TLS, a slave starts at once.
        is_required = config.ha_tls != "permissive"
        timeout_s = HANDSHAKE_TIMEOUT_S if is_required else config.ha_housekeeping_interval_ms / 1000
        first = b""
        with trio.move_on_after(timeout_s):
            try:
                first = bytes(await stream.receive_some(FIRST_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        if first and first[0] == HANDSHAKE_RECORD:
            secured = await securing(self.handshakes, self._ha)(stream, first)
            name, wanted = common_name(secured), config.ha_tls_subject_set
            if not wanted or name in wanted:
                return secured, name
            reason = f"haTlsSubjects does not contain {name!r}, the name in the slave's certificate"
        elif first and config.ha_tls == "permissive":
            return PrefixedStream(first, stream), None
        else:
            reason = (
                "no TLS, which haTls=enforcing requires and RocketMQ's slaves don't support"
                if first
                else "nothing received"
            )
        await trio.aclose_forcefully(stream)
        raise HandshakeFailed(reason)

    # Links

    @property
    def etcd_context(self) -> Callable[[], ssl.SSLContext] | None:
        """A function that returns the current context for etcd with https; None if no etcd URL is https."""
        etcd = self._etcd
        return None if etcd is None else lambda: etcd.context

    @property
    def connect(self) -> Connect:
        """The function that connects to name servers and to the remoting ports of other brokers."""
        return self._connect if self._config.tls_enable else self._platform.connect

    @property
    def connect_to_master(self) -> Connect:
        """The function that connects to the master's HA port."""
        return self._connect if self._config.ha_tls == "enforcing" else self._platform.connect

    @property
    def _connect(self) -> Connect:
        assert self._client is not None
        return connecting(self.handshakes, self._client, self._platform.connect)


async def load_tls(config: Config, platform: Platform) -> NodeTls:
    """Loads the TLS files that `config` names. Raises ConfigError with the key of an unusable file."""
    loaded: list[NodeTls] = []
    await platform.run_blocking(lambda: loaded.append(NodeTls(config, platform)))
    return loaded[0]

"""The certificates and the access control of a front process, from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ha.acl import AclGuard, UserAccounts, guard_options
from ha.config import ProxyConfig
from ha.config.link_keys import ACL_KEY_LENGTH_MIN
from ha.protocol.acl import AclCredentials
from ha.remoting import PortTls, connect_tcp
from ha.tls.handshake import Handshakes
from ha.tls.ports import connecting, load_client, load_server, securing

from .access import GuardedCalls, Signatures
from .cluster import Cluster, Sign
from .users import BrokerUsers

if TYPE_CHECKING:
    from ha.acl.policy_files import AclPolicyFiles

logger = logging.getLogger(__name__)


class FrontTls:
    """The certificates of the gRPC port and of the connections to brokers and name servers."""

    def __init__(self, config: ProxyConfig, wall_clock_ms: Callable[[], int]) -> None:
        """Loads the certificate and key files of `config`, which blocks the thread. Raises ConfigError."""
        handshakes = Handshakes()
        server = load_server(config, wall_clock_ms, role="grpc", protocols=("h2",))
        client = load_client(config, wall_clock_ms) if config.tls_enable else None
        self.port: PortTls | None = None
        if server is not None:
            is_required = config.tls_server_mode == "enforcing"
            self.port = PortTls(secure=securing(handshakes, server), is_required=is_required)
        self.connect = connect_tcp if client is None else connecting(handshakes, client, connect_tcp)
        self.credentials = [each for each in (server, client) if each is not None]
        if client is not None and not config.tls_client_auth_server:
            logger.warning('proxy.servers_unverified hint="set tls.client.authServer=true"')


class FrontAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Checks calls with `guard` (None without access control), and signs requests to brokers with `sign`."""

    guard: AclGuard | None = None
    files: AclPolicyFiles | None = None
    """The policy files of `guard`; None if aclEnable is false"""
    sign: Sign = lambda session, command: None

    def attach_users(self, config: ProxyConfig, cluster: Cluster) -> BrokerUsers | None:
        """Makes `guard` look up users of ACL 2.0 at the brokers, and returns the cache of these users; returns None,
        and changes nothing, without authenticationEnabled. The caller must run the cache's `serve`."""
        if self.guard is None or not config.authentication_enabled:
            return None
        users = BrokerUsers(cluster.ask_any, has_policies=config.authorization_enabled)
        self.guard.users = UserAccounts(
            users.find, lambda: users.count, cluster="", authorizes=config.authorization_enabled
        )
        cluster.on_user_refused = users.doubt
        return users

    def calls(self, users: BrokerUsers | None) -> GuardedCalls | None:
        """Returns the access control of calls, which loads unknown users into `users`; None without access control."""
        if self.guard is None:
            return None
        return GuardedCalls(self.guard, None if users is None else users.load)


async def read_access(config: ProxyConfig) -> FrontAccess:
    """Returns the access control that `config` describes, after reading the files that it names. Raises ConfigError."""
    if not (config.acl_enable or config.authentication_enabled):
        return FrontAccess()
    files = policy = None
    if config.acl_enable:
        from ha.acl.policy_files import system_policy_files

        files = system_policy_files(config.acl_file, config.acl_directory)
        policy = await files.load()
    guard = AclGuard(policy, guard_options(config))
    own = None
    if config.broker_access_key:
        own = AclCredentials(config.broker_access_key, await _secret(config))
    return FrontAccess(guard=guard, files=files, sign=Signatures(guard, own).sign)


async def _secret(config: ProxyConfig) -> str:
    if config.broker_secret_key is not None:
        return config.broker_secret_key.reveal()
    from ha.acl.secret_file import read_secret_file

    return await read_secret_file("brokerSecretKeyFile", config.broker_secret_key_file, ACL_KEY_LENGTH_MIN)

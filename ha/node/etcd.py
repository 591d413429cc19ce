"""Connects a member to the etcd in its configuration."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from ha.config import Config, SecretStr
from ha.errors import ConfigError
from ha.failover.agreement import Agreement


def open_etcd(
    config: Config, password: SecretStr | None, tls: Callable[[], ssl.SSLContext] | None
) -> AbstractAsyncContextManager[Agreement]:
    """Returns a context manager that connects to the etcd of this node's failover group. `tls` returns the TLS context
    for https URLs. Raises ConfigError if httpx is not installed."""
    # Only members import it: it needs an extra, and loads httpx.
    try:
        from ha.failover.etcd import EtcdOptions, open_etcd_agreement
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        reason = "requires httpx, which is not installed: pip install 'halog[failover]'"
        raise ConfigError("etcdEndpoints", reason, "no value, for ha.master and ha.slave") from None

    options = EtcdOptions(
        endpoints=config.etcd_servers,
        user=config.etcd_user,
        password=None if password is None else password.reveal,
        tls=tls,
    )
    return open_etcd_agreement(options, config.cluster_name, config.broker_name)

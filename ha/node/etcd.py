"""The etcd that a member's configuration names."""

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
    """Reach what the members of this node's group agree on; `tls` gives the context for https. ConfigError."""
    # What it stands on takes 0.1 s and some MB to load, and is an extra: only members do.
    try:
        from ha.failover.etcd import EtcdOptions, open_etcd_agreement
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        reason = "etcd is asked through httpx, which is not installed: pip install 'halog[failover]'"
        raise ConfigError("etcdEndpoints", reason, "a node without it (ha.master, ha.slave), until then") from None

    options = EtcdOptions(
        endpoints=config.etcd_servers,
        user=config.etcd_user,
        password=None if password is None else password.reveal,
        tls=tls,
    )
    return open_etcd_agreement(options, config.cluster_name, config.broker_name)

"""The etcd that a member's configuration names."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from ha.config import Config, SecretStr
from ha.failover.agreement import Agreement


def open_etcd(
    config: Config, password: SecretStr | None, tls: Callable[[], ssl.SSLContext] | None
) -> AbstractAsyncContextManager[Agreement]:
    """Reach what the members of this node's group agree on; `tls` gives the context for https."""
    # What it stands on takes 0.1 s and some MB to load: only members do.
    from ha.failover.etcd import EtcdOptions, open_etcd_agreement

    options = EtcdOptions(
        endpoints=config.etcd_servers,
        user=config.etcd_user,
        password=None if password is None else password.reveal,
        tls=tls,
    )
    return open_etcd_agreement(options, config.cluster_name, config.broker_name)

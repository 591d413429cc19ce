"""A whole broker with users of ACL 2.0, over memory streams whose peer is 127.0.0.1."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ha.acl import AclPolicy
from ha.protocol.access_bodies import SUPER as SUPER_TYPE
from ha.protocol.access_bodies import UserConfig
from tests.broker.node import Node, open_node
from tests.interop.acl2_cases import CLUSTER, SUPER, SUPER_PASSWORD

ROOT = UserConfig(username=SUPER, password=SUPER_PASSWORD, user_type=SUPER_TYPE)


@asynccontextmanager
async def open_users(
    folder: Path, *, host: str = "127.0.0.1", policy: AclPolicy | None = None, **changes: Any
) -> AsyncIterator[Node]:
    """A broker with authentication and authorization on, and one super user, whose clients connect from `host`.

    `changes` are BrokerOptions.
    """
    options = {
        "authentication_enabled": True,
        "authorization_enabled": True,
        "cluster_name": CLUSTER,
        "initial_users": (ROOT,),
        **changes,
    }
    with patch("ha.remoting.connection.peer_of", lambda stream: (host, 50_000)):
        async with open_node(folder, acl_policy=policy or AclPolicy(), **options) as node:
            yield node

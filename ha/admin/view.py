"""The data sources of the admin port, and the type of the function that encrypts its streams.

Imported when a node starts, unlike server.py (see port.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
import trio

from .dashboard.source import DashboardActions, DashboardSource
from .metrics import Samples

Secure = Callable[[trio.abc.Stream], Awaitable[trio.abc.Stream]]
"""Encrypts an accepted stream; if it raises HandshakeFailed, the stream is closed."""


class AdminView(msgspec.Struct, frozen=True, kw_only=True):
    """Data sources of the admin port.

    `status` returns builtin types and msgspec structs; `not_ready` returns why the node is not ready, or "".
    """

    status: Callable[[], Mapping[str, object]]
    not_ready: Callable[[], str]
    metrics: Samples = tuple
    """Returns the current samples; called at each scrape."""
    switch: Callable[[int | None, str, float], Awaitable[Mapping[str, object]]] | None = None
    """Makes another member of the failover group the master. Arguments: its broker id (None: any member), the reason,
    and a timeout in seconds. The returned outcome has `is_done`. None for nodes outside a group."""
    dashboard: DashboardSource | None = None
    """Data source of the dashboard; None disables the dashboard."""
    actions: DashboardActions | None = None
    """Actions that the dashboard offers if a token is set; None: it offers no actions."""

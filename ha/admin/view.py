"""What the admin port is given to show. Loaded with the node, as what serves it is not (port.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from .dashboard import DashboardSource
from .metrics import Samples


class AdminView(msgspec.Struct, frozen=True, kw_only=True):
    """What the port shows. `status` returns builtin types and msgspec structs; `not_ready` why, or "" if ready."""

    status: Callable[[], Mapping[str, object]]
    not_ready: Callable[[], str]
    metrics: Samples = tuple
    """Read at each scrape"""
    switch: Callable[[int | None, str, float], Awaitable[Mapping[str, object]]] | None = None
    """Of a member of a failover group: have another one (None: any) become master, for that reason, within so many
    seconds. What came of it has `is_done`."""
    dashboard: DashboardSource | None = None
    """None: there is no dashboard"""

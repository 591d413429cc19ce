"""Limits attempts to log in with a wrong adminToken, by the address they come from.

While an address is over the limit, the correct token is refused, too: otherwise an attacker could go on guessing. IPv6
addresses of one /64 count together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

FAILURE_COUNT_MAX = 20
WINDOW_S = 60.0
HOST_COUNT_MAX = 1024
"""Maximum number of addresses that are remembered; beyond it, the one that failed longest ago is forgotten."""


class Attempts:
    """Counts the failures of each address in the last WINDOW_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, host: str) -> float:
        """Returns the seconds until the next attempt of `host` is admitted; 0 if it is admitted now."""
        failures = self._failures.get(_network(host))
        if failures is None or len(failures) < FAILURE_COUNT_MAX:
            return 0.0
        return max(0.0, failures[0] + WINDOW_S - self._clock())

    def note_failure(self, host: str) -> None:
        """Counts a wrong token from `host`."""
        key = _network(host)
        failures = self._failures.setdefault(key, deque(maxlen=FAILURE_COUNT_MAX))
        failures.append(self._clock())
        self._failures.move_to_end(key)
        if len(self._failures) > HOST_COUNT_MAX:
            self._failures.popitem(last=False)


def _network(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return address.packed[:8].hex()

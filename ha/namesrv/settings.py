"""The name server's key-value settings, by namespace; kept in memory only. RocketMQ: KVConfigManager."""

from __future__ import annotations

from ha.errors import RemoteProtocolError

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""The namespace that says on which queues an ordered topic lives ("b0:4;b1:4"); sent along with routes."""

ENTRY_SIZE_MAX = 65_536
"""Characters of namespace, key and value together."""


class Settings:
    """Namespace -> key -> value, at most `entries_max` of them."""

    def __init__(self, *, entries_max: int) -> None:
        self._entries_max = entries_max
        self._values: dict[str, dict[str, str]] = {}

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value; RemoteProtocolError if there is no room for it."""
        if len(namespace) + len(key) + len(value) > ENTRY_SIZE_MAX:
            raise RemoteProtocolError(f"a setting has at most {ENTRY_SIZE_MAX} characters")
        if self.get(namespace, key) is None and sum(map(len, self._values.values())) >= self._entries_max:
            raise RemoteProtocolError(f"already {self._entries_max} settings")
        self._values.setdefault(namespace, {})[key] = value

    def get(self, namespace: str, key: str) -> str | None:
        """The value; None if there is none."""
        return self._values.get(namespace, {}).get(key)

    def delete(self, namespace: str, key: str) -> None:
        """Forget a value, if it is there."""
        values = self._values.get(namespace, {})
        values.pop(key, None)
        if not values:
            self._values.pop(namespace, None)

    def namespace(self, namespace: str) -> dict[str, str]:
        """All values of a namespace; empty if it has none."""
        return dict(self._values.get(namespace, {}))

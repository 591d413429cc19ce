"""The name server's key-value settings, by namespace; kept in memory only. RocketMQ: KVConfigManager, which also stores
them in a file."""

from __future__ import annotations

from ha.errors import RemoteProtocolError

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""Namespace of ordered topics. Each key is a topic; its value lists broker names with their number of queues
("b0:4;b1:4"). With NameServerOptions.order_message_enable, the topic's route includes the value."""

ENTRY_SIZE_MAX = 65_536
"""Maximum characters of namespace, key and value together."""

TOTAL_SIZE_MAX = 4_194_304
"""Maximum characters of all settings. A whole namespace is encoded for each response that lists it."""


class Settings:
    """Stores up to `entries_max` values by namespace and key."""

    def __init__(self, *, entries_max: int) -> None:
        self._entries_max = entries_max
        self._values: dict[str, dict[str, str]] = {}
        self._count = 0
        self._size = 0

    def put(self, namespace: str, key: str, value: str) -> None:
        """Sets a value. Raises RemoteProtocolError if it exceeds a limit."""
        size = _size(namespace, key, value)
        if size > ENTRY_SIZE_MAX:
            raise RemoteProtocolError(f"a setting has at most {ENTRY_SIZE_MAX} characters")
        before = self.get(namespace, key)
        if before is None and self._count >= self._entries_max:
            raise RemoteProtocolError(f"already {self._entries_max} settings")
        held = self._size - (0 if before is None else _size(namespace, key, before))
        if held + size > TOTAL_SIZE_MAX:
            raise RemoteProtocolError(f"the other settings have {held} of at most {TOTAL_SIZE_MAX} characters")
        self._size = held + size
        self._count += before is None
        self._values.setdefault(namespace, {})[key] = value

    def get(self, namespace: str, key: str) -> str | None:
        """Returns the value of a key; None if it is not set."""
        return self._values.get(namespace, {}).get(key)

    def delete(self, namespace: str, key: str) -> None:
        """Deletes a value, if it exists."""
        values = self._values.get(namespace, {})
        value = values.pop(key, None)
        if value is not None:
            self._size -= _size(namespace, key, value)
            self._count -= 1
        if not values:
            self._values.pop(namespace, None)

    def namespace(self, namespace: str) -> dict[str, str]:
        """Returns a copy of the values of a namespace, by key."""
        return dict(self._values.get(namespace, {}))


def _size(namespace: str, key: str, value: str) -> int:
    return len(namespace) + len(key) + len(value)

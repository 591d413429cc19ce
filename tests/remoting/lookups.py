"""Which threads look up host names."""

import socket
import threading
from typing import Any

import pytest


def watch_lookups(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Resolves every host name to 127.0.0.1 from now on; returns a dict of the thread that looked up each name last."""
    threads: dict[str, int] = {}
    look_up = socket.getaddrinfo

    def look_up_here(host: str, *arguments: Any, **options: Any) -> Any:
        threads[host] = threading.get_ident()
        return look_up("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    return threads

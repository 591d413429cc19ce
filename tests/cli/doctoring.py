"""`ha doctor` run by a test, and ports that are not as they should be."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ha.cli import run


def diagnose(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> Any:
    assert run(["doctor", "--json", *words]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out)


def named(result: Any, weight: str = "error") -> set[str]:
    return {finding["check"] for finding in result["findings"] if finding["weight"] == weight}


@contextmanager
def closed_port() -> Iterator[str]:
    """A port that is taken and not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def silent_port() -> Iterator[str]:
    """A port whose queue of connections is full, so that a further one is dropped, as by a firewall."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"

"""Fixtures shared with tests/limits."""

from tests.limits.conftest import socket_clock

__all__ = ["socket_clock"]

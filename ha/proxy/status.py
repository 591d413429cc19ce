"""Responses that hold nothing but a status."""

from __future__ import annotations

from typing import Any

from .messages import CLASSES, Code


def ok(name: str) -> Any:
    """Returns a response of the class `name` with the status OK."""
    return with_status(name, Code.OK, "OK")


def with_status(name: str, code: Code, message: str) -> Any:
    """Returns a response of the class `name` with a status."""
    response = CLASSES[name]()
    response.status.code, response.status.message = code, message
    return response

"""Creates the statuses of gRPC responses."""

from __future__ import annotations

from typing import Any

from .messages import CLASSES, Code, make


def ok_status() -> Any:
    """Returns the status OK."""
    return make("Status", code=Code.OK, message="OK")


def ok(name: str) -> Any:
    """Returns a response of the class `name` with only the status OK."""
    return with_status(name, Code.OK, "OK")


def with_status(name: str, code: Code, message: str) -> Any:
    """Returns a response of the class `name` with only a status."""
    response = CLASSES[name]()
    response.status.code, response.status.message = code, message
    return response


def set_status_by_entries(response: Any) -> None:
    """Sets the status of a response to that of its first entry, or to MULTIPLE_RESULTS if the codes of its entries
    differ. There must be an entry."""
    first = response.entries[0].status
    if all(entry.status.code == first.code for entry in response.entries):
        response.status.CopyFrom(first)
    else:
        response.status.code, response.status.message = Code.MULTIPLE_RESULTS, "the results differ"

"""What a call came to, so that two twins (`ha.protocol.compiled`) can be compared."""

from collections.abc import Callable
from typing import Any

from ha.errors import ProtocolError


def outcome(function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """The value that a call returns, or kind and text of the protocol error it raises."""
    try:
        return function(*values, **named)
    except ProtocolError as error:
        return type(error), str(error)

"""A secret in a configuration: compared and revealed on purpose, printed never.

Nothing that shows a value (repr, str, format, the tables of `--print-config`, /status, a traceback's locals, msgspec's
encoders, pickle) gets at what it holds; only `reveal` does, so a search for that word finds every use.
"""

from __future__ import annotations

import hmac
from typing import NoReturn

HIDDEN = "***"
"""What stands wherever a secret would be shown."""


class SecretStr:
    """Text that nobody may see by accident. Equal ones compare equal, in constant time for texts of one length."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text, for the one place that needs it."""
        return self._text

    def __repr__(self) -> str:
        return f"SecretStr({HIDDEN!r})"

    def __str__(self) -> str:
        return HIDDEN

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretStr):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((SecretStr, self._text))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not to be pickled or copied into another process")

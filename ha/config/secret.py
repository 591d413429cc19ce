"""A secret that is never displayed by accident.

repr, str, format, `--print-config`, /status, the locals of a traceback, msgspec's encoders and pickle don't show its
text. Only `reveal` returns it, so a search for that word finds every use.
"""

from __future__ import annotations

import hmac
from typing import NoReturn

HIDDEN = "***"
"""Displayed instead of a secret."""


class SecretStr:
    """A secret text. Comparison takes constant time for texts of equal length."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Returns the text."""
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
        raise TypeError("secrets can't be pickled")

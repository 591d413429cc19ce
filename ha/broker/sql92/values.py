"""The values of an expression, as in Java, and their comparison.

    Java       here
    Integer    int (exactly that type)
    Long       Long
    Double     float
    Boolean    bool
    String     str
    null       None

Properties are strings. A string is converted to the type that it is compared with. If that fails, evaluation ends
(Incomparable) and the message is not selected, even if the rest of the expression is true. Source:
ComparisonExpression.__compare, Integer.valueOf, Double.valueOf.
"""

from __future__ import annotations

import math
import re
from typing import TypeAlias

INTEGER_MIN, INTEGER_MAX = -(1 << 31), (1 << 31) - 1
LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1


class FilterSyntaxError(Exception):
    """An expression is invalid."""


class Incomparable(Exception):  # noqa: N818 - an expected outcome for one message, not an error
    """Two values can't be compared; Java throws an exception."""


class Long(int):
    """An integer that is a Long in Java; a string compared with it is parsed as a Long."""


Value: TypeAlias = str | int | float | None  # and bool, an int

_INTEGER = re.compile(r"[+-]?\d+")
_BLANKS = "".join(map(chr, range(0x21)))
_DOUBLE = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<name>NaN|Infinity)"
    r"|(?P<decimal>(?:[0-9]++\.?[0-9]*+|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?"
    r"|(?P<hex>0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?)"
)
_BASIC_PLANE_MAX = "\uffff"


def integer_of(text: str, least: int, greatest: int) -> int:
    """Parses `text` like Integer.valueOf or Long.valueOf. Raises Incomparable if it is not an integer from `least` to
    `greatest`.

    As in Java, digits of any script in Unicode's basic multilingual plane are accepted; blanks, underscores and
    decimals are not.
    """
    if not _INTEGER.fullmatch(text) or max(text) > _BASIC_PLANE_MAX:
        raise Incomparable(text)
    digits = text.lstrip("+-")
    if len(digits) > 20:  # leading zeros, or out of range
        digits = digits.lstrip("".join({digit for digit in digits if int(digit) == 0})) or "0"
        if len(digits) > 20:
            raise Incomparable(text)
    value = -int(digits) if text[0] == "-" else int(digits)
    if not least <= value <= greatest:
        raise Incomparable(text)
    return value


def double_of(text: str) -> float:
    """Parses `text` like Double.valueOf: "1", " 1.5 ", "2e3", "1d", "NaN", "0x1p3". Raises Incomparable if it is not a
    number."""
    match = _DOUBLE.fullmatch(text.strip(_BLANKS))
    if match is None:
        raise Incomparable(text)
    sign = match["sign"]
    if match["name"]:
        return float(sign + match["name"])
    if match["hex"]:
        try:
            return float.fromhex(sign + match["hex"])
        except OverflowError:
            return float(sign + "inf")
    return float(sign + match["decimal"])


def compare(left: Value, right: Value) -> int:
    """Returns a negative number, 0 or a positive one if `left` is less than, equal to or greater than `right`.

    Neither may be None. A boolean and a number compare as "less", as in Java. Raises Incomparable if one is a string
    that can't be converted to the type of the other, or if `left` is a boolean and `right` a string.
    """
    left_type, right_type = type(left), type(right)
    if left_type is not right_type:
        if left_type is str:
            left = _convert(str(left), right)
        elif right_type is str:
            if left_type is bool:
                raise Incomparable(right)  # a ClassCastException in Java
            right = _convert(str(right), left)
        elif bool in (left_type, right_type):
            return -1
        elif left_type is float:
            right = float(right)  # type: ignore[arg-type]
        elif right_type is float:
            left = float(left)  # type: ignore[arg-type]
    if isinstance(left, float):
        return _compare_doubles(left, right)  # type: ignore[arg-type]
    return (left > right) - (left < right)  # type: ignore[operator]


def compare_by_size(left: Value, right: Value) -> int:
    """As `compare`, for <, <=, > and >=: two strings are compared as numbers. Also raises Incomparable if one of them
    is not a number."""
    if type(left) is str and type(right) is str:
        return _compare_doubles(double_of(left), double_of(right))
    return compare(left, right)


def _convert(text: str, other: Value) -> Value:
    if isinstance(other, bool):
        return text.lower() == "true"
    if isinstance(other, float):
        return double_of(text)
    if isinstance(other, Long):
        return integer_of(text, LONG_MIN, LONG_MAX)
    return integer_of(text, INTEGER_MIN, INTEGER_MAX)


def _compare_doubles(left: float, right: float) -> int:
    """Compares like Double.compareTo: -0.0 is less than 0.0, NaN equals itself and is greater than all else."""
    if left < right:
        return -1
    if left > right:
        return 1
    return (_rank(left) > _rank(right)) - (_rank(left) < _rank(right))


def _rank(value: float) -> int:
    """Returns a rank that orders values which < and > do not distinguish: -0.0 before 0.0, NaN above all."""
    if math.isnan(value):
        return 2
    return int(value != 0 or math.copysign(1, value) > 0)

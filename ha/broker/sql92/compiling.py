"""Compiles an expression to a predicate over properties, with RocketMQ's checks and three-valued logic.

Each part of an expression becomes a function from the properties to a value (values.py); None is SQL's unknown. A
message is selected if the whole is true. Static checks happen here: only numbers and properties can be ordered, the
limits of BETWEEN must be in order, IN needs a property.

RocketMQ's parser stops where the expression could end and ignores the rest: `a = 1 garbage` is `a = 1`. So does this
one, for clients that rely on it. Sources: SelectorParser.jj, LogicExpression, UnaryExpression,
ComparisonExpression, ConstantExpression, ExpressionMessageFilter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import ge, gt, le, lt
from typing import Any, TypeAlias

import msgspec

from ha.broker.sql92.grammar import parser
from ha.broker.sql92.values import (
    INTEGER_MAX,
    LONG_MAX,
    FilterSyntaxError,
    Incomparable,
    Long,
    Value,
    compare,
    compare_by_size,
)

EXPRESSION_LENGTH_MAX = 4096
"""Maximum length of an expression, in characters. RocketMQ limits only the size of the request."""
TERM_COUNT_MAX = 512
"""Maximum number of properties and literals in an expression, not counting elements of lists."""
DEPTH_MAX = 64
"""Maximum nesting of comparisons and negations; a chain of AND or OR counts once. RocketMQ is limited only by the size
of its stack.
"""

STACK_MAX = 256
"""Maximum number of entries in the parser's stack, which holds open parentheses and unfinished parts."""

Properties: TypeAlias = Mapping[str, str]
Predicate: TypeAlias = Callable[[Properties], bool]
_Evaluate: TypeAlias = Callable[[Properties], Value]


class _Part(msgspec.Struct, frozen=True):
    """A part of an expression. `is_boolean`: its value is true, false or unknown."""

    evaluate: _Evaluate
    is_boolean: bool = False
    is_property: bool = False
    is_constant: bool = False
    constant: Value = None
    depth: int = 0
    term_count: int = 1
    operator: str = ""
    operands: tuple[_Evaluate, ...] = ()
    """The operands of a chain of one `operator`, "AND" or "OR"."""


def compile_filter(expression: str) -> Predicate:
    """Returns a predicate that decides by a message's properties whether the message is selected.

    Raises FilterSyntaxError if the expression is invalid or exceeds a limit.
    """
    if len(expression) > EXPRESSION_LENGTH_MAX:
        raise FilterSyntaxError(
            f"an expression of {len(expression)} characters; at most {EXPRESSION_LENGTH_MAX} are accepted"
        )
    evaluate = _as_boolean(_parse(expression)).evaluate

    def is_wanted(properties: Properties) -> bool:
        try:
            return evaluate(properties) is True
        except Incomparable:
            return False

    return is_wanted


def _parse(expression: str) -> _Part:
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken

    run = parser(_COMPILER).parse_interactive(expression)
    stopped_at: UnexpectedToken | None = None
    try:
        for _ in run.iter_parse():
            if len(run.parser_state.value_stack) > STACK_MAX:
                raise FilterSyntaxError(f"too many parentheses or operators in one another in {_shown(expression)}")
    except UnexpectedToken as error:
        stopped_at = error
    except UnexpectedCharacters as error:
        raise FilterSyntaxError(f"unexpected {error.char!r} in {_shown(expression)}") from None
    try:
        parsed: _Part = run.feed_eof()  # type: ignore[no-untyped-call]
    except UnexpectedToken:
        found = f"{str(stopped_at.token)[:40]!r}" if stopped_at is not None else "end"
        raise FilterSyntaxError(f"unexpected {found} in {_shown(expression)}") from None
    return parsed


def _shown(expression: str) -> str:
    return repr(expression if len(expression) <= 200 else expression[:200] + "…")


def _made(evaluate: _Evaluate, *parts: _Part, is_boolean: bool = True, depth: int = 0, **changes: Any) -> _Part:
    """Returns a part composed of others. Raises FilterSyntaxError if it is too deep or has too many terms."""
    depth = depth or 1 + max(part.depth for part in parts)
    term_count = sum(part.term_count for part in parts)
    if depth > DEPTH_MAX:
        raise FilterSyntaxError(f"more than {DEPTH_MAX} operators in one another")
    if term_count > TERM_COUNT_MAX:
        raise FilterSyntaxError(f"more than {TERM_COUNT_MAX} properties and literals")
    return _Part(evaluate, is_boolean, depth=depth, term_count=term_count, **changes)


def _constant(value: Value, *, is_boolean: bool = False) -> _Part:
    return _Part(lambda properties: value, is_boolean, is_constant=True, constant=value)


def _as_boolean(part: _Part) -> _Part:
    """Returns `part` as a condition. A property is a string, so as a condition it is never true: false if it is
    present, otherwise unknown. Raises FilterSyntaxError if `part` is neither boolean nor a property."""
    if part.is_boolean:
        return part
    if not part.is_property:
        raise FilterSyntaxError("a value stands where a condition has to be")
    get = part.evaluate
    return _made(lambda properties: None if get(properties) is None else False, part)


def _chain(operator: str, left: _Part, right: _Part) -> _Part:
    """Returns the AND or OR of two conditions. A chain of one operator is a single part, evaluated up to the first
    operand that decides its value."""
    left, right = _as_boolean(left), _as_boolean(right)
    operands: tuple[_Evaluate, ...] = (left.evaluate, right.evaluate)
    depth = 0
    if left.operator == operator:
        operands = (*left.operands, right.evaluate)
        depth = max(left.depth, right.depth + 1)
    decisive = operator == "OR"

    def evaluate(properties: Properties) -> Value:
        is_unknown = False
        for operand in operands:
            value = operand(properties)
            if value is decisive:
                return decisive
            if value is None:
                is_unknown = True
        return None if is_unknown else not decisive

    return _made(evaluate, left, right, depth=depth, operator=operator, operands=operands)


def _equal(left: _Part, right: _Part) -> _Part:
    get_left, get_right = left.evaluate, right.evaluate

    def evaluate(properties: Properties) -> Value:
        one, other = get_left(properties), get_right(properties)
        if one is None or other is None:
            return True if one is other else None if one is None else False
        return compare(one, other) == 0

    return _made(evaluate, left, right)


def _negation(part: _Part) -> _Part:
    condition = _as_boolean(part)
    get = condition.evaluate

    def evaluate(properties: Properties) -> Value:
        value = get(properties)
        return None if value is None else not value

    return _made(evaluate, condition)


def _sized(holds: Callable[[int, int], bool], left: _Part, right: _Part) -> _Part:
    for part in (left, right):
        is_number = type(part.constant) not in (str, bool, type(None))
        if part.is_boolean or (part.is_constant and not is_number):
            raise FilterSyntaxError("only numbers and properties can be compared by <, <=, > and >=")
    get_left, get_right = left.evaluate, right.evaluate

    def evaluate(properties: Properties) -> Value:
        one = get_left(properties)
        if one is None:
            return None
        other = get_right(properties)
        if other is None:
            return None
        return holds(compare_by_size(one, other), 0)

    return _made(evaluate, left, right)


def _string(token: str) -> str:
    return token[1:-1].replace("''", "'")


def _in(part: _Part, tokens: tuple[str, ...], *, is_listed: bool) -> _Part:
    if not part.is_property:
        raise FilterSyntaxError("IN looks at a property alone")
    get = part.evaluate
    elements = frozenset(map(_string, tokens))

    def evaluate(properties: Properties) -> Value:
        value = get(properties)
        return None if value is None else (value in elements) is is_listed

    return _made(evaluate, part)


def _text(part: _Part, token: str, test: Callable[[str, str], bool], *, has: bool) -> _Part:
    """Returns a CONTAINS, STARTSWITH or ENDSWITH condition. With or without NOT, it is false if the value is not a
    string or the literal is empty."""
    get = part.evaluate
    searched = _string(token)

    def evaluate(properties: Properties) -> Value:
        value = get(properties)
        return isinstance(value, str) and searched != "" and test(value, searched) is has

    return _made(evaluate, part)


_Alternative: TypeAlias = Callable[["_Compiler", list[Any]], _Part]


def _ordering(holds: Callable[[int, int], bool]) -> _Alternative:
    return lambda _, children: _sized(holds, *children)


def _search(test: Callable[[str, str], bool], *, has: bool) -> _Alternative:
    return lambda _, children: _text(children[0], children[-1], test, has=has)


class _Compiler:
    """Called by lark: one method per alternative of the grammar, with its parts and named tokens."""

    def either(self, children: list[Any]) -> _Part:
        return _chain("OR", children[0], children[-1])

    def both(self, children: list[Any]) -> _Part:
        return _chain("AND", children[0], children[-1])

    def equal(self, children: list[Any]) -> _Part:
        left, right = children
        for part in (left, right):
            if part.is_constant and part.constant is None:
                raise FilterSyntaxError("NULL can't be compared; IS NULL tells whether a property is missing")
        if left.is_constant and right.is_constant and left.is_boolean and not right.is_boolean:
            raise FilterSyntaxError("TRUE and FALSE can't be compared with such a literal")
        return _equal(left, right)

    def not_equal(self, children: list[Any]) -> _Part:
        return _negation(self.equal(children))

    def is_null(self, children: list[Any]) -> _Part:
        return _equal(children[0], _constant(None))

    def is_not_null(self, children: list[Any]) -> _Part:
        return _negation(_equal(children[0], _constant(None)))

    greater = _ordering(gt)
    greater_or_equal = _ordering(ge)
    less = _ordering(lt)
    less_or_equal = _ordering(le)

    def between(self, children: list[Any]) -> _Part:
        value, _, low, _, high = children
        if low.is_constant and high.is_constant:
            if low.constant is None or high.constant is None:
                raise FilterSyntaxError("the limits of BETWEEN can't be NULL")
            try:
                is_empty = compare(high.constant, low.constant) < 0
            except Incomparable:
                is_empty = True
            if is_empty:
                raise FilterSyntaxError("the limits of BETWEEN are the wrong way round")
        return _chain("AND", _sized(ge, value, low), _sized(le, value, high))

    def not_between(self, children: list[Any]) -> _Part:
        value, _, _, low, _, high = children
        return _chain("OR", _sized(lt, value, low), _sized(gt, value, high))

    def is_in(self, children: list[Any]) -> _Part:
        return _in(children[0], tuple(children[2:]), is_listed=True)

    def is_not_in(self, children: list[Any]) -> _Part:
        return _in(children[0], tuple(children[3:]), is_listed=False)

    contains = _search(str.__contains__, has=True)
    not_contains = _search(str.__contains__, has=False)
    starts_with = _search(str.startswith, has=True)
    not_starts_with = _search(str.startswith, has=False)
    ends_with = _search(str.endswith, has=True)
    not_ends_with = _search(str.endswith, has=False)

    def negated(self, children: list[Any]) -> _Part:
        part = children[-1]
        get = part.evaluate

        def evaluate(properties: Properties) -> Value:
            value = get(properties)
            if value is None or isinstance(value, str | bool):
                return None
            return Long(-value) if isinstance(value, Long) else -value

        return _made(evaluate, part, is_boolean=False)

    def negation(self, children: list[Any]) -> _Part:
        return _negation(children[-1])

    def string(self, children: list[Any]) -> _Part:
        return _constant(_string(children[0]))

    def integer(self, children: list[Any]) -> _Part:
        digits = children[0].rstrip("lL")
        if len(digits) > 19 or int(digits) > LONG_MAX:
            raise FilterSyntaxError(f"{digits[:40]} is too large a number")
        value = int(digits)
        return _constant(value if value <= INTEGER_MAX else Long(value))

    def double(self, children: list[Any]) -> _Part:
        value = float(children[0])
        if math.isinf(value) or value == 0:
            raise FilterSyntaxError(f"{children[0][:40]} is too large or too small a number, or 0 with a point")
        return _constant(value)

    def true(self, children: list[Any]) -> _Part:
        return _constant(True, is_boolean=True)

    def false(self, children: list[Any]) -> _Part:
        return _constant(False, is_boolean=True)

    def null(self, children: list[Any]) -> _Part:
        return _constant(None, is_boolean=True)

    def property(self, children: list[Any]) -> _Part:
        name = str(children[0])
        return _Part(lambda properties: properties.get(name), is_property=True)


_COMPILER = _Compiler()

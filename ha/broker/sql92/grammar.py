"""Tokens and grammar of an expression, as in RocketMQ's SelectorParser.jj: no LIKE, arithmetic or functions.

Keywords are case-insensitive (ASCII); the longest token wins. NOT binds tighter than any comparison, so that
`NOT a = 1` compares `NOT a`. CONTAINS, STARTSWITH and ENDSWITH take a string literal, IN a list of them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lark import Lark


def _word(text: str) -> str:
    letters = "".join(f"[{letter}{letter.lower()}]" for letter in text)
    return f"/{letters}(?![A-Za-z0-9_$])/"


_WORDS = "\n".join(
    f"{word}.3: {_word(word)}"
    for word in (
        "NOT",
        "AND",
        "OR",
        "BETWEEN",
        "IN",
        "TRUE",
        "FALSE",
        "NULL",
        "IS",
        "CONTAINS",
        "STARTSWITH",
        "ENDSWITH",
    )
)

GRAMMAR = (
    r"""
?start: or
?or: and
   | or OR and -> either
?and: equality
    | and AND equality -> both
?equality: comparison
         | equality "=" comparison -> equal
         | equality "<>" comparison -> not_equal
         | equality IS NULL -> is_null
         | equality IS NOT NULL -> is_not_null
?comparison: unary
           | comparison ">" unary -> greater
           | comparison ">=" unary -> greater_or_equal
           | comparison "<" unary -> less
           | comparison "<=" unary -> less_or_equal
           | comparison BETWEEN unary AND unary -> between
           | comparison NOT BETWEEN unary AND unary -> not_between
           | comparison IN "(" STRING ("," STRING)* ")" -> is_in
           | comparison NOT IN "(" STRING ("," STRING)* ")" -> is_not_in
           | comparison CONTAINS STRING -> contains
           | comparison NOT CONTAINS STRING -> not_contains
           | comparison STARTSWITH STRING -> starts_with
           | comparison NOT STARTSWITH STRING -> not_starts_with
           | comparison ENDSWITH STRING -> ends_with
           | comparison NOT ENDSWITH STRING -> not_ends_with
?unary: primary
      | "+" unary
      | "-" unary -> negated
      | NOT unary -> negation
?primary: STRING -> string
        | DECIMAL -> integer
        | FLOAT -> double
        | TRUE -> true
        | FALSE -> false
        | NULL -> null
        | ID -> property
        | "(" or ")"

STRING: /'(?:[^']|'')*'/
FLOAT.2: /[0-9]+\.[0-9]*(?:[Ee][+-]?[0-9]+)?|\.[0-9]+(?:[Ee][+-]?[0-9]+)?|[0-9]+[Ee][+-]?[0-9]+/
DECIMAL.1: /0|[1-9][0-9]*[Ll]?/
ID: /[A-Za-z_$][A-Za-z0-9_$]*/
BLANK: /[ \t\n\r\f]+/
LINE_COMMENT.4: /--[^\n\r]*+(?:\r\n|\n|\r)/
BLOCK_COMMENT.4: /\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\//
%ignore BLANK
%ignore LINE_COMMENT
%ignore BLOCK_COMMENT
"""
    + _WORDS
    + "\n"
)


@cache
def parser(transformer: Any) -> Lark:
    """Returns the parser, which calls `transformer` for each completed rule. Cached, as building it is slow."""
    # Imported on first use: brokers that only filter by tags do not need it.
    from lark import Lark

    return Lark(GRAMMAR, parser="lalr", lexer="basic", transformer=transformer, maybe_placeholders=False)

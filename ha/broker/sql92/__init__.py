"""RocketMQ's SQL92 filter: an expression over a message's properties, compiled into a predicate.

    grammar      tokens and grammar, for lark's LALR parser
    values       Java's semantics of values: types, comparisons, numbers in strings
    compiling    compiles parsed expressions to predicates, with RocketMQ's checks

Independent of messages and queues: properties are a mapping of strings.
"""

from ha.broker.sql92.compiling import DEPTH_MAX, EXPRESSION_LENGTH_MAX, TERM_COUNT_MAX, Predicate, compile_filter
from ha.broker.sql92.values import FilterSyntaxError

__all__ = [
    "DEPTH_MAX",
    "EXPRESSION_LENGTH_MAX",
    "TERM_COUNT_MAX",
    "FilterSyntaxError",
    "Predicate",
    "compile_filter",
]

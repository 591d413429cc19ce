"""RocketMQ's SQL92 filter: an expression over a message's properties, compiled into a predicate.

    grammar      tokens and grammar, for lark's LALR parser
    values       what Java does with the values: types, comparisons, numbers in strings
    compiling    from parsed expressions to predicates, with RocketMQ's checks

It knows neither messages nor queues: properties come as a mapping of strings.
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

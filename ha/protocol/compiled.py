"""Which of two twins runs: a function in Python, or its compiled twin from a Cython module.

The twin of a function of `ha.protocol.batch` has the same name and stands in `ha/protocol/_batch.pyx`. It takes the
same arguments, returns the same and raises the same; tests run both. Where nothing is compiled, or HALOG_PURE is set
in the environment, the function in Python runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

TWINS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The function in Python of each compiled one that runs"""


def with_compiled_twin(function: FunctionT) -> FunctionT:
    """Return the compiled twin of `function`, or `function` where there is none. For use as a decorator."""
    if os.environ.get("HALOG_PURE"):
        return function
    package, _, name = function.__module__.rpartition(".")
    try:
        twin: FunctionT = getattr(import_module(f"{package}._{name}"), function.__name__)
    except ImportError:
        return function
    TWINS[twin] = function
    return twin


def pure(function: FunctionT) -> FunctionT:
    """Return the function in Python, whichever of the twins `function` is."""
    return TWINS.get(function, function)  # type: ignore[return-value]

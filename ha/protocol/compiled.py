"""Which of two twins runs: a function in Python, or its compiled twin from a Cython module.

The twin of a function of `ha.protocol.batch` has the same name and stands in `ha/protocol/_batch.pyx`. It takes the
same arguments, returns the same and raises the same; tests run both. Where nothing is compiled, or HALOG_PURE is set
in the environment, the function in Python runs.

It runs as well, and the log says so once for each module, beside a compiled module that can't be loaded or that is not
of these sources: one that was compiled before they changed would do what they did then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar
from zlib import crc32

logger = logging.getLogger(__name__)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

TWINS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The function in Python of each compiled one that runs"""


def with_compiled_twin(function: FunctionT) -> FunctionT:
    """Return the compiled twin of `function`, or `function` where there is none. For use as a decorator."""
    module = compiled_twin(function.__module__)
    if module is None:
        return function
    twin: FunctionT | None = getattr(module, function.__name__, None)
    if twin is None:
        _say(module.__name__, f"it has no {function.__name__}")
        return function
    TWINS[twin] = function
    return twin


def pure(function: FunctionT) -> FunctionT:
    """Return the function in Python, whichever of the twins `function` is."""
    return TWINS.get(function, function)  # type: ignore[return-value]


@cache
def compiled_twin(name: str) -> ModuleType | None:
    """Return the compiled twin of the module `name` ("ha.protocol.batch"), or None where it is not to run."""
    if os.environ.get("HALOG_PURE"):
        return None
    package, _, last = name.rpartition(".")
    twin = f"{package}._{last}"
    try:
        module = import_module(twin)
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        _say(twin, str(error))
        return None
    if not _is_of_its_source(module, last):
        _say(twin, "it was compiled from another source than the one beside it")
        return None
    return module


def _is_of_its_source(module: ModuleType, name: str) -> bool:
    """Whether a module was compiled from the source that stands beside it, if one does; hatch_build.py notes which."""
    loader: Any = module.__loader__
    folder, _, _ = (module.__file__ or "").rpartition("/")
    try:
        source: bytes = loader.get_data(f"{folder}/_{name}.pyx")
    except OSError:
        return True
    return bool(getattr(module, "SOURCE_CRC", None) == crc32(source))


def _say(twin: str, reason: str) -> None:
    logger.warning(
        "compiled_module_left_alone module=%s reason=%r: Python does it, slower; install halog again", twin, reason
    )


__all__ = ["TWINS", "compiled_twin", "pure", "with_compiled_twin"]

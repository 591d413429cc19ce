"""Selects between a Python function and its compiled twin from a Cython module.

For example, the twin of a function in `ha.protocol.batch` has the same name and is in `ha/protocol/_batch.pyx`. A twin
takes the same arguments, returns the same values and raises the same errors of `ha.errors`; tests compare the two. The
Python function runs if its module is not compiled, or if HALOG_PURE is set in the environment.

The Python function also runs if the compiled module can't be loaded, lacks the twin, or was compiled from other sources
than those next to it; a log line reports this.

A single source for both (Cython's pure Python mode) would be slow in one of its forms: with `struct`, compiling gains
only a quarter; with byte arithmetic, the interpreted form takes five times as long. The constants, integer access and
record parser of all twins are in _layout.pxd.
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

_LAYOUT_FILE = __file__.removesuffix("compiled.py") + "_layout.pxd"
"""Path of the file that all twins include"""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

TWINS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The Python function of each compiled twin in use"""


def with_compiled_twin(function: FunctionT) -> FunctionT:
    """Returns the compiled twin of `function`, or `function` if there is none. For use as a decorator."""
    module = compiled_twin(function.__module__)
    if module is None:
        return function
    twin: FunctionT | None = getattr(module, function.__name__, None)
    if twin is None:
        _log_ignored(module.__name__, f"has no {function.__name__}")
        return function
    TWINS[twin] = function
    return twin


def pure(function: FunctionT) -> FunctionT:
    """Returns the Python function of a pair of twins, given either of them."""
    return TWINS.get(function, function)  # type: ignore[return-value]


@cache
def compiled_twin(name: str) -> ModuleType | None:
    """Returns the compiled twin of the module `name` ("ha.protocol.batch"), or None if it can't or must not be used."""
    if os.environ.get("HALOG_PURE"):
        return None
    package, _, last = name.rpartition(".")
    twin = f"{package}._{last}"
    try:
        module = import_module(twin)
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        _log_ignored(twin, str(error))
        return None
    if not _matches_sources(module, last):
        _log_ignored(twin, "compiled from other sources")
        return None
    return module


def _matches_sources(module: ModuleType, name: str) -> bool:
    """Returns whether `module` was compiled from the sources next to it (hatch_build.py adds their CRC). True if there
    are no sources."""
    loader: Any = module.__loader__
    folder, _, _ = (module.__file__ or "").rpartition("/")
    try:
        sources: bytes = loader.get_data(f"{folder}/_{name}.pyx") + loader.get_data(_LAYOUT_FILE)
    except OSError:
        return True
    return bool(getattr(module, "SOURCE_CRC", None) == crc32(sources))


def _log_ignored(twin: str, reason: str) -> None:
    logger.warning(
        'compiled.module_ignored module=%s reason=%r fallback=python hint="install halog again"', twin, reason
    )

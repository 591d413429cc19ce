"""Hides the tracebacks of errors that halog raises on purpose in Spark's Python processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ha.errors import HalogError

_HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"
"""Environment variable that makes `pyspark.util.handle_worker_exception` omit the traceback in the error text"""
_WORKER_MODULE = "pyspark.worker_util"
"""Imported by each of Spark's Python processes and by no driver"""


@contextmanager
def without_traceback() -> Iterator[None]:
    """Makes Spark show a HalogError of the block as its class and text, without a traceback; the error propagates.

    Other errors are bugs, and keep their traceback. The process ends with the error, so the setting affects no other
    error. Can decorate functions, but not generators.
    """
    try:
        yield
    except HalogError:
        if _WORKER_MODULE in sys.modules:
            os.environ[_HIDE_TRACEBACK] = "1"
        raise

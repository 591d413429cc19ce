"""Spark's Python processes: their memory, and the errors that they show. Starts no Spark."""

import os
import subprocess
import sys
from types import ModuleType

import pytest
from pyspark.errors import PySparkException

from ha.cli.spark import failures
from ha.errors import OptionError
from ha.spark.worker_errors import without_traceback

_ROUNDS = """
import resource, sys
import numpy as np
from ha.heap import keep_heap

if sys.argv[1] == "keep":
    keep_heap()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def round():  # six arrays, 6 MiB, as a batch with properties makes them
    [np.ones(1 << 17) for _ in range(6)]

round()
before = faults()
for _ in range(20):
    round()
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own limits")
def test_the_arrays_of_a_batch_are_made_in_the_pages_of_the_one_before() -> None:
    def pages(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", _ROUNDS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert pages("keep") < 6 * 256 < pages("leave")


@pytest.mark.parametrize(
    ("is_worker", "error", "hides"),
    [
        (True, OptionError("path", "it is missing", "a directory"), True),
        (True, ZeroDivisionError("a bug"), False),
        (False, OptionError("path", "it is missing", "a directory"), False),
    ],
)
def test_errors_on_purpose_are_shown_without_the_worker_s_traceback(
    is_worker: bool, error: Exception, hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
    if is_worker:
        monkeypatch.setitem(sys.modules, "pyspark.worker_util", ModuleType("pyspark.worker_util"))
    else:
        monkeypatch.delitem(sys.modules, "pyspark.worker_util", raising=False)

    @without_traceback()
    def plan() -> None:
        raise error

    try:
        with pytest.raises(type(error)):
            plan()
        assert ("SPARK_HIDE_TRACEBACK" in os.environ) is hides
    finally:
        os.environ.pop("SPARK_HIDE_TRACEBACK", None)


def test_commands_find_the_error_in_the_line_that_spark_shows() -> None:
    text = (
        "[PYTHON_DATA_SOURCE_ERROR] Failed to plan: ha.errors.StoreUnreadable: /d can't be read: no\n SQLSTATE: 38000"
    )
    assert failures.explain(PySparkException(text)) == "/d can't be read: no"
    assert failures.exit_code_of(PySparkException(text)) == 66

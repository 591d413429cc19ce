"""Tuning of a task's process. Starts no Spark."""

import subprocess
import sys

import pytest

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

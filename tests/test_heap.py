"""Pages that are used again. Each way is a process of its own: what the C library has learnt it keeps."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's own limits")

_ROUNDS = """
import os, resource, sys, tempfile
from ha.client.messages import ReadFrom
from ha.client.queue_requests import QueueRequests
from ha.heap import keep_heap

if sys.argv[1] == "keep":
    keep_heap()
elif sys.argv[1] == "consume":
    QueueRequests(None, "group", ReadFrom.SUGGESTED)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

answer = tempfile.TemporaryFile()
answer.write(bytes(200_000))
answer.flush()

def round():  # as a client receives an answer: up to so much is asked for, less is there
    os.pread(answer.fileno(), 1 << 20, 0)

round()
before = faults()
for _ in range(20):
    round()
print(faults() - before)
"""


@pytest.fixture(scope="module")
def given_back() -> int:
    return pages_made("leave")


def pages_made(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _ROUNDS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("how", ["keep", "consume"])
def test_what_was_freed_is_used_again(how: str, given_back: int) -> None:
    assert pages_made(how) < 100
    assert given_back > 20 * 200_000 // 4096

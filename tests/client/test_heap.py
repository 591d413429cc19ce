"""Pulls reuse memory pages. Each case runs in its own process, because the C library keeps its thresholds."""

import os
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

def round():  # as a client receives an answer: less than the buffer size
    os.pread(answer.fileno(), 1 << 20, 0)

round()
before = faults()
for _ in range(20):
    round()
print(faults() - before)
"""


_PAGES = 20 * 200_000 // 4096


def pages_made(how: str, **environment: str) -> int:
    command = [sys.executable, "-c", _ROUNDS, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return int(done.stdout)


def test_pulls_reuse_freed_memory() -> None:
    assert pages_made("keep") < _PAGES / 10
    assert pages_made("consume") < _PAGES / 10
    assert pages_made("leave") > _PAGES


def test_heap_limit_of_the_environment_takes_precedence() -> None:
    assert pages_made("consume", MALLOC_TRIM_THRESHOLD_="131072") > _PAGES

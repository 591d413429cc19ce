"""What runs beside a measured server, and how long its system calls take."""

import os
import time
from pathlib import Path

from bench.measure import cpu_s
from bench.neighbours import BUSY_COUNT, busy_loops, read_trace

TRACE = """\
1764300000.000001 pwrite64(7</s/commitlog/00000000000000000000>, ""..., 1024, 0) = 1024 <0.000021>
1764300000.100001 pwrite64(7</s/commitlog/00000000000000000000>, ""..., 1024, 1024) = 1024 <0.135002>
1764300000.300001 pwrite64(9</s/consumequeue/bench/0/00000000000000000000>, ""..., 20, 0) = 20 <0.020000>
1764300000.400001 write(11<socket:[4711]>, ""..., 12) = 12 <0.500000>
1764300000.500001 --- SIGCHLD {si_signo=SIGCHLD} ---
1764300000.600001 fdatasync(12</s/checkpoint>) = 0 <0.001500>
1764300000.700001 write(13</s/commitlog/1>, ""..., 12 <unfinished ...>
"""


def test_slow_writes_of_a_trace() -> None:
    assert read_trace(TRACE) == {
        "log_writes": 2,
        "log_slow": 1,
        "log_max_ms": 135.002,
        "file_writes": 4,
        "file_slow": 2,
        "file_max_ms": 135.002,
    }


def test_busy_loops_compute_and_end(tmp_path: Path) -> None:
    with busy_loops(tmp_path) as pids:
        assert len({os.getsid(pid) for pid in pids.values()}) == BUSY_COUNT
        while not all(cpu_s([pid]) for pid in pids.values()):
            time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())

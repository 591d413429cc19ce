"""Sessions of processes and of Spark."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from signal import SIGKILL

import pytest
from pyspark.sql import SparkSession


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Kills all processes in the session of `leader`, which began it, also those that are started meanwhile.

    PySpark's workers leave its process group, but not its session.
    """
    killed: set[int] = set()
    while new := set(_pids_of(leader.pid)) - killed:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
        killed |= new


def _pids_of(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it is gone
                continue
            if int(fields[3]) == session:
                yield int(entry.name)


def use_session(monkeypatch: pytest.MonkeyPatch, session: SparkSession) -> None:
    """Makes commands use this session instead of one of their own."""
    monkeypatch.setattr("ha.spark.session.open_session", lambda *_, **__: nullcontext(session))

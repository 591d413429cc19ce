"""Restarts of jobs whose Python processes Spark could not start. Starts no Spark."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyspark.errors import SparkRuntimeException, StreamingQueryException

from ha.cli import run
from ha.spark.restarts import DELAYS_S, with_restarts
from tests.spark.inline import inline_spark
from tests.spark.sessions import use_session
from tests.spark.stores import make_store, message

# As Spark 4.2 says it.
CONNECT = "An error occurred.\n: org.apache.spark.SparkException: Python worker failed to connect back."
STREAM = "[STREAM_FAILED] Query [id = 7, runId = 8] terminated with exception: Python worker failed to connect back."


class Failing:
    """Work that takes `seconds` and raises each of `errors` in turn, then returns its number of calls."""

    def __init__(self, *errors: Exception, seconds: float = 1.0) -> None:
        self.errors = list(errors)
        self.seconds = seconds
        self.calls = 0
        self.now_s = 0.0
        self.delays: list[int] = []
        self.waits: list[float | None] = []
        self.stop = threading.Event()
        self.stop.wait = self.wait  # type: ignore[method-assign]

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.stop.is_set()

    def __call__(self) -> int:
        self.calls += 1
        self.now_s += self.seconds
        if self.errors:
            raise self.errors.pop(0)
        return self.calls

    def run(self) -> int:
        def report(delay_s: int, _: BaseException) -> None:
            self.delays.append(delay_s)

        return with_restarts(self, stop=self.stop, report=report, clock_s=lambda: self.now_s)


def test_work_is_restarted_with_growing_delays() -> None:
    work = Failing(
        SparkRuntimeException(CONNECT),
        StreamingQueryException(STREAM),
        SparkRuntimeException(CONNECT),
        SparkRuntimeException(CONNECT),
    )
    assert work.run() == 5
    assert work.delays == work.waits == [5, 10, 20, 40]


def test_restarts_are_bounded() -> None:
    work = Failing(*(SparkRuntimeException(f"{CONNECT} {number}") for number in range(9)))
    with pytest.raises(SparkRuntimeException, match=r"back\. 4"):
        work.run()
    assert work.calls == 1 + len(DELAYS_S)


def test_restarts_are_counted_from_the_last_long_run() -> None:
    work = Failing(*[StreamingQueryException(STREAM)] * 20, seconds=600)
    assert work.run() == 21
    assert set(work.delays) == {5}


def test_other_errors_are_raised_at_once() -> None:
    work = Failing(StreamingQueryException("[STREAM_FAILED] Query terminated with exception: Job aborted"))
    with pytest.raises(StreamingQueryException, match="Job aborted"):
        work.run()
    assert work.calls == 1


def test_a_stop_ends_the_wait() -> None:
    work = Failing(SparkRuntimeException(CONNECT))
    work.wait = lambda timeout=None: True  # type: ignore[method-assign]
    work.stop.wait = work.wait  # type: ignore[method-assign]
    with pytest.raises(SparkRuntimeException):
        work.run()
    assert work.calls == 1


def test_a_restart_is_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    work = Failing(SparkRuntimeException(CONNECT))
    assert with_restarts(work, stop=work.stop) == 2
    assert [record.getMessage() for record in caplog.records] == [
        'spark.python_not_started restart_in_s=5 hint="the machine is busy"'
    ]


@pytest.mark.parametrize("failures", [2, 9])
def test_a_command_restarts_its_job(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = failures
    store = make_store(tmp_path / "s", [message(n) for n in range(20)])

    def fail() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise SparkRuntimeException(CONNECT)

    use_session(monkeypatch, inline_spark(fail))
    monkeypatch.setattr("ha.spark.restarts.DELAYS_S", (0, 0, 0, 0))
    code = run(["spark", "stats", str(store), "--json"])
    told = capsys.readouterr()
    if failures == 2:
        assert code == 0
        assert '"messages": 20' in told.out
        assert told.err.count("restarting the job in 0 s") == 2
    else:
        assert code == 69
        assert "could not start a Python process within 10 s, as the machine is busy; run the command again" in told.err
        assert "Traceback" not in told.err


def test_finding_the_data_source_imports_nothing_large() -> None:
    """Spark imports every module pyspark_… in a process that only asks for their names."""
    code = "import sys, pyspark.sql.datasource; known = {*sys.modules}; import pyspark_halog"
    code += "; print(*{*sys.modules} - known)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert "ha.spark.data_source" in imported
    assert not {"numpy", "pyarrow", "msgspec", "ha.arrow", "ha.spark.source.options"} & {*imported}

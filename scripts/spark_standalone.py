"""Runs a standalone Spark cluster on loopback, with one Master and some Workers from pip's PySpark.

Used by tests (`standalone_cluster`) and from the shell (scripts/spark-standalone). Executors run this interpreter, so
they can import the installed package `ha`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.1


class ClusterError(Exception):
    """A Master or Worker did not start; the message shows the end of its log."""


def spark_environment() -> dict[str, str]:
    """Returns the environment with settings that keep Spark on loopback and use this interpreter and its commands."""
    import pyspark

    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
        "SPARK_NO_DAEMONIZE": "1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }


@contextmanager
def standalone_cluster(
    directory: Path, *, worker_count: int = 2, cores: int = 1, memory_mb: int = 1024
) -> Iterator[str]:
    """Runs a cluster during the block and yields its URL. Logs and work files go below `directory`.

    Each worker offers `cores` and `memory_mb` (MiB). Raises ClusterError if a process doesn't start within a minute.
    """
    ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        master = stack.enter_context(_daemon(directory, "master", "master.Master", ports))
        url = _wait_for(master, r"Starting Spark master at (spark://\S+)")
        offer = ["--cores", str(cores), "--memory", f"{memory_mb}M"]
        workers = [
            stack.enter_context(
                _daemon(
                    directory,
                    f"worker-{number}",
                    "worker.Worker",
                    [*ports, *offer, "--work-dir", str(directory / f"work-{number}"), url],
                )
            )
            for number in range(worker_count)
        ]
        for worker in workers:
            _wait_for(worker, r"Successfully registered with master (\S+)")
        yield url


class _Daemon:
    def __init__(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.process = process
        self.log_file = log_file


@contextmanager
def _daemon(directory: Path, name: str, class_name: str, arguments: list[str]) -> Iterator[_Daemon]:
    directory.mkdir(parents=True, exist_ok=True)
    environment = spark_environment()
    log_file = directory / f"{name}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [f"{environment['SPARK_HOME']}/bin/spark-class", f"org.apache.spark.deploy.{class_name}", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_with_small_heap(environment),
            start_new_session=True,  # Ctrl-C reaches only the parent, which then stops all processes in order
        )
    try:
        yield _Daemon(process, log_file)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _with_small_heap(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "SPARK_DAEMON_MEMORY": "256m"}


def _wait_for(daemon: _Daemon, pattern: str) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        text = daemon.log_file.read_text(errors="replace")
        found = re.search(pattern, text)
        if found is not None:
            return found.group(1)
        if daemon.process.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(f"{daemon.log_file.stem} did not start:\n" + "\n".join(text.splitlines()[-15:]))
        time.sleep(_POLL_INTERVAL_S)


def main() -> int:
    """Runs the cluster; returns the command's exit code, or 0 after Ctrl-C."""
    arguments = sys.argv[1:]
    command = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    parser = argparse.ArgumentParser(prog="scripts/spark-standalone", description="Run a Spark cluster on loopback.")
    parser.add_argument("--workers", type=int, default=2, help="number of Workers (default: 2)")
    parser.add_argument("--cores", type=int, default=1, help="cores per Worker (default: 1)")
    parser.add_argument("--memory-mb", type=int, default=1024, help="memory per Worker in MiB (default: 1024)")
    parser.add_argument(
        "--directory", type=Path, help="directory for logs and work files (default: a temporary directory)"
    )
    options = parser.parse_args(arguments[: arguments.index("--")] if command else arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as stack:
        directory = options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halog-spark-")))
        try:
            url = stack.enter_context(
                standalone_cluster(
                    directory, worker_count=options.workers, cores=options.cores, memory_mb=options.memory_mb
                )
            )
            if command:
                return subprocess.run(command, env={**spark_environment(), "SPARK_MASTER": url}).returncode
            print(f"READY {url}", flush=True)
            signal.pause()
        except ClusterError as error:
            print(f"spark-standalone: {error}", file=sys.stderr)
            return 69
        except KeyboardInterrupt:
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())

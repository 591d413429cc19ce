"""The load generators and their output: the real Java client (Bench.java from the peers' directory), load.py,
sdk_load.py, the peers' own harness, and a broker's runtime information.
"""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UPDATE_BROKER_CONFIG = 25
GET_BROKER_CONFIG = 26
_GET_BROKER_RUNTIME_INFO = 28
_CURVE_STEP_S = 0.1


class RunError(Exception):
    """A run is not valid: a program failed, or not every message got the expected result."""


def output_of(
    command: Sequence[object],
    environment: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 600,
    hopeless: str | None = None,
) -> str:
    """Returns the output of a command, stderr included. Kills the command after a line that starts with `hopeless`, and
    after `timeout_s`.

    Raises RunError, with the end of the output, if the command was killed or its exit code is not 0.
    """
    words = [str(word) for word in command]
    name = " ".join(Path(word).name for word in words[:2])
    lines: list[str] = []
    with subprocess.Popen(
        words,
        env=os.environ | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if hopeless is not None and line.startswith(hopeless):
                    process.kill()
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
    text = "".join(lines)
    if is_late.is_set():
        raise RunError(f"{name} did not end within {timeout_s:g} s: {text.strip()[-400:]}")
    if code:
        raise RunError(f"{name} ended with {code}: {text.strip()[-400:]}")
    return text


# The real Java client


@dataclass(frozen=True)
class JavaClient:
    """Bench.java with the client of one RocketMQ release, for any broker."""

    scripts: Path
    installed: Path
    version: str

    def run(self, name_server: str, topic: str, *words: object, warm_up: int = 0) -> dict[str, Any]:
        """Runs Bench once; `warm_up` is the number of requests before the measured ones. Raises RunError."""
        command = ["bash", self.scripts / "bench.sh", self.installed, self.version, topic, *words]
        environment = {"RMQ_NAMESRV": name_server, "BENCH_JVM_OPTS": f"-Dwarmup={warm_up}"}
        # If main fails, the client's other threads keep the JVM alive.
        return read_bench(output_of(command, environment, hopeless='Exception in thread "main"'))


def read_bench(text: str) -> dict[str, Any]:
    """Parses the result line of Bench.java (produce-sync, produce-batch, consume or consume-push).

    Raises RunError if there is none, or if a message was not sent with SEND_OK or not consumed in order.
    """
    for line in text.splitlines():
        mode, _, rest = line.partition(" ")
        if mode not in ("produce-sync", "produce-batch", "consume", "consume-push"):
            continue
        found: dict[str, float] = {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)(?=\s|$)", rest)}
        if mode.startswith("produce"):
            statuses = re.findall(r"statuses=\{(.*)\}", rest)
            if statuses != [f"SEND_OK={found['n'] / found['batch']:.0f}"]:
                raise RunError(f"not every send was SEND_OK: {statuses}")
            return {"messages": found["n"], "rate": found["msgs_per_s"]} | {
                name: found[name] for name in ("p50_ms", "p99_ms", "p999_ms", "max_ms")
            }
        if "complete=false" in rest or found.get("offset_gaps"):
            raise RunError(f"not every message was consumed in order: {line}")
        return {"messages": found["got"], "rate": found["msgs_per_s"]}
    raise RunError(f"no result: {text.strip()[-400:]}")


# Our own clients


def run_load(broker: str, *words: object) -> dict[str, Any]:
    """Runs load.py once against a broker."""
    return read_load(output_of([sys.executable, "-m", "bench.load", "--broker", broker, *words]))


def run_sdk(name_server: str, mode: str, *words: object) -> dict[str, Any]:
    """Runs sdk_load.py once."""
    return read_load(output_of([sys.executable, "-m", "bench.sdk_load", mode, "--name-server", name_server, *words]))


def read_load(text: str) -> dict[str, Any]:
    """Parses the line of load.py or sdk_load.py. Raises RunError if a slave did not acknowledge every message."""
    run = json.loads(text.splitlines()[-1])
    outcomes = run.get("codes") or run.get("statuses") or {}
    if outcomes.keys() - {"0", "SEND_OK"}:
        raise RunError(f"not every message was acknowledged by the slave: {outcomes}")
    return {"messages": run["n_all"], "rate": run["rate"]} | {
        f"{name}_ms": run[f"{name}_us"] / 1e3 for name in ("p50", "p99", "p999", "max", "gap") if f"{name}_us" in run
    }


# The peers' own harness


def read_harness(lines: Iterable[str]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Parses runs as peers/harness.py writes them: name, messages in flight, figures."""
    found = []
    for run in map(json.loads, lines):
        figures = {
            "messages": run["n_all"],
            "rate": run["rate"],
            "p50_ms": run["p50_us"] / 1e3,
            "p99_ms": run["p99_us"] / 1e3,
            "cpu_us": run["server_us"],
            "client_us": run["client_us"],
            "foreign_cores": max(0.0, run["foreign_cores"]),
        }
        found.append((run["name"], run["conc"], figures))
    return found


def read_catch_up(text: str) -> list[dict[str, Any]]:
    """Parses the "# catch-up …: {…}" and "# resync {…}" lines of peers' benchmarks, without warm-up rounds.

    Peers measure until the bytes are copied; they have no queues to build. Raises RunError if there is no such line.
    """
    found = []
    for line in text.splitlines():
        match = re.match(r"# (?:catch-up|resync) (?!.*\(warm-up\))[^{]*(\{.*\})$", line)
        if match:
            run = ast.literal_eval(match[1])
            figures = {"seconds": run["secs"], "mb_per_s": run["MBps"], "added": run.get("replicas_added", 1)}
            if "foreign_cores" in run:
                figures["foreign_cores"] = max(0.0, run["foreign_cores"])
            found.append(figures)
    if not found:
        raise RunError(f"no catch-up: {text.strip()[-400:]}")
    return found


# Runtime information of halog and RocketMQ: the end of a broker's log, and how far its queues are built


def ask(broker: str, code: int, body: bytes = b"", timeout_s: float = 5.0) -> bytes:
    """Returns the body of a broker's response to a request without fields. Raises OSError if the broker does not
    respond, or rejects the request."""
    fields = {"code": code, "flag": 0, "language": "OTHER", "opaque": 1, "version": 0}
    header = json.dumps(fields, separators=(",", ":")).encode()
    host, port = broker.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        connection.sendall(struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body)
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            chunk = connection.recv(1 << 16)
            if not chunk:
                raise ConnectionError(f"{broker} closed the connection")
            data += chunk
    header_end = 8 + (int.from_bytes(data[4:8], "big") & 0xFFFFFF)
    if json.loads(data[8:header_end])["code"]:
        raise ConnectionError(f"{broker} rejected request {code}: {data[8:header_end]!r}")
    return data[header_end:]


def runtime_info(broker: str) -> Mapping[str, str]:
    """Returns a broker's runtime information. Raises OSError while it does not respond."""
    table: dict[str, str] = json.loads(ask(broker, _GET_BROKER_RUNTIME_INFO))["table"]
    return table


def log_end(broker: str) -> int:
    """Returns the end of a broker's commitlog in bytes."""
    return int(runtime_info(broker)["commitLogMaxOffset"])


def watch_catch_up(slave: str, target: int, *, limit_s: float = 600, poll_s: float = 0.02) -> dict[str, Any]:
    """Watches a starting slave until its log ends at `target` and its queues are built up to there. The measurement
    begins at the last query before its log grows. Raises RunError after `limit_s`, and if the log is too short.
    """
    started = time.monotonic()
    began = first = reached = None
    curve: list[tuple[float, int]] = []
    while time.monotonic() - started < limit_s:
        try:
            table = runtime_info(slave)
        except OSError:  # it is still starting
            time.sleep(poll_s)
            continue
        now, end = time.monotonic(), max(0, int(table["commitLogMaxOffset"]))
        least = max(0, int(table["commitLogMinOffset"]))
        if first is None or began is None or end <= first:
            began, first, curve = now, max(end, least), [(0.0, 0)]
        if now - began - curve[-1][0] >= _CURVE_STEP_S or (end >= target and reached is None):
            curve.append((round(now - began, 3), end - first))
        if end >= target and reached is None:
            reached = now
        if reached is not None and table["dispatchBehindBytes"] == "0":
            if reached == began:
                raise RunError("the slave had the whole log at the first query: the log is too short")
            size = target - first
            return {
                "bytes": size,
                "seconds": reached - began,
                "mb_per_s": size / 1e6 / (reached - began),
                "queues_mb_per_s": size / 1e6 / (now - began),
                "curve": curve,
            }
        time.sleep(poll_s)
    raise RunError(f"after {limit_s:g} s the slave has {curve[-1][1] if curve else 0:,} of {target:,} bytes")

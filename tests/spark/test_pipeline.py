"""The example of a declarative pipeline, run by `spark-pipelines` against a broker."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pyarrow.dataset
import pytest

from ha.client import Message, Producer, PullConsumer
from tests.spark.clusters import running_broker

pytestmark = [pytest.mark.spark, pytest.mark.spark_versions, pytest.mark.processes]

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline"
Flight = tuple[str, int, float | None]

FLIGHTS: list[Flight] = [("AA", 6, 5.0), ("AA", 7, 75.0), ("UA", 7, 0.0), ("UA", 8, 120.0), ("DL", 9, None)]
MORE: list[Flight] = [("AA", 10, 10.0), ("DL", 11, 61.0)]


def project(folder: Path, servers: str) -> Path:
    """A copy of the example with this broker and a storage of its own."""
    copy = folder / "pipeline"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    spec = copy / "spark-pipeline.yml"
    text = spec.read_text()
    assert "file:///tmp/halog-pipeline" in text
    assert "127.0.0.1:9876" in text
    text = text.replace("file:///tmp/halog-pipeline", f"file://{folder}/storage").replace("127.0.0.1:9876", servers)
    spec.write_text(text)
    return copy


def run_pipeline(folder: Path) -> None:
    [command] = [
        line for line in (EXAMPLE / "spark-pipeline.yml").read_text().splitlines() if "spark-pipelines run" in line
    ]
    words = command.partition(": ")[2].split()
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [programs / words[0], *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def rows(folder: Path, table: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = pyarrow.dataset.dataset(folder / "spark-warehouse" / table).to_table().to_pylist()
    return found


async def send(servers: str, flights: list[Flight], *bodies: bytes) -> None:
    async with Producer(servers) as producer:
        for carrier, hour, delay in flights:
            body = json.dumps({"carrier": carrier, "hour": hour, "dep_delay": delay}).encode()
            await producer.send(Message("flights", body, keys=(f"{carrier}{hour}",)))
        for body in bodies:
            await producer.send(Message("flights", body))


async def late(servers: str) -> list[tuple[str, int, float]]:
    found = []
    async with PullConsumer(servers) as pull:
        for queue in await pull.queues("late-flights"):
            found += (await pull.pull(queue, 0)).messages
    return sorted((each["carrier"], each["hour"], each["dep_delay"]) for each in (json.loads(m.body) for m in found))


def test_topic_to_tables_and_to_a_topic(tmp_path: Path) -> None:
    with running_broker(tmp_path) as servers:
        folder = project(tmp_path, servers)
        anyio.run(send, servers, FLIGHTS, b"not JSON")
        run_pipeline(folder)
        assert len(rows(folder, "flights_bronze")) == 6
        assert sorted(str(row["carrier"]) for row in rows(folder, "flights_silver")) == [
            "AA",
            "AA",
            "DL",
            "None",
            "UA",
            "UA",
        ]
        assert {row["carrier"]: (row["flights"], row["delay"]) for row in rows(folder, "delays_gold")} == {
            "AA": (2, 40.0),
            "UA": (2, 60.0),
            "DL": (1, None),
        }
        assert anyio.run(late, servers) == [("AA", 7, 75.0), ("UA", 8, 120.0)]
        anyio.run(send, servers, MORE)
        run_pipeline(folder)
        assert len(rows(folder, "flights_bronze")) == 8
        assert {row["carrier"]: row["flights"] for row in rows(folder, "delays_gold")} == {"AA": 3, "UA": 2, "DL": 2}
        assert anyio.run(late, servers) == [("AA", 7, 75.0), ("DL", 11, 61.0), ("UA", 8, 120.0)]

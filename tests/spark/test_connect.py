"""The data source through Spark Connect: client and server are another process's, as one process has one Spark."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.clusters import running_broker
from tests.spark.stores import make_store, message

pytestmark = [pytest.mark.processes, pytest.mark.spark, pytest.mark.spark_versions]
ROOT = Path(__file__).parents[2]


def test_source_stream_and_sink_work_through_connect(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [message(n) for n in range(600)])
    with running_broker(tmp_path) as servers:
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.connect_query", str(store), servers, str(tmp_path / "checkpoint")],
            cwd=ROOT,
            # SPARK_TESTING: the server takes a free port instead of 15002.
            env={**os.environ, "SPARK_TESTING": "1", "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    filtered = sum(n % 4 == 1 and n % 3 == 1 for n in range(600))
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "batch": 600,
        "filtered": filtered,
        "stream": 600,
        "sink": 600,
    }

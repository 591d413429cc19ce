"""The source and the jobs give the same results on a cluster as in one process.

Each cluster runs in separate processes, as for a user: executors import `ha` from this interpreter's location, and
share only the file system with the driver.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark.sql import SparkSession

from scripts.spark_memory import measure
from scripts.spark_standalone import spark_environment, standalone_cluster
from scripts.sparse_store import SparseStore, write_sparse_store
from tests.spark.derived_stores import write_store
from tests.spark.scale_jobs import run_jobs

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scale") / "store"
    trio.run(partial(write_store, root, 2000, index_entry_count=2000))
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "consumerOffset.json").write_text('{"offsetTable":{"flights@g":{0:5,1:6},"delays@g":{2:1}}}')
    return root


@pytest.fixture(scope="module")
def local_results(spark: SparkSession, store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(json.dumps(run_jobs(spark, store, tmp_path_factory.mktemp("local"))))
    return results


@pytest.fixture(params=["local-cluster", pytest.param("standalone", marks=pytest.mark.long)])
def master(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "standalone":
            yield stack.enter_context(standalone_cluster(tmp_path / "cluster"))
        else:
            yield "local-cluster[2,1,1024]"


def test_a_cluster_gives_the_same(master: str, store: Path, local_results: dict[str, Any], tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.spark.scale_jobs", master, str(store), str(tmp_path)],
        cwd=tmp_path,
        env={**spark_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results.pop("hosts") == 3
    assert results.keys() == local_results.keys()
    for name, result in local_results.items():
        assert results[name] == result, name
    assert results["batch"][0] > 800
    assert results["batch"] == results["stream"]
    assert results["archive"][0] >= results["batch"][0]


@pytest.mark.long
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """2 GiB of log; scripts/spark-memory does the same with 20. See docs/spark-scale.md for measurements."""
    wanted = SparseStore(tmp_path / "store", 8, 256 << 20, body_bytes=(64 << 10, 64 << 10, 64 << 10, 4096))
    written = write_sparse_store(wanted)
    jobs = ["reindex", "batch", "archive"]
    measured = list(measure(tmp_path / "store", tmp_path, jobs, memory_mb=2048, heap_mb=512, together=True))
    assert [found.job for found in measured] == jobs
    assert measured[0].said.startswith(f"{written.record_count} records")
    assert measured[2].said.startswith(f"{written.record_count} rows")
    for found in measured:
        assert 50 < found.peaks.python_worker < 768, found
        assert found.peaks.python_worker < found.peaks.executor < 1536, found
        assert found.peaks.driver_python < 256, found

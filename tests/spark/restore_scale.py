"""Memory and time of `restore`: a large log sent into a broker, from a store or from an archive of it.

    nice -n 19 python -m tests.spark.restore_scale --gib 20 --directory DIR [--source store|archive]

Like scripts/spark-memory for the other jobs: a sparse synthetic log of one topic, two executors of 2 GiB, sampled from
/proc. The broker deletes its oldest segments continuously, so its disk need not hold the restored log. The end of its
log shows that everything has arrived. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts import spark_memory
from scripts.process_memory import Watch
from scripts.spark_standalone import spark_environment
from scripts.sparse_store import SparseStore, write_sparse_store
from tests.load.footprint import cpu_s
from tests.node.processes import Process
from tests.scenarios.brokers import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "flights"
MEMORY_MB, HEAP_MB = 2048, 1024
_BROKER: dict[str, Any] = {
    "mappedFileSizeCommitLog": 256 << 20,
    "mappedFileSizeConsumeQueue": 20 * 300_000,
    "brokerName": "broker-t",
    "flushDiskType": "ASYNC_FLUSH",
    "messageIndexEnable": "false",
    "diskSpaceCleanForciblyRatio": 1,
    "diskSpaceWarningLevelRatio": 99,
}


def _restore(spark: SparkSession, store: Path, folder: Path) -> str:
    from ha.spark.jobs.restore import RestoreOptions, restore

    place = {"archive": str(folder / "archive")} if (folder / "archive").exists() else {"path": str(store)}
    options = RestoreOptions(
        topic=TOPIC,
        servers=(folder / "servers").read_text(),
        state=str(folder / "replay.json"),
        **place,  # type: ignore[arg-type]
    )
    result = restore(spark, options)
    return f"{result.sent} of {result.rows} messages sent, {sum(q.body_bytes for q in result.queues)} bytes of bodies"


def _archive(spark: SparkSession, store: Path, folder: Path) -> str:
    from ha.spark.jobs.archive import ArchiveOptions, archive

    return f"{archive(spark, ArchiveOptions(path=str(store), archive=str(folder / 'archive'))).rows} rows"


def _run(job: str, store: Path, folder: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.spark.restore_scale", "--child", job, "--directory", str(folder)]
    with (folder / f"{job}.log").open("wb") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=spark_environment())
    assert child.stdout is not None
    watch, found = Watch(child.pid), {}
    for line in child.stdout:
        word, _, rest = line.partition(" ")
        if word == "BEGIN":
            watch.restart()
        elif word == "END":
            found = {**json.loads(rest), "peaks": vars(watch.peaks)}
    watch.close()
    child.stdout.close()
    assert child.wait() == 0, (folder / f"{job}.log").read_text()[-3000:]
    return found


def _peak_mib(pid: int, name: str) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of restore over a large log.")
    parser.add_argument("--gib", type=int, default=20)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--source", choices=["store", "archive"], default="store")
    parser.add_argument("--child", choices=["archive", "reindex", "restore"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder: Path = options.directory
    store = folder / "store"
    if options.child:
        spark_memory.JOBS.update(archive=_archive, restore=_restore)
        spark_memory._child([options.child], store, folder, MEMORY_MB, HEAP_MB)
        return
    if not store.exists():
        written = write_sparse_store(SparseStore(store, options.gib, topics=(TOPIC,)))
        print(json.dumps({"records": written.record_count, "end": written.end}), flush=True)
        print(json.dumps(_run("reindex", store, folder)), flush=True)
    if options.source == "archive" and not (folder / "archive").exists():
        print(json.dumps(_run("archive", store, folder)), flush=True)
    shutil.rmtree(folder / "broker", ignore_errors=True)
    (folder / "replay.json").unlink(missing_ok=True)
    with ExitStack() as stack:
        names = stack.enter_context(Process("ha.namesrv", "--set", "listenPort=0", directory=folder))
        address = names.wait_ready()["remoting"]
        (folder / "servers").write_text(address)
        broker = stack.enter_context(Broker(folder / "broker", "ASYNC_MASTER", namesrvAddr=address, **_BROKER).start())
        found = _run("restore", store, folder)
        log = broker.status()["commitlog"]
        print(json.dumps({**found, "broker": {"end": log["max_offset"], "begin": log["min_offset"],
            "cpu_s": cpu_s(broker.pid), "peak_own_mib": _peak_mib(broker.pid, "RssAnon"),
            "peak_resident_mib": _peak_mib(broker.pid, "VmHWM")}}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

"""A job that is killed after KILL_AT bytes, or ends and prints its result as JSON.

python -m tests.spark.finished_job JOB FOLDER KILL_AT STORE ...      KILL_AT -1: never
"""

import os
import signal
import sys

import msgspec

from ha.spark.jobs.audit.job import AuditOptions, audit
from ha.spark.jobs.stats.job import StatsOptions, stats
from ha.spark.session import open_session

RANGE_BYTES = 1 << 16


def main() -> None:
    job, folder, kill_at, stores = sys.argv[1], sys.argv[2], int(sys.argv[3]), tuple(sys.argv[4:])

    def progress(stage: str, done: int, total: int) -> None:
        if 0 < kill_at <= done and stage in ("compare", "count"):
            os.kill(os.getpid(), signal.SIGKILL)

    with open_session("killed", "local[2]", {}) as spark:
        if job == "audit":
            asked = AuditOptions(paths=stores, range_bytes=RANGE_BYTES, unfinished=folder)
            found: msgspec.Struct = audit(spark, asked, progress)
        else:
            found = stats(spark, StatsOptions(path=stores[0], range_bytes=RANGE_BYTES, unfinished=folder), progress)
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()

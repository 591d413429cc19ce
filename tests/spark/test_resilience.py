"""Streaming queries from a log into a Delta table, through faults of a slave and of the query itself.

The table must have every record once, according to the broker's answers and the log read with the plain codec.
"""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ha.spark import HalogDataSource
from ha.spark.jobs.archive.delta import delta_session
from tests.interop.stored_files import segments
from tests.scenarios.brokers import Broker, eventually, slave_of, wait_caught_up, wait_in_sync
from tests.scenarios.producing import STORED_CODES, Client, Load
from tests.scenarios.test_out_of_range import expire, forgetful_master, roll
from tests.spark.resilience_query import (
    AFTER_COMMIT,
    BETWEEN_COMMITS,
    HOLD_S_MAX,
    SMALL_BATCHES,
    STAGES,
    Places,
    short_lived,
    start_into_delta,
)
from tests.spark.sessions import kill_session
from tests.spark.stores import live_store, message, records_of
from tests.spark.test_archive_spark import skip_without_delta

pytestmark = [pytest.mark.processes, pytest.mark.spark]
ROOT = Path(__file__).parents[2]
WAIT_S = 120.0

Row = tuple[str, int, int, bytes]
"""topic, queueId, queueOffset, body"""
Positions = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    skip_without_delta(spark)
    found = short_lived(delta_session(spark))
    found.dataSource.register(HalogDataSource)
    return found


def rows_in(session: SparkSession, table: Path) -> list[Row]:
    found = session.read.format("delta").load(str(table)).collect()
    return sorted((row.topic, row.queueId, row.queueOffset, bytes(row.body)) for row in found)


def rows_stored(store: Path) -> list[Row]:
    return sorted((each.topic, each.queue_id, each.queue_offset, bytes(each.body)) for each in records_of(store))


def positions(query: StreamingQuery) -> Positions:
    """The offsets up to which finished batches have read. Raises the error that ended the query."""
    error = query.exception()
    if error is not None:
        raise error
    progress = query.lastProgress
    if progress is None:
        return {}
    found = json.loads(progress.sources[0].endOffset or "{}")
    return {topic: queues for topic, queues in found.items() if not topic.startswith("$")}


def read_count(query: StreamingQuery) -> int:
    return sum(sum(queues.values()) for queues in positions(query).values())


def ends_of(rows: list[Row]) -> Positions:
    ends: Positions = {}
    for topic, queue_id, queue_offset, _ in rows:
        ends.setdefault(topic, {})[str(queue_id)] = queue_offset + 1
    return ends


@contextmanager
def running(*queries: StreamingQuery) -> Iterator[None]:
    try:
        yield
    finally:
        for query in queries:
            query.stop()


def test_query_survives_restarts_of_its_slave(session: SparkSession, tmp_path: Path) -> None:
    """The slave is stopped and killed while a producer sends and the query runs; segments roll; a topic comes later."""
    table = tmp_path / "table"
    with (
        Broker(tmp_path / "m", "SYNC_MASTER") as master,
        slave_of(master.start(), tmp_path / "s") as slave,
        Client(master.addresses["remoting"]) as client,
    ):
        slave.start()
        wait_in_sync(master)
        load = Load(master.addresses["remoting"], 0, random.Random(4), window=1)
        load.wait_answers(1)
        eventually("the slave has a queue", lambda: (slave.root / "consumequeue" / "flights" / "0").exists())
        query = start_into_delta(
            session,
            "halog",
            slave.root,
            table,
            tmp_path / "checkpoint",
            once=False,
            subscribePattern="flights|later",
        )
        with running(query):

            def wait_until_read(count: int) -> None:
                eventually(f"{count} are read", lambda: read_count(query) >= count, WAIT_S)

            wait_until_read(1)
            for end_slave in (slave.stop, slave.kill):
                end_slave()
                load.wait_answers(len(load.answers) + 200)  # which the slave has to fetch
                slave.start()
                load.wait_answers(len(load.answers) + 200)
                wait_until_read(len(load.answers))
            answers = load.stop()
            later = [client.send(number, topic="later") for number in range(10**6, 10**6 + 20)]
            wait_until_read(len(answers) + len(later))
        rolled = len(segments(slave.commitlog))
    assert all(answer.code in STORED_CODES for answer in answers + later)
    expected = [("flights", each) for each in answers] + [("later", each) for each in later]
    found = [(topic, number, offset, int(body[:10])) for topic, number, offset, body in rows_in(session, table)]
    assert found == sorted((topic, each.queue_id, each.queue_offset, each.sequence) for topic, each in expected)
    assert rolled > 2


def test_query_continues_after_resync_or_reports_loss(session: SparkSession, tmp_path: Path) -> None:
    """The slave comes back after its master has deleted the segments it lacks, sets its log aside and starts over."""
    with (
        forgetful_master(tmp_path / "m") as master,
        slave_of(master, tmp_path / "s", haOutOfRange="resync") as slave,
        Client(master.addresses["remoting"]) as client,
    ):
        slave.start()
        wait_in_sync(master)
        roll(client, 0, 2)
        wait_caught_up(slave, master)
        before = rows_stored(slave.root)
        lenient, strict = (
            start_into_delta(
                session,
                "halog",
                slave.root,
                tmp_path / f"table-{fails}",
                tmp_path / f"checkpoint-{fails}",
                once=False,
                subscribe="flights",
                failOnDataLoss=fails,
            )
            for fails in ("false", "true")
        )
        with running(lenient, strict):
            eventually("the old log is read", lambda: positions(lenient) == ends_of(before), WAIT_S)
            eventually("the old log is read", lambda: positions(strict) == ends_of(before), WAIT_S)
            slave.stop()
            roll(client, 1000, 5)
            expire(master, keep=3)
            slave.start()
            wait_in_sync(master)
            wait_caught_up(slave, master)
            assert (slave.root / "commitlog.aside-1").exists()
            with pytest.raises(
                StreamingQueryException,
                match=r"RecordsGone: flights queue \d of broker-a: offsets \d+ to \d+ are gone: ",
            ):
                strict.awaitTermination(int(WAIT_S))
            client.send_all(range(2000, 2020))
            wait_caught_up(slave, master)
            after = rows_stored(slave.root)
            eventually("the new log is read", lambda: positions(lenient) == ends_of(after), WAIT_S)
        lost = set(range(1000, 2000)) - {int(body[:10]) for *_, body in after}
        assert lost, "the master kept all"
        assert rows_in(session, tmp_path / "table-false") == sorted(before + after)
        assert rows_in(session, tmp_path / "table-true") == before


class KilledQueries:
    """`tests.spark.resilience_query` with all its processes."""

    def __init__(self, path: Path, directory: Path) -> None:
        self.log_file = directory / "queries.log"
        command = [sys.executable, "-m", "tests.spark.resilience_query", str(path), str(directory)]
        with self.log_file.open("w") as log:
            # Unbuffered, so that a line that was read with the one before can't be missed.
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, start_new_session=True, bufsize=0
            )

    def __enter__(self) -> KilledQueries:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # waits for it, and closes the pipe
            kill_session(self._process)

    def wait_for_stages(self) -> None:
        """Waits until a query is blocked in each stage. AssertionError with their log if they end before."""
        told = self._process.stdout
        assert told is not None
        give_up = time.monotonic() + HOLD_S_MAX
        for stage in STAGES:
            ready, *_ = select.select([told], [], [], max(0.0, give_up - time.monotonic()))
            assert ready, f"not within {HOLD_S_MAX} s: {stage}"
            line = told.readline()
            assert line == f"{stage}\n".encode(), f"{line!r} instead of {stage}: {self.log_file.read_text()[-4000:]}"


def test_queries_that_are_killed_at_each_stage_of_a_batch(session: SparkSession, tmp_path: Path) -> None:
    """SIGKILL to driver, JVM and workers; then the log grows, and the queries continue in another Spark.

    The query between the two commits of a batch has ended on its own: it can't be blocked there.
    """
    path = tmp_path / "broker-a"
    every = {stage: Places(tmp_path, stage) for stage in STAGES}
    with live_store(path) as live:
        live.put([message(n) for n in range(900)])
        with KilledQueries(path, tmp_path) as queries:
            queries.wait_for_stages()
        for stage, places in every.items():
            in_delta = stage in {BETWEEN_COMMITS, AFTER_COMMIT}
            assert places.is_planned(1)
            assert places.is_finished(1) == (stage == AFTER_COMMIT)
            assert places.version_count() == 1 + in_delta
        live.put([message(n, queue_id=n % 2) for n in range(900, 1100)])
        live.put([message(n, topic="later", queue_id=2) for n in range(1100, 1200)])
        for places in every.values():  # one at a time: Spark gives the Python processes of a query 10 s to connect
            table, checkpoint = places.table, places.checkpoint
            for tries_left in (2, 1, 0):
                again = start_into_delta(session, "halog", path, table, checkpoint, once=True, **SMALL_BATCHES)
                try:
                    with running(again):
                        assert again.awaitTermination(int(WAIT_S))
                    break
                except StreamingQueryException as error:
                    if not tries_left or "failed to connect back" not in str(error):
                        raise
        expected = rows_stored(path)
        assert len(expected) == 1200
        for stage, places in every.items():
            assert rows_in(session, places.table) == expected, stage

"""Parses the output of clients and peers; samples are from real runs."""

import sys

import pytest

from bench.clients import RunError, output_of, read_bench, read_catch_up, read_harness, read_load
from bench.sides import check_waits_for_slave

SINGLE = (
    "produce-sync n=40000 size=1024 batch=1 conc=16 secs=7.068 msgs_per_s=5659 MiB_per_s=5.53 p50_ms=2.018 "
    "p99_ms=17.821 p999_ms=71.955 max_ms=114.477 statuses={SEND_OK=40000}\n"
)
BATCH = (
    "produce-batch n=448000 size=1024 batch=32 conc=4 secs=13.688 msgs_per_s=32730 MiB_per_s=31.96 p50_ms=1.797 "
    "p99_ms=37.383 p999_ms=117.660 max_ms=242.879 statuses={SEND_OK=14000}\n"
)
PULL = "consume queues=4 maxNums=32 got=1000096 pulls=31253 offset_gaps=0 secs=9.572 msgs_per_s=104484 MiB_per_s=102.04"
PUSH = (
    "consume-push complete=true pullBatch=32 got=1000096 start_delay_ms=578 secs=9.942 msgs_per_s=100597 "
    "MiB_per_s=98.24\n"
)
LOAD = (
    '{"n": 34501, "secs": 2.000489374004246, "n_all": 50564, "rate": 17246.28005943448, "p50_us": 47604.931, "p99_us": '
    '191997.993, "p999_us": 216042.444, "max_us": 216042.444, "client_us": 4.88, "codes": {"0": 50564}, '
    '"connections": 64, "in_flight": 1024, "size": 1024}\n'
)
HARNESS = (
    '{"n": 9000, "secs": 1.0, "n_all": 12000, "p50_us": 1500.0, "p99_us": 9100.0, "p999_us": 12000.0, '
    '"max_us": 17000.0, "wall": 1.9, "server_cpu_s": 0.612, "client_cpu_s": 0.09, "busy_cores": 0.36, '
    '"foreign_cores": -0.01, "steal_s": 0.0, "rate": 9000.0, "server_us": 51.0, "client_us": 7.5, '
    '"name": "Go, a connection each", "conc": 16, "round": 0}\n'
)
KAFKA_CATCH_UP = """\
# catch-up 0 (warm-up): {'n': 67646748, 'secs': 1.0, 'MBps': 67.6, 'busy_cores': 1.9}
# catch-up 1: {'n': 67646748, 'secs': 0.25, 'MBps': 270.5, 'server_cpu_s_per_GiB': 4.1, 'busy_cores': 1.9}

| catch-up | MB/s | server CPU s/GiB | server cores | machine cores |
"""
REDIS_RESYNC = "| case |\n# resync {'n': 65536, 'secs': 0.52, 'MBps': 129.1}\n"
NATS_CATCH_UP = """\
# catch-up {'n': 65536, 'secs': 0.5, 'MBps': 139.5, 'replicas_added': 1, 'n_all': 65536, 'foreign_cores': 0.21}
| R1 scaled to R2, 1 new replica(s) | 139 (139-139) |
# catch-up failed [...] exited 1: timeout
"""


def test_runs_of_the_java_client() -> None:
    latencies = {"p50_ms": 2.018, "p99_ms": 17.821, "p999_ms": 71.955, "max_ms": 114.477}
    assert read_bench("a warning of the JVM\n" + SINGLE) == {"messages": 40_000, "rate": 5659, **latencies}
    assert read_bench(BATCH)["messages"] == 448_000
    assert read_bench(PULL) == {"messages": 1_000_096, "rate": 104_484}
    assert read_bench(PUSH)["rate"] == 100_597


@pytest.mark.parametrize(
    "text",
    [
        SINGLE.replace("SEND_OK=40000", "FLUSH_SLAVE_TIMEOUT=3, SEND_OK=39997"),
        BATCH.replace("=14000}", "=13999}"),
        PULL.replace("gaps=0", "gaps=2"),
        PUSH.replace("complete=true", "complete=false"),
        "Exception in thread main\n",
        "",
    ],
)
def test_incomplete_runs_of_the_java_client_are_rejected(text: str) -> None:
    with pytest.raises(RunError):
        read_bench(text)


def test_load_generator() -> None:
    found = read_load(LOAD)
    assert (found["messages"], round(found["rate"]), round(found["p99_ms"], 1)) == (50_564, 17_246, 192.0)
    with pytest.raises(RunError, match="12"):
        read_load(LOAD.replace('{"0": 50564}', '{"0": 50563, "12": 1}'))
    with pytest.raises(RunError, match="FLUSH"):
        read_load(LOAD.replace('"codes": {"0": 50564}', '"statuses": {"SEND_OK": 9, "FLUSH_SLAVE_TIMEOUT": 1}'))


def test_harness_of_the_peers() -> None:
    figures = {"messages": 12_000, "rate": 9_000.0, "p50_ms": 1.5, "p99_ms": 9.1}
    costs = {"cpu_us": 51.0, "client_us": 7.5, "foreign_cores": 0.0}
    assert read_harness([HARNESS]) == [("Go, a connection each", 16, figures | costs)]


def test_catch_up_of_the_peers() -> None:
    assert [found["mb_per_s"] for found in read_catch_up(KAFKA_CATCH_UP)] == [270.5]  # without the warm-up
    assert [found["mb_per_s"] for found in read_catch_up(REDIS_RESYNC)] == [129.1]
    assert [(found["added"], found["foreign_cores"]) for found in read_catch_up(NATS_CATCH_UP)] == [(1, 0.21)]
    with pytest.raises(RunError):
        read_catch_up("# catch-up failed\n")


SLEEPS = "import time; print('Exception in thread main', flush=True); time.sleep(600)"


def test_hanging_commands_are_ended() -> None:
    with pytest.raises(RunError, match="ended with -9: Exception in thread"):
        output_of([sys.executable, "-c", SLEEPS], hopeless="Exception in thread")
    with pytest.raises(RunError, match=r"did not end within 0.5 s"):
        output_of([sys.executable, "-c", SLEEPS], timeout_s=0.5)
    assert output_of([sys.executable, "-c", "print('done')"], timeout_s=600) == "done\n"


FOUND = "brokerName=broker-a\nbrokerRole=SYNC_MASTER\nflushDiskType=ASYNC_FLUSH\ninSyncReplicas=2\n"


def test_rocketmq_that_waits_for_its_slave() -> None:
    check_waits_for_slave("5.5.0", FOUND)
    check_waits_for_slave("4.9.7", FOUND.replace("inSyncReplicas=2\n", ""))


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("5.5.0", FOUND.replace("inSyncReplicas=2", "inSyncReplicas=1")),
        ("5.5.0", FOUND.replace("inSyncReplicas=2\n", "")),
        ("4.9.7", FOUND.replace("SYNC_MASTER", "ASYNC_MASTER")),
        ("4.9.7", FOUND.replace("ASYNC_FLUSH", "SYNC_FLUSH")),
        ("4.9.7", ""),
    ],
)
def test_rocketmq_that_does_not_wait_is_rejected(version: str, told: str) -> None:
    with pytest.raises(RunError, match="does not wait for its slave"):
        check_waits_for_slave(version, told)

"""`ha topic`, `ha group`, `ha offsets` and `ha bench` against a real master."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from ha.cli import run
from ha.cli.bench import Latencies, figure
from ha.cli.broker import _topics_of
from ha.client import Admin
from ha.errors import BrokerError
from ha.protocol.codes import ResponseCode
from tests.cli.cluster import Cluster, cluster, status_of, wait_until
from tests.cli.conftest import OneBroker

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("master")) as started:
        started.master()
        yield started


class Ha:
    """Runs commands on that cluster."""

    def __init__(self, nodes: Cluster, capture: pytest.CaptureFixture[str]) -> None:
        self.nodes = nodes
        self._capture = capture
        self.err = ""

    def text(self, *words: str, code: int = 0) -> str:
        found = run([*words, "--servers", self.nodes.name_server])
        captured = self._capture.readouterr()
        self.err = captured.err
        assert found == code, captured
        return captured.out

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.text(*words, "--json", code=code))


@pytest.fixture
def ha(nodes: Cluster, capsys: pytest.CaptureFixture[str]) -> Ha:
    return Ha(nodes, capsys)


def test_a_topic_is_made_described_changed_and_deleted(ha: Ha) -> None:
    assert "orders: 2 queues on " in ha.text("topic", "create", "orders", "--queues", "2")
    assert "orders" in ha.text("topic", "list").split()
    assert ha.text("produce", "orders", "--body", "x", "--count", "10") == ""
    found = ha.json("topic", "describe", "orders")
    assert (found["message_count"], found["groups"], len(found["queues"])) == (10, [], 2)
    assert all(queue["last_stored_ms"] > 0 for queue in found["queues"] if queue["max_offset"])
    assert "10 messages; consumed by no group" in ha.text("topic", "describe", "orders")
    ha.json("topic", "create", "orders", "--queues", "4")
    assert len(ha.json("topic", "describe", "orders")["queues"]) == 4
    for changes, permission in ((["--permission", "r"], "r"), ([], "r"), (["--permission", "rw"], "rw")):
        [created] = ha.json("topic", "create", "orders", *changes)["brokers"]
        assert (created["queues"], created["permission"]) == (4, permission), "what is not given stays"
    assert "orders: 1 queues (consumers read 4) on " in ha.text("topic", "create", "orders", "--queues", "1")
    assert len(ha.json("topic", "describe", "orders")["queues"]) == 4, "the others may have unread messages"
    told = ha.text("topic", "delete", "orders")
    assert "would be deleted: 10 messages" in told
    assert "bytes stay in the brokers' log files, where clients can't read them, until retention deletes" in told
    assert "nothing was changed; use --yes to apply" in ha.err
    assert "orders" in ha.json("topic", "list")
    assert ha.json("topic", "delete", "orders", "--yes")["is_done"]
    assert "orders" not in ha.json("topic", "list")
    for words in (
        ("topic", "describe", "orders"),
        ("topic", "delete", "orders"),
        ("consume", "orders"),
        ("consume", "orders", "--group", "billing"),
        ("offsets", "show", "billing", "--topic", "orders"),
        ("offsets", "reset", "billing", "orders", "--to", "first"),
    ):
        ha.text(*words, code=2)
        assert ha.err == "ha: no topic orders; ha topic list shows the topics, ha topic create adds one\n", words


@pytest.mark.parametrize(
    "words",
    [
        ["group", "describe", "nope"],
        ["group", "delete", "nope"],
        ["offsets", "show", "nope"],
        ["offsets", "show", "nope", "--topic", "SELF_TEST_TOPIC"],
        ["offsets", "reset", "nope", "SELF_TEST_TOPIC", "--to", "first"],
    ],
    ids=" ".join,
)
def test_missing_group_is_a_usage_error(ha: Ha, words: list[str]) -> None:
    ha.text(*words, code=2)
    assert ha.err == "ha: no consumer group nope; ha group list shows the groups, ha group create adds one\n"


def test_an_error_of_a_broker_is_no_group_without_lag(ha: Ha, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the group's topics have more queues than one response may have."""

    async def fail(_: Admin, group: str, topic: str | None = None, **broker_names: object) -> None:
        raise BrokerError("127.0.0.1:10911", ResponseCode.SYSTEM_ERROR, "more than 50000 queues")

    ha.text("group", "create", "wide")
    monkeypatch.setattr(Admin, "consumer_progress", fail)
    ha.text("offsets", "show", "wide", code=1)
    assert "more than 50000 queues" in ha.err
    with pytest.raises(BrokerError):
        anyio.run(_topics_of, Admin(ha.nodes.name_server), "wide")


def test_group_without_settings_is_known_by_its_offsets(ha: Ha) -> None:
    """As left by a pull consumer: `ha consume --commit` is one."""
    ha.text("topic", "create", "pulled", "--queues", "1")
    ha.text("produce", "pulled", "--body", "x")
    ha.text("consume", "pulled", "--commit")
    assert ha.json("offsets", "show", "halog-cli")["queues"]


def test_system_topics_are_shown_when_they_are_asked_for(ha: Ha) -> None:
    hidden = {"TBW102", "DefaultCluster_REPLY_TOPIC", "DefaultCluster", "rmq_sys_wheel_timer"}
    assert not hidden & set(ha.json("topic", "list"))
    assert hidden <= set(ha.json("topic", "list", "--all"))
    ha.text("group", "create", "TOOLS_CONSUMER")
    assert "TOOLS_CONSUMER" not in ha.json("group", "list")
    assert "TOOLS_CONSUMER" in ha.json("group", "list", "--all")


def test_a_group_is_made_described_and_deleted(ha: Ha) -> None:
    ha.text("topic", "create", "bills", "--queues", "1")
    ha.text("produce", "bills", "--body", "x", "--count", "5")
    [created] = ha.json("group", "create", "billing", "--retries", "3")["brokers"]
    assert (created["retries"], created["consume"]) == (3, True)
    assert f"3 retries on {created['broker']}, disabled" in ha.text("group", "create", "billing", "--no-consume")
    [created] = ha.json("group", "create", "billing", "--no-broadcast")["brokers"]
    assert created["consume"] is False, "what is not given stays"
    [created] = ha.json("group", "create", "billing", "--consume", "--broadcast")["brokers"]
    assert created["retries"] == 3
    assert "billing" in ha.text("group", "list").split()
    ha.text("consume", "bills", "--group", "billing", "--limit", "2")
    found = ha.json("group", "describe", "billing")
    assert (found["retry_max_times"], found["members"], found["message_model"]) == (3, [], None)
    [queue] = [queue for queue in found["progress"]["queues"] if queue["topic"] == "bills"]
    assert (queue["offset"], queue["end"], queue["lag"]) == (2, 5, 3)
    assert "no members" in ha.text("group", "describe", "billing")
    assert ha.json("offsets", "show", "billing", "--topic", "bills")["lag"] == 3
    assert "lag 3 messages" in ha.text("offsets", "show", "billing")
    assert "would be deleted: 0 members, 3 unconsumed messages" in ha.text("group", "delete", "billing")
    assert "billing" in ha.json("group", "list")
    ha.text("group", "delete", "billing", "--yes")
    assert "billing" not in ha.json("group", "list")
    ha.text("group", "describe", "billing", code=2)
    assert "ha group list" in ha.err


def test_offsets_are_reset_after_a_dry_run(ha: Ha) -> None:
    ha.text("topic", "create", "visits", "--queues", "1")
    ha.text("produce", "visits", "--body", "x", "--count", "4")
    ha.text("group", "create", "counting")
    ha.text("consume", "visits", "--group", "counting", "--limit", "4")

    def reset(to: str, *words: str) -> tuple[int, int, bool]:
        told = ha.json("offsets", "reset", "counting", "visits", "--to", to, *words)
        [queue] = told["queues"]
        return queue["before"], queue["after"], told["is_done"]

    def at() -> int:
        [queue] = ha.json("offsets", "show", "counting", "--topic", "visits")["queues"]
        offset: int = queue["offset"]
        return offset

    assert reset("first") == (4, 0, False)
    assert "nothing was changed" in ha.err
    assert at() == 4
    assert reset("first", "--yes") == (4, 0, True)
    assert at() == 0
    assert reset("2000-01-01") == (0, 0, False)
    assert reset("last", "--yes") == (0, 4, True)
    assert at() == 4
    shown = ha.text("offsets", "reset", "counting", "visits", "--to", "first")
    assert "redelivered" in shown
    assert shown.split()[-1] == "4"
    assert reset("1969-12-31", "--yes") == (4, 0, True)  # brokers take a time before 1970 for the end
    assert at() == 0
    for wrong in ("yesterday", "99999999999999999", "9" * 20):
        ha.text("offsets", "reset", "counting", "visits", "--to", wrong, "--yes", code=2)
        assert "accepted are first, last, a time" in ha.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["topic", "create", "T", "--permission", "x"], "accepted are rw, r and w"),
        (["topic", "create", "T", "--queues", "0"], "--queues must be from 1"),
        (["group", "create", "G", "--retries", "-2"], "--retries must be from"),
        (["topic", "list", "--timeout", "0"], "--timeout must be greater than 0"),
        (["bench", "T", "--size", "0"], "must be at least 1"),
        (["bench", "T", "--rate", "0"], "--rate and --seconds must be greater than 0"),
        (["bench", "T", "--rate", "nan"], "--rate and --seconds must be greater than 0"),
    ],
)
def test_usage_errors(ha: Ha, words: list[str], says: str) -> None:
    ha.text(*words, code=2)
    assert says in ha.err


@pytest.mark.parametrize("kind", ["topic", "group"])
def test_a_broker_that_does_not_exist(ha: Ha, kind: str) -> None:
    ha.text(kind, "create", "new", "--broker", "nope", code=2)
    assert ha.err.startswith("ha: no broker nope; known brokers: ")


@pytest.mark.parametrize(
    "words",
    [
        ["topic", "list"],
        ["group", "list"],
        ["offsets", "show", "G"],
        ["bench"],
        ["bench", "--count", "3"],
        ["consume", "T"],
    ],
)
def test_nobody_there(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "-n", "127.0.0.1:1", "--timeout", "1"]) == 69
    assert capsys.readouterr().err == (
        "ha: no name server can be reached (127.0.0.1:1: Connection refused); "
        "start a node (ha master), or use --servers HOST:PORT\n"
    )


# ---- bench


def test_so_many_messages_are_measured(ha: Ha) -> None:
    found = ha.json("bench", "load", "--count", "300", "--size", "100", "--in-flight", "8")
    assert (found["sent"], found["statuses"], found["errors"]) == (300, {"SEND_OK": 300}, {})
    assert (found["size"], found["is_complete"]) == (100, True)
    latency = found["latency_ms"]
    assert 0 < latency["min"] <= latency["p50"] <= latency["p99"] <= latency["max"]
    assert sum(count for _, count in found["histogram"]) == 300
    assert ha.json("topic", "describe", "load")["message_count"] == 300
    assert "300 SEND_OK" in ha.text("bench", "load", "--count", "300", "--batching")


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (0.0204054, "0.0204"), (19.927, "19.9"), (999.9, "1,000"), (12345.6, "12,346")]
)
def test_rates_have_three_significant_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_a_rate_is_not_exceeded_and_the_time_is_kept(ha: Ha) -> None:
    found = ha.json("bench", "load", "--rate", "20", "--seconds", "1")
    assert 1 <= found["sent"] <= 20 * found["duration_s"] + 1
    assert found["is_complete"]


def test_an_interrupted_bench_tells_its_figures(nodes: Cluster) -> None:
    command = [sys.executable, "-m", "ha.cli", "bench", "load", "--seconds", "600", "--json"]
    with subprocess.Popen(
        [*command, "--servers", nodes.name_server], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        wait_for_messages(nodes)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["sent"] > 0
    assert not found["is_complete"]
    assert b"Traceback" not in err


def wait_for_messages(nodes: Cluster) -> None:
    """Until a bench has stored something."""
    before = status_of(nodes.admins[0])["commitlog"]["max_offset"]
    wait_until(lambda: status_of(nodes.admins[0])["commitlog"]["max_offset"] > before)


def test_what_brokers_refuse_is_counted(broker: OneBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.send_code = 1
    broker.send_remark = "no room"
    assert run(["bench", "T", "--count", "4", "--in-flight", "2", "--servers", broker.name_server]) == 1
    assert "no room" in capsys.readouterr().err
    broker.send_code = 11
    assert run(["bench", "T", "--count", "4", "--json", "--servers", broker.name_server]) == 3
    assert json.loads(capsys.readouterr().out)["statuses"] == {"SLAVE_NOT_AVAILABLE": 4}


def test_percentiles_are_right_to_three_percent_in_little_memory() -> None:
    latencies = Latencies()
    for number in range(1, 100_001):
        latencies.add(number / 1e5)
    found = latencies.summary()
    assert found["min"] == 0.01
    assert found["max"] == 1000
    assert found["mean"] == pytest.approx(500, rel=0.001)
    for percent in (50, 90, 99, 99.9):
        assert found[f"p{percent:g}"] == pytest.approx(percent * 10, rel=0.035)
    assert len(latencies._counts) < 700
    assert sum(count for _, count in latencies.doublings()) == 100_000
    assert Latencies().summary() == {}
    assert Latencies().doublings() == []

"""Every snippet of docs/spark.md and the notebooks runs, in order, on a real master and slave.

Only ports and directories are replaced: the tests' Spark was started elsewhere, and its processes resolve relative
paths from there.
"""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import SparkSession

import ha.cli
from ha.client import Message, Producer, PullConsumer, PushConsumer, PushOptions, ReceivedMessage, StartFrom
from ha.errors import BrokerError, OptionError
from ha.spark.sink.options import _OPTIONS as SINK_OPTIONS
from ha.spark.sink.rows import _KAFKA_NAMES as KAFKA_NAMES
from ha.spark.sink.rows import COLUMN_TYPES
from ha.spark.source.options import _KAFKA_ONLY as KAFKA_ONLY
from ha.spark.source.options import _OPTIONS as SOURCE_OPTIONS
from ha.spark.source.options import parse_any
from scripts.demo import flights, send_all, wait_until_replicated
from scripts.nodes import Cluster
from tests.spark.clusters import running_cluster
from tests.spark.sessions import use_session

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "spark.md").read_text()
KAFKA_PAGE = (DOCS / "spark-from-kafka.md").read_text()
COUNT = 3000

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and a slave with the first flights."""
    with running_cluster(tmp_path_factory.mktemp("docs")) as found:
        sent = flights(COUNT)
        anyio.run(send_all, found.name_server_address, sent, 256, lambda done: None, backend="trio")
        wait_until_replicated(found)
        data = found.directory / "data"
        data.mkdir()
        (data / "slave").symlink_to(found.slave_store)
        (data / "master").symlink_to(found.master_store)
        (found.directory / "demo").symlink_to(found.directory)
        yield found


def here(text: str, nodes: Cluster) -> str:
    """The text with this cluster's address and directories."""
    text = text.replace("127.0.0.1:9876", nodes.name_server_address)
    for folder in ("data/", "demo/"):
        text = re.sub(rf"(?<![\w/]){folder}", f"{nodes.directory}/{folder}", text)
    archive = f'"{nodes.directory}/archive"'
    for before in ("archive=", "parquet(", '"archive", '):
        text = text.replace(f'{before}"archive"', before + archive)
    return text


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", page)


def test_every_python_snippet_runs(
    spark: SparkSession, nodes: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(nodes.directory)
    own = spark.newSession()
    names: dict[str, Any] = {"spark": own}
    snippets = blocks("python")
    assert len(snippets) >= 7
    try:
        for snippet in snippets:
            exec(compile(here(snippet, nodes), "spark.md", "exec"), names)
    finally:
        if "listener" in names:
            own.streams.removeListener(names["listener"])
    for snippet in blocks("python", KAFKA_PAGE):
        exec(compile(here(snippet, nodes), "spark-from-kafka.md", "exec"), names)
    assert names["texts"].isStreaming
    assert names["texts"].columns == ["key", "value"]
    out = capsys.readouterr().out
    assert f"{COUNT} ['queueId', 'queueOffset', 'tags', 'body']" in out
    assert f"{COUNT} archived, {COUNT} in the archive" in out
    assert f"{COUNT} messages, from the first one archived" in out
    assert names["delayed"].count() == sum((json.loads(sent.body)["dep_delay"] or 0) > 60 for sent in flights(COUNT))
    written = own.read.format("halog").option("servers", nodes.name_server_address).option("topic", "delays").load()
    assert written.count() == own.table("delay").where("delay IS NOT NULL").count()


def test_every_command_is_understood(
    spark: SparkSession, nodes: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(nodes.directory)

    use_session(monkeypatch, spark)
    commands = [
        shlex.split(line, comments=True)[1:]
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("ha spark") and "--every" not in line
    ]
    assert {words[1] for words in commands} == {"archive", "audit", "stats", "lag", "reindex", "replay", "erase"}
    for words in commands:
        words = [here(word, nodes) for word in words]
        if words[1] == "archive":
            words[words.index("--to") + 1] = str(nodes.directory / "archive-by-command")
        if words[1] in ("replay", "erase"):
            words[2] = str(nodes.directory / "archive-by-command")
        if words[1] == "reindex":
            words[words.index("--to") + 1] = str(nodes.directory / "rebuilt")
            words.append("--force")  # the page's broker is stopped, this one runs
        assert ha.cli.run(words) == 0, (words, capsys.readouterr().err)


def run_notebook(name: str, spark: SparkSession, nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs all cells; returns the names that they define."""
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(nodes.directory)

    use_session(monkeypatch, spark.newSession())
    notebook = json.loads((DOCS / name).read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 6
    for number, cell in enumerate(cells):
        assert not cell["outputs"], "a page that nobody ran shows results"
        exec(compile(here("".join(cell["source"]), nodes), f"cell {number}", "exec"), names)
    return names


def test_notebook_runs_on_the_demo_data(spark: SparkSession, nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_notebook("flights.ipynb", spark, nodes, monkeypatch)
    assert names["messages"].count() == COUNT
    assert names["by_hour"]


async def fail_all(servers: str) -> None:
    """The group billing gives three messages up."""

    async def refuse(message: ReceivedMessage) -> None:
        raise ValueError

    async with Producer(servers) as producer:
        for number in range(3):
            await producer.send(Message("invoices", b"%d" % number))
    start = StartFrom.FIRST
    push = PushOptions(reconsume_times_max=0)
    async with PushConsumer(
        servers, refuse, group="billing", subscriptions={"invoices": "*"}, start_from=start, push=push
    ):
        await read_until(servers, "%DLQ%billing", 3)


async def read_until(servers: str, topic: str, count: int) -> None:
    """Waits until a topic has `count` messages."""
    async with PullConsumer(servers) as pull:
        while True:
            with suppress(BrokerError):
                if sum([await pull.max_offset(queue) for queue in await pull.queues(topic)]) >= count:
                    return
            await anyio.sleep(0.2)


@pytest.mark.spark_versions
def test_notebook_of_streams(spark: SparkSession, nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected values follow from the 200 orders, ten of which are there twice, and the 180 payments."""
    anyio.run(fail_all, nodes.name_server_address)
    names = run_notebook("streams.ipynb", spark, nodes, monkeypatch)
    amount = [number % 50 + 1.0 for number in range(200)]
    assert names["distinct"].count() == 200
    assert {
        row["country"]: row["sum"]
        for row in names["enriched"].groupBy("country").agg({"amount": "sum"}).toDF("country", "sum").collect()
    } == {
        country: sum(amount[order] for order in range(200) if order % 7 in customers)
        for country, customers in {"DE": (0, 3, 6), "FR": (1, 4), "IT": (2, 5)}.items()
    }
    # Two orders a minute. The last is of minute 99, so the watermark is at 69, and the window from 60 on is open.
    assert [(row["span"]["start"].minute, row["orders"]) for row in names["by_window"].orderBy("span").collect()] == [
        (minute, 20) for minute in range(0, 60, 10)
    ]
    assert names["payments"].count() == 180
    assert {row["customer"]: row["total"] for row in names["large"].collect()} == {
        customer: sum(amount[order] for order in [*range(200), *range(190, 200)] if order % 7 == customer)
        for customer in range(7)
    }
    assert [(row["topic"], row["messages"]) for row in names["dead"].collect()] == [("invoices", 3)]


@pytest.mark.parametrize("options", [SOURCE_OPTIONS, SINK_OPTIONS], ids=["source", "sink"])
def test_the_page_names_every_option_and_every_column(options: dict[str, str]) -> None:
    from ha.arrow import COLUMNS

    missing = [name for name in (*options.values(), *COLUMNS) if f"`{name}`" not in PAGE]
    assert not missing


def rows_of_tables(page: str) -> list[tuple[str, str]]:
    """The first two cells of each row of the page's tables, without the heads."""
    found = re.findall(r"(?m)^\| (.*?) \| (.*?) \|", page)
    return [(first, second) for first, second in found if "`" in first]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_each_option_of_kafka_s_source_and_sink_is_accepted_or_refused_as_the_page_says() -> None:
    source_part, sink_part = KAFKA_PAGE.split("## Sink")
    seen = set()
    for first, second in rows_of_tables(source_part):
        for name in names_in(first):
            seen.add(name)
            is_known = name.lower() in SOURCE_OPTIONS
            assert is_known == (second == "the same"), name
            if not is_known and "…" not in name:
                with pytest.raises(OptionError, match=r"Kafka|no option"):
                    parse_any({"path": "x", name: "1"})
        assert set(names_in(second)) <= {*SOURCE_OPTIONS.values(), "HALOG_ACCESS_KEY"}, second
    assert {"subscribe", "kafka.bootstrap.servers", "maxRecordsPerPartition", "groupIdPrefix"} <= seen
    assert len(seen) > 25
    columns = {*COLUMN_TYPES, *KAFKA_NAMES}
    for first, second in rows_of_tables(sink_part):
        known = columns if first.startswith("column") else set(SINK_OPTIONS.values())
        assert set(names_in(second)) <= known, second
        if second == "the same":
            assert set(names_in(first)) <= known
    # Every name of Kafka's that is refused with another reason than an unknown one is on the page.
    assert {name.lower() for name in seen} >= KAFKA_ONLY.keys() - {"includetimestamp", "continuous"}

"""`ha spark …`: command lines run against one Spark; the golden stores say what must come out."""

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from ha.cli import run
from ha.cli.spark import failures
from tests.protocol.golden import manifest
from tests.spark.sessions import use_session
from tests.spark.stores import make_store, message
from tests.unpacking import unpack_store

MANIFEST = manifest("5.5.0")
GOLDEN = sum(1 for entry in MANIFEST["consumequeue"] if entry[0] == MANIFEST["topic"])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return unpack_store("5.5.0", tmp_path / "broker-a")


@pytest.fixture(autouse=True)
def _one_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    use_session(monkeypatch, spark)


def output(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert run(["spark", *arguments]) == code, capsys.readouterr().err
    return capsys.readouterr().out


def result(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output([*arguments, "--json"], capsys, code))
    return found


def test_archive_resumes_and_restore_counts_the_same(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = str(tmp_path / "archive")
    assert result(["archive", "--path", str(store), "--to", to], capsys)["rows"] == len(MANIFEST["consumequeue"])
    assert result(["archive", "--path", str(store), "--to", to], capsys)["rows"] == 0
    dry = ["restore", to, "--topic", MANIFEST["topic"], "--dry-run"]
    assert f"│ {GOLDEN} " in output(dry, capsys)
    assert "│ 0 " in output([*dry, "--since", "2100-01-01"], capsys)
    audited = ["audit", str(store), "--archive", to, "--broker-name", "broker-a"]
    assert "clean" in output(audited, capsys)


def test_archive_decodes_bodies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = [b'{"order_id": 1, "amount": 2.50}', b"none", b'{"order_id": 3}']
    store = make_store(tmp_path / "a", [message(n, topic="orders", body=body) for n, body in enumerate(bodies)])
    schema = tmp_path / "orders.ddl"
    schema.write_text("order_id BIGINT, amount DECIMAL(10, 2)\n")
    to = tmp_path / "archive"
    words = ["archive", str(store), "--to", str(to), "--columns-from", "json", "--schema", f"orders={schema}"]
    assert "orders 1" in output(words, capsys)
    [file] = to.glob("topic=orders/*/*.parquet")
    found = pq.ParquetFile(file).read(["order_id", "amount"]).to_pylist()
    assert [(row["order_id"], row["amount"]) for row in found] == [(1, Decimal("2.50")), (None, None), (3, None)]
    schema.write_text("order_id BIGINT,")
    assert run(["spark", *words]) == 2
    assert "the schema of orders can't be used" in capsys.readouterr().err.replace("\n", " ")


def test_audit_returns_exit_code_for_damage_and_writes_report(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = unpack_store("5.5.0", tmp_path / "other")
    page, report = tmp_path / "audit.html", tmp_path / "audit.json"
    both = ["audit", str(store), str(other), "--html", str(page), "--report-json", str(report)]
    assert "clean" in output(both, capsys)
    record = next(r for r in MANIFEST["commitlog"] if r["kind"] == "message")
    with (other / "commitlog" / record["file"]).open("r+b") as file:
        file.seek(88)
        file.write(b"?")
    assert "crc" in output(both, capsys, 1)
    assert "<html" in page.read_text()[:200].lower()
    assert json.loads(report.read_text())["damage_count"] >= 1


def test_stats_and_lag_match_the_manifest(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(["stats", str(store), "--topic", MANIFEST["topic"], "--to", str(tmp_path / "stats")], capsys)
    assert found["total"]["messages"] == GOLDEN
    assert (tmp_path / "stats" / "stats.html").exists()
    assert MANIFEST["topic"] in output(["stats", str(store)], capsys)
    groups = {line["group"] for line in result(["lag", str(store)], capsys)["groups"]}
    assert "golden_reader" in groups
    assert "golden_reader" in output(["lag", str(store), "--queues"], capsys)


def test_reindex_builds_what_the_broker_built(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "rebuilt"
    conf = dict(line.split("=") for line in MANIFEST["brokerConf"])
    sizes = ["--index-slot-count", conf["maxHashSlotNum"], "--index-entry-count", conf["maxIndexNum"]]
    assert str(to) in output(["reindex", str(store), "--to", str(to), *sizes], capsys)
    files = [file for file in (store / "consumequeue").rglob("*") if file.is_file()]
    assert len(files) >= 4
    for file in files:
        assert (to / file.relative_to(store)).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["audit", "/no/such/store"], 66, "the directory does not exist"),
        (["stats", "/tmp"], 66, "storePathRootDir"),
        (["lag", "--conf", "nonsense", "--servers", "127.0.0.1:1"], 2, "key=value"),
        (["lag"], 2, "path"),
        (["archive", "--path", "STORE", "--to", "s3://bucket/archive"], 2, "s3://bucket/archive"),
        (["archive", "--path", "STORE"], 2, "--to"),
        (["archive", "STORE", "--to", "/tmp/a", "--columns-from", "json"], 2, "columns_from, schemas"),
        (["archive", "STORE", "--to", "/tmp/a", "--columns-from", "json", "--schema", "orders"], 2, "TOPIC=FILE"),
        (["archive", "STORE", "--to", "/tmp/a", "--columns-from", "json", "--schema", "a=/no/file"], 2, "/no/file"),
        (["archive", "STORE", "--to", "/tmp/a", "--columns-from", "protobuf", "--schema", "a=b"], 2, "FILE:MESSAGE"),
        (["archive", "STORE", "--to", "/tmp/a", "--columns-from", "protobuf", "--schema", "a=/no/f:m"], 2, "/no/f"),
    ],
)
def test_errors_are_shown_in_one_line(
    arguments: list[str], code: int, said: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(store) if word == "STORE" else word for word in arguments]
    assert run(["spark", *arguments]) == code
    error = capsys.readouterr().err
    assert said in error.replace("\n", " ")
    assert "Traceback" not in error


def test_executor_error_is_shown_as_itself() -> None:
    text = (
        "\n  An exception was thrown from the Python worker. Please see the stack trace below.\nTraceback (most recent"
        " call last):\n  File x, line 1, in f\nha.errors.CorruptLog: /d/0 is damaged at byte 7: magic\n"
    )
    error = PythonException(text)
    assert failures.is_job_failure(error)
    assert failures.explain(error) == "/d/0 is damaged at byte 7: magic"
    assert failures.exit_code_of(error) == 65
    assert failures.exit_code_of(PythonException("ZeroDivisionError: x")) == 70


def test_a_real_command_line_starts_and_stops_its_own_spark(store: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import ha.cli; ha.cli.main()", "spark", "lag", str(store), "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "golden_reader" in {line["group"] for line in json.loads(done.stdout)["groups"]}

"""One Spark for all tests of this folder: `local[2]`, loopback only, no UI."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.jars import delta_settings

pytestmark = pytest.mark.spark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()) or "pushdown_spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


# No JVM of these tests lives long enough for optimized machine code to pay off.
_JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@pytest.fixture(autouse=True, scope="session")
def _environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps results of jobs out of the user's home, and makes every Spark start quickly."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    _set_jvm_options(tmp_path_factory)


def _set_jvm_options(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set them for every Spark that the tests start, unless its settings have a folder already."""
    if "SPARK_CONF_DIR" in os.environ:
        return
    folder = tmp_path_factory.mktemp("spark-conf")
    lines = [f"spark.{part}.defaultJavaOptions {_JVM_OPTIONS}\n" for part in ("driver", "executor")]
    (folder / "spark-defaults.conf").write_text("".join(lines))
    os.environ.update(SPARK_CONF_DIR=str(folder), SPARK_DAEMON_JAVA_OPTS=_JVM_OPTIONS)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session. Filter pushdown is off, as it is by default."""
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_HOSTNAME="localhost", PYSPARK_PYTHON=sys.executable)
    _set_jvm_options(tmp_path_factory)
    warehouse: Path = tmp_path_factory.mktemp("warehouse")
    builder = SparkSession.Builder()
    for name, value in delta_settings().items():
        builder = builder.config(name, value)
    session = (
        builder.master("local[2]")
        .appName("halog tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(warehouse))
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def pushdown_spark(spark: SparkSession) -> SparkSession:
    """A separate session of the same Spark with filter pushdown for Python data sources."""
    session = spark.newSession()
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    return session

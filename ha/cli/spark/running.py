"""Runs a job of `ha spark` in its own Spark session, and prints its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter
from rich.table import Table

from ha.cli.exits import UsageError, needs_extra
from ha.cli.showing import notices, output, print_json
from ha.cli.spark.failures import NOT_STARTED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Made = TypeVar("Made")


@Parameter(name="*")
@dataclass
class Where:
    """Options of every job, for its Spark session and its output."""

    master: Annotated[str, Parameter(help="Spark master: local[*], spark://host:port, yarn, k8s://…")] = "local[*]"
    conf: Annotated[list[str], Parameter(help="Spark setting, key=value (repeatable).", negative=())] = field(
        default_factory=list
    )
    json: Annotated[bool, Parameter(negative=(), help="Print the result as JSON instead of a table.")] = False


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"--conf {pair!r} is invalid: use key=value, for example spark.executor.memory=2g")
        settings[key] = value
    return settings


@contextmanager
def spark_session(name: str, where: Where) -> Iterator[SparkSession]:
    """Open the Spark session of a job. Raises UsageError for an invalid --conf, or without the extra `spark`."""
    settings = _settings(where.conf)
    with needs_extra("ha spark", "spark"):
        from ha.spark.session import open_session
    with open_session(f"ha spark {name}", where.master, settings) as session:
        yield session


def restarting(job: Callable[[], Made], stop: Event | None = None) -> Made:
    """Return the result of `job`, restarted up to 4 times if Spark can't start its Python processes (with_restarts)."""
    from ha.spark.restarts import with_restarts

    def report(delay_s: int, _: BaseException) -> None:
        notices().print(f"ha: {NOT_STARTED}; restarting the job in {delay_s} s")

    return with_restarts(job, stop=stop, report=report)


def check_stores(*paths: str) -> None:
    """Raise StoreUnreadable if one of the paths is not a readable store. Called before a JVM is started."""
    from ha.arrow import LogReader

    for path in paths:
        LogReader(path).close()


def show_result(result: Any, where: Where, tables: Callable[[Any], list[Table]]) -> int:
    """Print `result` as tables or JSON, and return its exit code."""
    if where.json:
        print_json(result)
    else:
        for table in tables(result):
            output().print(table)
    code: int = result.exit_code
    return code


def facts_table(title: str, facts: dict[str, Any]) -> Table:
    """Return a table of names and values."""
    table = Table("what", "how much", title=title, title_justify="left")
    for name, value in facts.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:,}")
    return table


def moment_ms(moment: datetime | None) -> int | None:
    """Convert a time of the command line, in UTC if it has no zone, to ms since 1970; None for None."""
    if moment is None:
        return None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return int(aware.timestamp() * 1000)

"""How processes share the tests, and which are not run (pytest-xdist, `--dist loadgroup --no-loadscope-reorder`).

The tests that use the shared Spark are one process's, so are those of the Docker daemon, and so are the others of one
file: what they share is made once.
What takes longest begins first: Spark, then whatever starts other processes and waits for them.

Tests marked `long` are what another test does, at another size or in another combination. They run with `--long` alone:
`scripts/long-tests`.

CI runs a failed test once more (`--reruns 1`): on a busy machine, any of some thousand process starts and real waits
may exceed its time. The end of the run shows what failed.
"""

import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# How long an example takes, or the making of one, says how busy the machine is.
hypothesis.settings.register_profile("halog", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("halog")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell does that to its jobs with &, and whatever tests start would ignore their Ctrl-C for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    # A Spark that was started in this process has put in a handler of its own, beside which Trio leaves Ctrl-C alone.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_DISK_USED_MAX = 0.85
"""Used share of the disk above which failures may be due to it: the tests need some gigabytes, and brokers refuse
messages at 0.9."""

_SPARK_FIXTURES = {"spark", "pushdown_spark"}
_INTEROP = Path(__file__).parent / "interop"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")


def _shares_spark(item: pytest.Item) -> bool:
    return not _SPARK_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def _rank(item: pytest.Item) -> int:
    # Marks, not keywords: the name of its folder is a keyword of each test.
    if item.get_closest_marker("spark") or _shares_spark(item):
        return 0
    if item.get_closest_marker("docker"):
        return 1
    return 1 if _INTEROP in item.path.parents else 2 if item.get_closest_marker("processes") else 3


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("docker"):
        return "docker"
    return "spark" if _shares_spark(item) else item.nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(0))  # some take half an hour
    ranks: dict[str, int] = {}
    for item in items:
        ranks[_group(item)] = min(ranks.get(_group(item), 3), _rank(item))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    yield  # pytest-xdist reads the marks, and pytest brings together what shares a fixture's parameter
    items.sort(key=lambda item: ranks[_group(item)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"run once more: {report.nodeid}")
        terminalreporter.line(report.longreprtext)
    folder = tempfile.gettempdir()
    disk = shutil.disk_usage(folder)
    used = disk.used / (disk.used + disk.free)
    if used > _DISK_USED_MAX and (terminalreporter.stats.get("failed") or terminalreporter.stats.get("error")):
        terminalreporter.section("disk almost full")
        terminalreporter.line(
            f"The disk of {folder} is {used:.0%} full. Above 90 %, brokers refuse messages, and tests fail. Free some "
            "space, or set TMPDIR to a directory of another disk."
        )

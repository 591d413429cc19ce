"""Fixtures of the tests against real RocketMQ: resolved releases, processes that always end, logs of what failed."""

import shutil
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import trio

from tests.interop.processes import Children, open_children
from tests.interop.releases import VERSIONS, Release, require_java, resolve
from tests.interop.rocketmq import archive_shared_classes
from tests.interop.sdk_cluster import HALOG

_LOG_LINES_MAX = 60
_LOGS = ("*.out", "*.err", "broker.log", "store.log", "namesrv.log")
# Frequent log lines of real brokers without information.
_NOISE = ("|-INFO in ", "[WATERMARK]", "service thread:", "shutdown thread[", "join thread[", "PERF_COUNTER")
_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
        folder = getattr(item, "funcargs", {}).get("workplace")
        if report.failed and folder is not None:
            for path in sorted(path for pattern in _LOGS for path in folder.rglob(pattern)):
                text = path.read_text(errors="replace")
                lines = [line for line in text.splitlines() if not any(noise in line for noise in _NOISE)]
                if lines:
                    report.sections.append((str(path.relative_to(folder)), "\n".join(lines[-_LOG_LINES_MAX:])))
    return report


@pytest.fixture(scope="session")
def java() -> None:
    """Requires Java and Maven."""
    require_java()


@pytest.fixture(scope="session", params=VERSIONS)
def release(request: pytest.FixtureRequest, java: None) -> Release:
    """Each release of RocketMQ in turn."""
    resolved = resolve(str(request.param))
    if not resolved.shared_classes.exists():
        trio.run(archive_shared_classes, resolved)
    return resolved


@pytest.fixture
def workplace(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The test's folder; deleted when the test passed, because its stores take hundreds of megabytes."""
    yield tmp_path
    if request.node.stash.get(_passed, False):
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
async def children(workplace: Path) -> AsyncIterator[Children]:
    async with open_children(workplace) as started:
        yield started


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.interop)
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    # Brokers don't notice the SDK's event loop: halog's are asked under trio, real ones under asyncio.
    if "cluster" in params and params.get("backend") == ("asyncio" if params["cluster"] == HALOG else "trio"):
        item.add_marker(pytest.mark.long)
    usual = item.get_closest_marker("usual_release")
    if usual is not None:
        assert set(usual.args) <= set(VERSIONS), f"{item.nodeid}: then no release would be the usual one"
        if params["release"] not in usual.args:
            item.add_marker(pytest.mark.long)

"""Which tests share a process when they run in several (pytest-xdist): all of Spark's, and those of one file."""

from __future__ import annotations

import pytest

_SPARK_FIXTURES = {"spark", "pushdown_spark"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needs_spark = "/spark/" in item.nodeid or not _SPARK_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("spark" if needs_spark else item.nodeid.partition("::")[0]))

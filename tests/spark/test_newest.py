"""Which PySpark scripts/test-newest-spark takes. Installs nothing."""

import pytest
from packaging.specifiers import SpecifierSet

from scripts.newest_spark import newest, supported

# As pip 23 and 25 print it.
LISTING = """pyspark (5.0.0)
Available versions: 5.0.0, 4.10.0.dev1, 4.9.1, 4.10.0, 4.2.0, 3.5.9
  INSTALLED: 4.2.0
  LATEST:    5.0.0
"""


def test_the_newest_release_within_the_extra_is_taken() -> None:
    assert newest(LISTING, SpecifierSet(">=4.2,<5")) == "4.10.0"
    assert newest(LISTING, SpecifierSet("<4.10")) == "4.9.1"
    with pytest.raises(ValueError, match=r"pip knows no PySpark >=6"):
        newest(LISTING, SpecifierSet(">=6"))


def test_the_extra_allows_a_range_of_versions() -> None:
    assert "4.2.0" in supported()
    assert "4.1.0" not in supported()

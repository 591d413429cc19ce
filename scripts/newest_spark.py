"""Runs some of Spark's tests with the newest PySpark that the extra `spark` allows: see scripts/test-newest-spark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = Path(sys.prefix, "newest-spark")
"""Has one installation of PySpark alone, in a folder named after its version. PYTHONPATH gives that folder precedence
over the environment's PySpark."""
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def supported() -> SpecifierSet:
    """Return the versions of PySpark that the extra `spark` allows."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [found] = [requirement for requirement in map(Requirement, extras["spark"]) if requirement.name == "pyspark"]
    return found.specifier


def newest(listing: str, allowed: SpecifierSet) -> str:
    """Return the newest allowed version in the output of `pip index versions`. Raises ValueError if there is none."""
    known = re.search(r"^Available versions: (.*)$", listing, re.MULTILINE)
    fitting: list[str] = list(allowed.filter(known[1].split(", "))) if known is not None else []
    if not fitting:
        raise ValueError(f"pip knows no PySpark {allowed}")
    return max(fitting, key=Version)


def install(wanted: str) -> Path:
    """Return the folder with PySpark `wanted`, which is installed if it isn't yet; other versions are deleted."""
    target = FOLDER / wanted
    if not target.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        partial = FOLDER / "partial"
        command = [*_PIP, "install", "--quiet", "--no-compile", "--target", str(partial), f"pyspark=={wanted}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        partial.rename(target)
    return target


def main(arguments: Sequence[str]) -> int:
    """Install the newest PySpark and, without --prepare, run the tests with it; returns pytest's exit code."""
    listing = subprocess.run([*_PIP, "index", "versions", "pyspark"], check=True, capture_output=True, text=True).stdout
    wanted, usual = newest(listing, supported()), version("pyspark")
    if wanted == usual:
        print(f"PySpark {usual}, with which all tests run, is the newest")
        return 0
    environment = {**os.environ, "PYTHONPATH": str(install(wanted))}
    if arguments[:1] == ["--prepare"]:
        return 0
    check = [sys.executable, "-c", "import pyspark; print(pyspark.__version__)"]
    found = subprocess.run(check, check=True, capture_output=True, text=True, env=environment).stdout.strip()
    assert found == wanted, f"PySpark {found} instead of {wanted}"
    print(f"PySpark {wanted}; all tests run with {usual}", flush=True)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "spark_versions", "tests/spark", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Compiled modules as an installation makes them, or can't, and what runs beside those that are of no use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ha.protocol.compiled import compiled_twin

ROOT = Path(__file__).parents[2]
CYTHON = "def doubled(value):\n    return 'compiled', 2 * value\n"
PYTHON = """
from ha.protocol.compiled import with_compiled_twin

@with_compiled_twin
def doubled(value):
    return "python", 2 * value
"""
COMPILE = """
import sys
from pathlib import Path
from hatch_build import compiled
print(*compiled(Path(sys.argv[1])))
"""


def package_in(folder: Path) -> Path:
    """Writes a package with one function and its twin."""
    package = folder / "sources" / "ha"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_twice.pyx").write_text(CYTHON)
    (package / "twice.py").write_text(PYTHON)
    return package


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """That package, not compiled yet."""
    return package_in(tmp_path)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = package_in(tmp_path_factory.mktemp("compiled"))
    compile_into(package)
    return package


@pytest.fixture
def compiled(compiled_once: Path, tmp_path: Path) -> Path:
    """That package, compiled."""
    return shutil.copytree(compiled_once, tmp_path / "sources" / "ha")


def compile_into(package: Path, **environment: str) -> str:
    """Compile as an installation does; put what came of it beside its source, and return what was said."""
    folder = package.parents[1] / "build"
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(folder)],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    for module in folder.glob("lib/ha/*.so"):
        module.replace(package / module.name)
    return done.stdout + done.stderr


def run(package: Path, **environment: str) -> tuple[str, list[str]]:
    """Which twin runs, and what is said about it."""
    package = package.rename(package.with_name("twins"))  # `ha` itself has to be importable beside it
    done = subprocess.run(
        [sys.executable, "-c", "from twins.twice import doubled; print(doubled(4))"],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr.splitlines()


def test_runs_compiled(compiled: Path) -> None:
    assert run(compiled) == ("('compiled', 8)", [])


def test_runs_compiled_where_the_source_is_not_installed(compiled: Path) -> None:
    (compiled / "_twice.pyx").unlink()
    assert run(compiled) == ("('compiled', 8)", [])


def test_python_runs_where_it_is_asked_for(compiled: Path) -> None:
    assert run(compiled, HALOG_PURE="1") == ("('python', 8)", [])


def test_module_compiled_before_its_source_changed_is_ignored(compiled: Path) -> None:
    (compiled / "_twice.pyx").write_text(CYTHON.replace("2 * value", "value + value"))
    said, [warning] = run(compiled)
    assert said == "('python', 8)"
    assert "compiled.module_ignored module=twins._twice" in warning
    assert "other sources" in warning
    assert "install halog again" in warning


def test_module_without_a_source_crc_is_ignored(compiled: Path) -> None:
    """From an older halog, or compiled by hand."""
    [module] = compiled.glob("*.so")
    code = module.read_bytes()
    assert b"SOURCE_CRC" in code
    module.write_bytes(code.replace(b"SOURCE_CRC", b"SOURCE_OLD"))
    said, [warning] = run(compiled)
    assert said == "('python', 8)"
    assert "other sources" in warning


def test_module_without_the_function_is_ignored(compiled: Path) -> None:
    (compiled / "_twice.pyx").unlink()
    (compiled / "twice.py").write_text(PYTHON.replace("doubled", "thrice") + "\ndoubled = thrice\n")
    said, [warning] = run(compiled)
    assert said == "('python', 8)"
    assert "has no thrice" in warning


def test_module_that_cannot_be_loaded_is_ignored(compiled: Path) -> None:
    [module] = compiled.glob("*.so")
    module.write_bytes(b"not of this machine")
    said, [warning] = run(compiled)
    assert said == "('python', 8)"
    assert "compiled.module_ignored module=twins._twice" in warning


@pytest.mark.parametrize("compiler", ["none", "fails"])
def test_an_installation_without_a_working_compiler_goes_on(package: Path, tmp_path: Path, compiler: str) -> None:
    path = tmp_path / "bin"
    path.mkdir()
    if compiler == "fails":
        for name in ("cc", "gcc", "x86_64-linux-gnu-gcc", "clang"):
            (path / name).write_text("#!/bin/sh\necho broken >&2; exit 1\n")
            (path / name).chmod(0o755)
    said = compile_into(package, PATH=str(path))
    assert list(package.glob("*.so")) == []
    assert "twice" in said
    assert run(package) == ("('python', 8)", [])


def test_an_installation_goes_on_without_a_source_that_cython_refuses(package: Path) -> None:
    (package / "_broken.pyx").write_text("cdef int x = nothing_of_that_name +\n")
    assert "ha/_broken.pyx is not compiled" in compile_into(package)
    assert [module.name.partition(".")[0] for module in package.glob("*.so")] == ["_twice"]


def test_the_version_says_what_runs_compiled() -> None:
    command = [sys.executable, "-c", "from ha.cli import main; main()", "--version"]
    there = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("(0 of " in there.stdout) is (compiled_twin("ha.protocol.batch") is None)
    assert "modules run compiled" in there.stdout
    environment = {**os.environ, "HALOG_PURE": "1"}
    pure = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "(0 of " in pure.stdout
    assert "slower, not compiled: all" in pure.stdout


def test_the_version_counts_no_module_whose_extra_is_not_installed() -> None:
    program = "import sys; sys.modules['pyarrow'] = None; from ha.cli import version; print(version())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "ha.arrow" not in done.stdout.partition("needs pyarrow")[0]

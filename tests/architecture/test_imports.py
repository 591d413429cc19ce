"""Checks imports: packages import only what ARCHITECTURE.md allows, and files do not import each other in cycles."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ha"


def arrows(text: str) -> dict[str, set[str]]:
    """Room -> rooms it may import: the first block under "Arrows"."""
    block = text.partition("## Arrows")[2].split("```")[1]
    lines = [line.partition(" ") for line in map(str.strip, block.splitlines()) if line]
    return {here: {room for room in map(str.strip, rooms.split(",")) if room} for here, _, rooms in lines}


BELOW = arrows((PACKAGE.parent / "ARCHITECTURE.md").read_text())

TRIO_FREE = {"errors", "protocol", "config"}
SPARK_FREE = {"arrow", "audit"}


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@cache
def imports(path: Path) -> set[str]:
    """Absolute dotted names that the file imports, at any depth and under TYPE_CHECKING too."""
    found: set[str] = set()
    package = ["ha", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stem = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (stem, node.module) if part)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def libraries(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_has_its_arrows_to_rooms_that_stand_before_it() -> None:
    assert BELOW.keys() == {room(path) for path in SOURCES} - {"__init__"}
    known: set[str] = set()
    for here, rooms in BELOW.items():
        assert rooms <= known, here
        known.add(here)


def test_imports_point_down() -> None:
    for path in SOURCES:
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("ha.")}
        here = room(path)
        assert here == "__init__" or rooms - {here} <= BELOW[here], path


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_files_do_not_import_each_other_in_cycles() -> None:
    modules = {module(path): path for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = {found if found in modules else found.rpartition(".")[0] for found in imports(path)}
        graph[name] = imported & modules.keys()
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle


def test_codecs_and_config_do_no_io() -> None:
    forbidden = {"trio", "anyio", "socket", "asyncio", "threading", "random"}
    for path in SOURCES:
        if room(path) in TRIO_FREE:
            assert not libraries(path) & forbidden, path
        if room(path) == "protocol":
            assert not libraries(path) & {"time", "pathlib", "tempfile"}, path


def test_files_are_touched_only_through_the_seam() -> None:
    """Storage reaches the disk through ha/store/files.py alone, so that a simulated disk sees every operation."""
    for path in (PACKAGE / "store").glob("*.py"):
        if path.name != "files.py":
            assert not libraries(path) & {"os", "fcntl", "mmap", "shutil", "io"}, path


def test_reader_and_audit_need_neither_spark_nor_an_event_loop() -> None:
    for path in SOURCES:
        if room(path) in SPARK_FREE:
            assert not libraries(path) & {"pyspark", "pandas", "trio", "anyio", "socket"}, path


def test_only_the_spark_room_knows_spark() -> None:
    for path in SOURCES:
        if "pyspark" in libraries(path):
            assert room(path) == "spark" or path.parent == PACKAGE / "cli" / "spark", path


def test_secrets_are_revealed_where_they_become_keys() -> None:
    """Everybody else gets what signs and checks, and can't show the text by mistake."""
    checks_form = {"check.py", "link_keys.py", "user_keys.py"}
    for path in SOURCES:
        if ".reveal()" in path.read_text() and path != PACKAGE / "config" / "secret.py":
            assert room(path) in {"node", "proxy", "tls"} or path.name in checks_form, path


def test_clients_and_name_servers_do_without_numpy() -> None:
    """It takes a tenth of a second to import, and 11 MiB."""
    program = "import sys, ha.client, ha.namesrv; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_node_serves_before_what_messages_do_without_is_there() -> None:
    """Half of a start was their import. A node never needs NumPy; a worker imports the rest when the node is READY
    (ha/node/later.py)."""
    late = {"numpy", "hypercorn", "starlette", "prometheus_client", "jinja2", "yaml", "asyncio", "opentelemetry"}
    program = f"import sys, ha.node; print(*{late!r} & sys.modules.keys()); import ha.node.later, hypercorn.trio"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert found.split() == []


def test_the_node_is_imported_when_the_configuration_is_known() -> None:
    program = "import sys, ha.master, ha.slave, ha.member; sys.exit('ha.node' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_only_members_of_a_group_need_httpx() -> None:
    for path in SOURCES:
        if "httpx" in libraries(path):
            assert path == PACKAGE / "failover" / "etcd_client.py", path
    program = "import sys, ha.node, ha.namesrv; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

"""Checks what the pages contain: blocks, commands, and the tests they name.

A test named here runs every fenced block, or the page says why not, in a line `*Not run by a test: REASON.*` above it.
A block without a language is output or a drawing; one of `console` shows a command without running it. Commands in the
text exist and have the flags shown.
"""

import os
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ha.cli import application
from tests.docs.pages import ROOT

RUN_BY = {
    ("README.md", "sh"): "tests/readme/test_readme.py",
    ("README.md", "python"): "tests/readme/test_readme.py",
    ("docs/attach-to-rocketmq.md", "sh"): "tests/interop/test_how_to.py",
    ("docs/cli.md", "sh"): "tests/cli/test_docs.py",
    ("docs/deploying.md", "sh"): "tests/containers/test_compose.py",
    ("docs/disaster-recovery.md", "sh"): "tests/interop/test_how_to.py",
    ("docs/failover.md", "sh"): "tests/docs/test_commands.py",
    ("docs/grpc.md", "properties"): "tests/proxy/test_front_security.py",
    ("docs/scaling.md", "sh"): "tests/docs/test_commands.py",
    ("docs/security.md", "properties"): "tests/security/test_documentation.py",
    ("docs/observability.md", "json"): "tests/metrics/test_documentation.py",
    ("docs/observability.md", "python"): "tests/metrics/test_documentation.py",
    ("docs/observability.md", "sh"): "tests/metrics/test_documentation.py",
    ("docs/observability.md", "yaml"): "tests/metrics/test_documentation.py",
    ("docs/reference/library.md", "python"): "tests/docs/test_library.py",
    ("docs/recipes.md", "python"): "tests/docs/test_recipes.py",
    ("docs/sdk.md", "python"): "tests/client/test_documentation.py",
    ("docs/security.md", "yaml"): "tests/security/test_documentation.py",
    ("docs/spark-from-kafka.md", "python"): "tests/spark/test_docs.py",
    ("docs/spark.md", "python"): "tests/spark/test_docs.py",
    ("docs/spark.md", "sh"): "tests/spark/test_docs.py",
    ("docs/timers.md", "python"): "tests/client/test_documentation.py",
    ("docs/tls.md", "bash"): "tests/tls/test_documentation.py",
    ("docs/tls.md", "python"): "tests/tls/test_documentation.py",
    ("docs/tutorial.md", "sh"): "tests/docs/test_commands.py",
    ("docs/upgrading.md", "sh"): "tests/docs/test_commands.py",
}
REASON = re.compile(r"^\*Not run by a test: .+\.\*$", re.MULTILINE)
SHOWN = {"", "console", "text"}
COMMAND = re.compile(
    r"^(ha|python3?|pip|apt(-get)?|scripts/[\w-]+|bench/run|docker|kubectl|curl|systemctl) ", re.MULTILINE
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fenced(page: Path) -> Iterator[tuple[str, int, str, str]]:
    """Yields each block's language, line, text and preceding paragraph."""
    text = page.read_text()
    for match in re.finditer(r"(?ms)^```(\w*)[^\n]*\n(.*?)^```$", text):
        above = text[: match.start()].rstrip().rpartition("\n\n")[2]
        yield match[1], text.count("\n", 0, match.start()) + 1, match[2], above


def test_blocks_are_run_or_excused() -> None:
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        assert page.read_text().count("\n```") == 2 * len(list(fenced(page))), f"{name}: unterminated block"
        for language, line, block, above in fenced(page):
            if language == "":
                assert not COMMAND.search(block), f"{name}:{line}: commands belong into a block of sh"
            is_excused = language in SHOWN or REASON.search(above)
            assert is_excused or (name, language) in RUN_BY, f"{name}:{line}: no test runs this {language} block"


def test_named_test_reads_the_page() -> None:
    for (name, language), test in RUN_BY.items():
        assert any(found == language for found, *_ in fenced(ROOT / name)), f"{name} has no block of {language}"
        assert Path(name).name in (ROOT / test).read_text(), (name, test)


IN_TEXT = re.compile(r"`((?:ha |python -m |bench/run |scripts/)[^`]+)`")


def commands_in_text(page: Path) -> Iterator[str]:
    """Yields the commands in running text; `a|b` means two commands."""
    plain = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    for found in IN_TEXT.findall(plain):
        first, *rest = " ".join(found.split()).split("|")
        yield first
        yield from (f"{first.rpartition(' ')[0]} {each}" for each in rest)


def lacks(command: str) -> str:
    """Returns the program, module, subcommand or flag of a command that does not exist, otherwise ""."""
    program, *words = shlex.split(command)
    if program == "ha":
        app = application()
        while words and words[0] in app and not words[0].startswith("-"):
            app = app[words.pop(0)]
        if app.default_command is None:
            return words[0] if words and words[0].islower() and not words[0].startswith("-") else ""
        flags = {name for argument in app.assemble_argument_collection() for name in argument.names} | {"--help"}
        return " ".join(word for word in words if word.startswith("--") and word not in flags)
    if program == "python":
        return "" if find_spec(words[1]) else words[1]
    if not os.access(ROOT / program, os.X_OK):
        return program
    names = re.findall(r"[\w-]+", (ROOT / program).read_text()) if program == "bench/run" else words
    return words[0] if words and words[0] not in names else ""


def test_commands_in_text_exist() -> None:
    commands = [command for page in PAGES for command in commands_in_text(page)]
    assert {command: lacks(command) for command in commands if lacks(command)} == {}
    assert len(commands) > 80


def test_missing_commands_are_detected() -> None:
    missing = {
        "ha stats": "stats",
        "ha log verfy data": "verfy",
        "ha switch --from 2": "--from",
        "scripts/nothing": "scripts/nothing",
        "bench/run nothing": "nothing",
        "python -m ha.x": "ha.x",
    }
    assert {command: lacks(command) for command in missing} == missing


def test_named_files_and_tests_exist() -> None:
    for page in (*PAGES, ROOT / "ARCHITECTURE.md"):
        for path, function in re.findall(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`", page.read_text()):
            sources = [file.read_text() for file in (ROOT / path, ROOT / "ha" / path) if file.exists()]
            assert sources, (page, path)
            assert not function or re.search(rf"^(async )?def {function}\(", sources[0], re.MULTILINE), (page, function)

"""Runs the example of docs/reference/library.md, with ports that the system chooses."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks

pytestmark = pytest.mark.processes


ON_ASYNCIO = [("import trio\n", "import asyncio\n"), ("trio.run(main)", "asyncio.run(main())")]


@pytest.mark.parametrize("changes", [[], ON_ASYNCIO], ids=["trio", "asyncio"])
def test_example_stores_and_reads_a_message(changes: list[tuple[str, str]], tmp_path: Path) -> None:
    [example] = blocks("reference/library.md", "python")
    for old, new in [("ha.Config()", "ha.Config(listen_port=0)"), *changes]:
        assert old in example
        example = example.replace(old, new)
    command = [sys.executable, "-c", example]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "PutStatus.PUT_OK 0\n0 b'hello'\n", done.stderr
    assert (tmp_path / "data/master/commitlog/00000000000000000000").exists()

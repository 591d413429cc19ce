"""One filled pair for all tests of this folder."""

from pathlib import Path

import pytest
import trio

from tests.corruption.pair import Pair, copied, fill


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("filled")
    trio.run(fill, root)
    return root


@pytest.fixture
def pair(filled: Path, tmp_path: Path) -> Pair:
    return copied(filled, tmp_path / "pair")

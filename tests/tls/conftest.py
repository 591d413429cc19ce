from pathlib import Path

import pytest

from tests.tls.pki import Pki


@pytest.fixture(scope="session")
def session_pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """One CA for all tests that change nothing about it."""
    pki = Pki(tmp_path_factory.mktemp("pki"))
    pki.issue("server")
    return pki


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    """A CA of the test's own."""
    return Pki(tmp_path)

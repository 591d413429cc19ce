"""Archives that tests unpack: the fixtures of real brokers, and what the build makes."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz that holds nothing but data, which Python 3.11.2 can't be told: it lacks the filters."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        opened.extractall(folder)

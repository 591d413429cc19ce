"""Archives that tests unpack: the stores that real brokers wrote, and what the build makes."""

import tarfile
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz that holds nothing but data, which Python 3.11.2 can't be told: it lacks the filters."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        opened.extractall(folder)


def unpack_store(version: str, folder: Path) -> Path:
    """Unpack the store that a real broker of `version` wrote, into its root, which is returned."""
    unpack(FIXTURES / f"store-{version}.tar.gz", folder)
    return folder

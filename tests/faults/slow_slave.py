"""`python -m tests.faults.slow_slave`: ha.slave on a disk with slow syncs and file creation.

The delay, SLOW_DISK_S in the environment, is in the file seam, below everything that a slave does. Writes into the map
stay fast, as on a slow disk with a large cache.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

from ha.node import startup
from ha.node.platform import Platform
from ha.slave import ENTRY
from ha.store.files import File, OsDisk, OsFile

DELAY_S = float(os.environ.get("SLOW_DISK_S", "1"))


class SlowFile(OsFile):
    def sync(self) -> None:
        time.sleep(DELAY_S)
        super().sync()


def slowed(file: File) -> File:
    assert isinstance(file, OsFile)
    return SlowFile(file.path, os.dup(file._descriptor))


class SlowDisk(OsDisk):
    def create(self, path: Path, size: int, *, allocate: bool) -> File:
        if allocate:
            time.sleep(DELAY_S)
        return slowed(super().create(path, size, allocate=allocate))

    def open(self, path: Path) -> File:
        return slowed(super().open(path))


if __name__ == "__main__":
    setattr(startup, "Platform", partial(Platform, disk=SlowDisk()))  # noqa: B010 - a class's place is taken by a function
    sys.exit(ENTRY.main())

"""A cache of open files, so that thousands of queues don't need as many descriptors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from ha.store.files import Disk, File


class OpenFiles:
    """LRU cache of open files. Worker threads use it, too."""

    def __init__(self, disk: Disk, count_max: int = 512) -> None:
        self._disk = disk
        self._count_max = count_max
        self._files: dict[Path, File] = {}
        self._lock = threading.Lock()  # not held while a file is opened, which may wait for the disk
        self.unsynced: dict[Path, Any] = {}
        """Owner of each file, open or not, that was written and is not synced yet; ordered by the first such write, so
        that simulated runs with the same seed sync in the same order"""

    def get(self, path: Path) -> File:
        """Returns the file at `path`. If it is not in the cache, opens it; if the limit is reached, first closes the
        least recently used one. Raises OSError if the file can't be opened, FileNotFoundError if it doesn't exist."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is None:
                self._close_above(self._count_max - 1)
        if file is None:
            file = self._disk.open(path)
        self.add(file)
        return file

    def limit(self, count_max: int) -> None:
        """Sets the maximum number of open files (at least 1), and closes the least recently used ones above it."""
        with self._lock:
            self._count_max = count_max
            self._close_above(count_max)

    def add(self, file: File) -> None:
        """Adds a file that was just created; if the limit is reached, first closes the least recently used one."""
        with self._lock:
            self._close_above(self._count_max - 1)
            self._files[file.path] = file

    def _close_above(self, count: int) -> None:
        while len(self._files) > count:
            del self._files[next(iter(self._files))]

    def forget(self, path: Path) -> None:
        """Removes a file that was deleted or renamed from the cache and from `unsynced`."""
        with self._lock:
            self._files.pop(path, None)
        self.unsynced.pop(path, None)

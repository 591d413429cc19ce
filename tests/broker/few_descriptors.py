"""A disk on which no more files can be opened, as if the process had no descriptor left."""

import errno
import os
from pathlib import Path

from ha.store.files import File, OsDisk
from tests.broker.node import Node


class FewDescriptors(OsDisk):
    """While `is_exhausted`, no file can be opened."""

    is_exhausted = False

    def exhaust(self, node: Node, topic: str | None) -> None:
        """From now on, no file can be opened: neither those of the topic's queues, which are closed, nor without a
        topic those with the log's checksums, none of which, and no bytes of the log that were read, are in memory."""
        self.is_exhausted = True
        if topic is None:
            node.store.log.verified.checksums.forget()
            node.store.log.verified._recent.clear()
            return
        open_files = node.store.queues._files._files
        for path in [path for path in open_files if topic in path.parts]:
            del open_files[path]

    def read_bytes(self, path: Path) -> bytes:
        self._open_one()
        return super().read_bytes(path)

    def open(self, path: Path) -> File:
        self._open_one()
        return super().open(path)

    def _open_one(self) -> None:
        if self.is_exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

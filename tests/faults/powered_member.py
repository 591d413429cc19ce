"""A real member process that can lose power: `python -m tests.faults.powered_member --set KEY=VALUE …`

It is `ha.member` on a disk that records how far each file of the log is synced, and with a boot id that the test sets.
`lose_power` then has the effect of a power loss: the process is gone, each page of the log that was written but not
synced may be lost, and the boot id is different.

    child = children.start_soon("member-1", command(...), environment=ENVIRONMENT)
    lost_bytes = await lose_power(child, root, random.Random(seed))

Fault model: the log's bytes as in `tests.sim.disk`, page by page, torn between sectors. All other files keep the
content of the page cache, which is a possible result of a power loss. The records are kept beside the store, in
`ROOT.power/`; they need no sync, because only the process ends.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from ha.config import Config
from ha.process import Entry
from ha.store.files import File, OsDisk

if TYPE_CHECKING:
    from tests.interop.processes import Child

MODULE = "tests.faults.powered_member"
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}
"""For the process, which runs in another directory"""
PAGE, SECTOR = 4096, 512


def _folder(root: Path) -> Path:
    return root.with_name(root.name + ".power")


def _read_number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return default


# ---- in the test


async def lose_power(child: Child, root: Path, chance: Random) -> int:
    """Kills a powered member and removes unsynced bytes from its log; returns how many bytes are lost.

    Also works on one that was killed before. The next process finds another boot id.
    """
    if child.exit_code is None:
        await child.kill()
    boot = _folder(root) / "boot"
    boot.write_text(str(_read_number(boot, 1) + 1))
    kept_share = chance.choice((0.0, 0.0, 0.3, 0.7, 0.95))
    return sum(
        _drop_unsynced(path, _read_number(_folder(root) / path.name, path.stat().st_size), kept_share, chance)
        for path in sorted((root / "commitlog").iterdir())
        if path.name.isdigit()
    )


def _drop_unsynced(path: Path, synced_to: int, kept_share: float, chance: Random) -> int:
    lost = 0
    with path.open("r+b") as file:
        used = len(file.read().rstrip(b"\0"))
        for page in range(synced_to - synced_to % PAGE, used, PAGE):
            is_kept, is_torn = chance.random() < kept_share, chance.random() < 0.3
            for sector in range(page, min(page + PAGE, used), SECTOR):
                begin, end = max(sector, synced_to), min(sector + SECTOR, used)
                if begin < end and not (is_kept and (not is_torn or chance.random() < 0.5)):
                    file.seek(begin)
                    file.write(bytes(end - begin))
                    lost += end - begin
    return lost


# ---- in the process


class _PoweredFile:
    """A file of the log: `ha.store.files.File`."""

    def __init__(self, file: File, note: Path, written_to: int) -> None:
        self.path = file.path
        self.descriptor: int | None = None
        self.map, self.cool, self.pread, self.pread_nowait = file.map, file.cool, file.pread, file.pread_nowait
        self.next_range, self.write_back = file.next_range, file.write_back
        self._file = file
        self._note = note
        self._written_to = written_to

    def pwrite(self, chunk: bytes | bytearray | memoryview, position: int) -> None:
        self._written_to = max(self._written_to, position + len(chunk))
        self._file.pwrite(chunk, position)

    def zero(self, position: int, size: int) -> None:
        self._file.zero(position, size)
        if position + size >= self._written_to:
            self._written_to = min(self._written_to, position)

    def sync(self) -> None:
        written_to = self._written_to
        self._file.sync()
        self._note.write_text(str(written_to))


class PoweredDisk(OsDisk):
    """The operating system's files, with a record of how far those of the log are synced."""

    def __init__(self, root: Path) -> None:
        self._commitlog = root / "commitlog"
        self._folder = _folder(root)
        self._folder.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path, size: int, *, allocate: bool) -> File:
        file = super().create(path, size, allocate=allocate)
        if path.parent != self._commitlog:
            return file
        (self._folder / path.name).write_text("0")
        return _PoweredFile(file, self._folder / path.name, 0)

    def open(self, path: Path) -> File:
        file = super().open(path)
        if path.parent != self._commitlog or not path.name.isdigit():
            return file
        return _PoweredFile(file, self._folder / path.name, len(path.read_bytes().rstrip(b"\0")))

    def sync_all(self, paths: Sequence[Path]) -> None:
        assert not any(path.parent == self._commitlog for path in paths), paths
        super().sync_all(paths)

    def boot_id(self) -> str:
        return f"boot {_read_number(self._folder / 'boot', 1)}"


@asynccontextmanager
async def serve(config: Config) -> AsyncIterator[str]:
    """As `ha.node.serve_member`."""
    from ha.node import open_node
    from ha.node.member import wait_role
    from ha.node.platform import Platform

    disk = PoweredDisk(config.root)
    async with open_node(config, Platform(disk=disk, boot_id=disk.boot_id)) as node:
        assert node.member is not None
        await wait_role(node.member)
        yield node.ready_line


ENTRY = Entry(MODULE, Config, serve, defaults={"brokerRole": "SYNC_MASTER"}, later="ha.node.later")

if __name__ == "__main__":
    sys.exit(ENTRY.main())

"""Files of a node are readable by its user and group, whatever the umask; existing files keep their mode."""

import os
from pathlib import Path

import pytest

import ha
from ha.store.files import OsDisk
from tests.node.test_library import config


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_modes_of_store_files(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        async with ha.open_master(config(tmp_path / "data" / "master")) as master:
            await master.put(ha.LogMessage(topic="t", queue_id=0, body=b"x", properties=b"KEYS\x01k\x02"))
            await master.broker.topics.ensure("u", 1)
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o7777 for path in (tmp_path / "data").rglob("*")}
    assert len(found) > 10
    assert {path for path, mode in found.items() if mode != (0o750 if path.is_dir() else 0o640)} == set()
    assert (tmp_path / "data").stat().st_mode & 0o7777 == 0o750


def test_existing_files_keep_their_mode(tmp_path: Path) -> None:
    disk = OsDisk()
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(0o700)
    file = tmp_path / "there" / "file"
    file.touch()
    file.chmod(0o600)
    disk.make_dirs(tmp_path / "there")
    disk.make_dirs(tmp_path / "there" / "a" / "b")
    disk.write_bytes(file, b"x")
    held = disk.lock(file, b"")
    assert held is not None
    held.release()
    modes = [path.stat().st_mode & 0o777 for path in (file, *(tmp_path / "there" / p for p in (".", "a", "a/b")))]
    assert modes == [0o600, 0o700, 0o750, 0o750]


def test_setgid_directories_keep_their_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o2750)
    OsDisk().make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o7777 == 0o2750


def test_file_at_the_path_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"exists|Not a directory") as caught:
            OsDisk().make_dirs(path)
        assert caught.value.filename == str(tmp_path / "file") or caught.value.filename == tmp_path / "file"

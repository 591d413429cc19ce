"""Files config/*.json as RocketMQ keeps them, and crashes between the two renames."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ha.broker.config_file import ConfigFile
from ha.errors import CorruptLog, DiskFailed, DiskFull, RemoteProtocolError
from ha.protocol import java_json
from tests.broker.full_disk import FullDisk
from tests.store.disks import run_inline


def decode(content: bytes) -> str:
    if content.startswith(b"bad"):
        raise RemoteProtocolError("bad")
    return content.decode()


def config_file(folder: Path) -> ConfigFile:
    return ConfigFile(folder / "config" / "topics.json", run_blocking=run_inline, encode=str.encode)


async def test_previous_version_is_kept_as_backup(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    assert await file.load(decode) is None
    for number in (1, 2, 3):
        await file.save(partial(str, number))
    assert file.path.read_text() == "3"
    assert file.backup_path.name == "topics.json.bak"
    assert file.backup_path.read_text() == "2"
    assert sorted(os.listdir(file.path.parent)) == ["topics.json", "topics.json.bak"]


@pytest.mark.parametrize("main", [None, "", " \n", "bad json"])
async def test_backup_is_used_if_the_file_is_damaged(tmp_path: Path, main: str | None) -> None:
    file = config_file(tmp_path)
    await file.save(lambda: "old")
    await file.save(lambda: "new")
    file.path.unlink()
    if main is not None:
        file.path.write_text(main)
    assert await file.load(decode) == "old"
    await file.save(lambda: "newer")
    file.path.write_text("bad json")
    assert await file.load(decode) == "old"
    await file.save(lambda: "newest")
    await file.save(lambda: "last")
    assert (file.path.read_text(), file.backup_path.read_text()) == ("last", "newest")


async def test_backup_is_used_if_the_disk_can_not_read_the_file(tmp_path: Path) -> None:
    unreadable: set[Path] = set()

    async def run(call: Callable[..., Any], *arguments: Any) -> Any:
        if unreadable.intersection(arguments):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return await run_inline(call, *arguments)

    file = ConfigFile(tmp_path / "topics.json", run_blocking=run, encode=str.encode)
    await file.save(lambda: "old")
    await file.save(lambda: "new")
    unreadable.add(file.path)
    assert await file.load(decode) == "old"
    unreadable.add(file.backup_path)
    with pytest.raises(CorruptLog, match=r"topics\.json.*Input/output error"):
        await file.load(decode)


async def test_damage_without_a_backup_is_refused(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    await file.save(lambda: "bad json")
    with pytest.raises(CorruptLog) as caught:
        await file.load(decode)
    assert caught.value.file == file.path
    assert file.path.read_text() == "bad json"


async def test_crash_between_the_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config_file(tmp_path)
    await file.save(lambda: "1")
    await file.save(lambda: "2")
    rename = os.rename

    def crash(source: Path, target: Path) -> None:
        if target == file.path:
            raise OSError("crash")
        rename(source, target)

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(DiskFailed, match=r"topics\.json"):
        await file.save(lambda: "3")
    assert await file.load(decode) == "2"


async def test_full_disk_is_logged_and_leaves_the_old_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FullDisk()
    file = ConfigFile(tmp_path / "topics.json", run_blocking=disk.run, encode=str.encode)
    await file.save(lambda: "1")
    disk.is_full = True
    with pytest.raises(DiskFull) as caught:
        await file.save(lambda: "22")
    assert (caught.value.file, caught.value.size_bytes) == (file.path, 2)
    await file.catch_up()  # nothing is pending: `save` has raised
    assert caplog.text.count("config.file_save_failed") == 0
    for number in (3, 4):
        await file.save_when_possible(partial(str, number))
    await file.catch_up()
    assert file.path.read_text() == "1"
    assert caplog.text.count("config.file_save_failed") == 1
    disk.is_full = False
    await file.catch_up()
    assert file.path.read_text() == "4"
    assert caplog.text.count("config.file_saved") == 1
    await file.catch_up()
    assert file.backup_path.read_text() == "1"


async def test_failed_write_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config_file(tmp_path)
    await file.save(lambda: "1")

    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", no_room)
    with pytest.raises(DiskFull):
        await file.save(lambda: "2")
    assert os.listdir(file.path.parent) == ["topics.json"]
    assert file.path.read_text() == "1"


async def test_a_worker_encodes_what_the_caller_copied(tmp_path: Path) -> None:
    """The text of a hundred thousand offsets takes long to make."""
    encoding: list[Any] = []

    async def run_later(call: Callable[..., Any], *arguments: Any) -> Any:
        encoding.append((call, arguments))
        table["a"] = 2
        return call(*arguments)

    file = ConfigFile(tmp_path / "topics.json", run_blocking=run_later)
    table = {"a": 1}
    await file.save(lambda: dict(table))
    assert encoding[0] == (java_json.dumps_pretty, ({"a": 1},))
    assert msgspec.json.decode(file.path.read_bytes()) == {"a": 1}

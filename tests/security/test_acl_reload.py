"""The files of a policy, and reloading them when they change, break or vanish."""

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ha.acl import AclGuard
from ha.acl.policy_files import SETTLE_S, AclPolicyFiles
from ha.errors import ConfigError
from ha.store.files import OsDisk
from tests.store.disks import run_inline


def files_in(folder: Path, is_open_to_others: Callable[[Path], bool] = lambda path: False) -> AclPolicyFiles:
    """Policy files as a node opens them, on a real disk."""
    return AclPolicyFiles(
        folder / "plain_acl.yml",
        folder / "acl",
        disk=OsDisk(),
        run_blocking=run_inline,
        is_open_to_others=is_open_to_others,
    )


def write(path: Path, *names: str) -> None:
    """Accounts with these names."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(
        "accounts:\n" + "".join(f"  - {{accessKey: {name}, secretKey: the-secret-of-{name}}}\n" for name in names)
    )


async def test_files_of_the_directory_take_precedence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "plain_acl.yml", "account-1", "account-2")
    (tmp_path / "acl" / "team").mkdir(parents=True)
    (tmp_path / "acl" / "a.yml").write_text(
        "globalWhiteRemoteAddresses: [10.0.0.1]\naccounts: [{accessKey: account-2, secretKey: another, admin: true}]"
    )
    write(tmp_path / "acl" / "team" / "b.yaml", "account-3")
    write(tmp_path / "acl" / "team.of.europe" / "c.yml", "account-6")
    write(tmp_path / "acl" / "notes.txt", "account-4")
    write(tmp_path / "acl" / ".hidden.yml", "account-5")
    policy = await files_in(tmp_path).load()
    assert sorted(policy.accounts) == ["account-1", "account-2", "account-3", "account-6"]
    assert policy.accounts["account-2"].is_admin
    assert policy.global_white_hosts.matches("10.0.0.1")
    assert "accessKey 'account-2' is in another file" in caplog.text


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "accounts:\n", "accounts: [{accessKey: a}]", "{"])
async def test_node_does_not_start_without_accounts(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "plain_acl.yml").write_text(content)
    with pytest.raises(ConfigError, match=r"a file like RocketMQ's plain_acl\.yml"):
        await files_in(tmp_path).load()


async def test_number_and_size_of_files_are_bounded(tmp_path: Path) -> None:
    write(tmp_path / "plain_acl.yml", "account-1")
    (tmp_path / "acl").mkdir()
    (tmp_path / "acl" / "large.yml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="1048577 bytes"):
        await files_in(tmp_path).load()
    (tmp_path / "acl" / "large.yml").unlink()
    for number in range(64):
        (tmp_path / "acl" / f"{number}.yml").touch()
    with pytest.raises(ConfigError, match="65 files"):
        await files_in(tmp_path).load()


async def test_world_readable_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "plain_acl.yml", "account-1")
    await files_in(tmp_path).load()
    assert caplog.text == ""
    await files_in(tmp_path, lambda path: path.name == "plain_acl.yml").load()
    assert "every user of this machine can read its secret keys" in caplog.text


async def test_changes_are_loaded_and_errors_keep_the_policy(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    main, other = tmp_path / "plain_acl.yml", tmp_path / "acl" / "more.yml"
    write(main, "account-1")
    files = files_in(tmp_path)
    guard = AclGuard(await files.load())

    def accounts() -> list[str]:
        return sorted(guard.policy.accounts)

    def said() -> list[str]:
        lines = [record.getMessage().split(" ")[0] for record in caplog.records]
        caplog.clear()
        return lines

    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.keep_loaded, guard, 5.0)
        await trio.sleep(60)
        assert (accounts(), said()) == (["account-1"], [])

        write(main, "account-1", "account-2")
        await trio.sleep(5.3)
        assert (accounts(), said()) == (["account-1", "account-2"], ["acl.reloaded"])

        write(other, "account-3")  # in a directory that was not there before
        await trio.sleep(5.3)
        assert (accounts(), said()) == (["account-1", "account-2", "account-3"], ["acl.reloaded"])

        main.write_text("accounts: [{accessKey: account-1, secretKey: the-secret-of-broken\n")
        await trio.sleep(60)
        assert accounts() == ["account-1", "account-2", "account-3"]
        assert "the-secret" not in caplog.text
        assert said() == ["acl.reload_failed"]  # once, not every five seconds

        write(main, "account-1", "account-2")  # as it was: nothing to do
        await trio.sleep(60)
        assert (accounts(), said()) == (["account-1", "account-2", "account-3"], [])

        main.unlink()
        other.unlink()
        await trio.sleep(60)
        assert (accounts(), said()) == (["account-1", "account-2", "account-3"], ["acl.reload_failed"])

        write(main, "account-4")
        await trio.sleep(5.3)
        assert (accounts(), said()) == (["account-4"], ["acl.reloaded"])
        nursery.cancel_scope.cancel()


async def test_half_written_file_is_not_loaded(autojump_clock: MockClock, tmp_path: Path) -> None:
    main = tmp_path / "plain_acl.yml"
    write(main, "account-1")
    files = files_in(tmp_path)
    guard = AclGuard(await files.load())
    seen: list[list[str]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.keep_loaded, guard, 5.0)
        await trio.sleep(4.9)
        for count in range(1, 6):  # somebody writes it account by account, slowly
            write(main, *(f"account-{number}" for number in range(5, 5 + count)))
            await trio.sleep(0.15)
            seen.append(sorted(guard.policy.accounts))
        await trio.sleep(1)
        assert seen == [["account-1"]] * 5
        assert len(guard.policy.accounts) == 5
        nursery.cancel_scope.cancel()


class ChangingDisk(OsDisk):
    """A disk that calls `change` at the read after the next `reads_left`."""

    def __init__(self, change: Callable[[], None]) -> None:
        super().__init__()
        self.change = change
        self.reads_left = 100

    def read_bytes(self, path: Path) -> bytes:
        self.reads_left -= 1
        if self.reads_left == -1:
            self.change()
        return super().read_bytes(path)


async def test_only_what_was_read_twice_is_loaded(autojump_clock: MockClock, tmp_path: Path) -> None:
    """Not what the file has at a third read."""
    main = tmp_path / "plain_acl.yml"
    write(main, "account-1")
    disk = ChangingDisk(lambda: write(main, "account-2"))
    files = AclPolicyFiles(main, tmp_path / "acl", disk=disk, run_blocking=run_inline)
    await files.load()
    write(main, "account-2", "account-3")
    disk.reads_left = 2
    policy = await files.reload()
    assert policy is not None
    assert sorted(policy.accounts) == ["account-2", "account-3"]


async def test_change_is_loaded_although_a_read_failed(autojump_clock: MockClock, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files", "plain_acl.yml")

    main = tmp_path / "plain_acl.yml"
    write(main, "account-1")
    disk = ChangingDisk(fail)
    files = AclPolicyFiles(main, tmp_path / "acl", disk=disk, run_blocking=run_inline)
    await files.load()
    for reads in range(3):
        write(main, f"account-{reads}")
        disk.reads_left = reads
        policies = []
        for _ in range(3):
            with suppress(ConfigError):
                policies.append(await files.reload())
        assert [list(policy.accounts) for policy in policies if policy is not None] == [[f"account-{reads}"]]


async def test_change_is_loaded_although_a_reload_was_cancelled(autojump_clock: MockClock, tmp_path: Path) -> None:
    main = tmp_path / "plain_acl.yml"
    write(main, "account-1")
    files = files_in(tmp_path)
    await files.load()
    write(main, "account-2")
    with trio.move_on_after(SETTLE_S / 2) as waiting:
        await files.reload()
    assert waiting.cancelled_caught
    policy = await files.reload()
    assert policy is not None
    assert list(policy.accounts) == ["account-2"]
    assert await files.reload() is None


@pytest.mark.parametrize("content", ["", "# to do\n", "accounts:\n"])
async def test_file_that_became_empty_keeps_the_policy(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    """It is being written. A file that is removed, or that was empty, is not."""
    main, other, empty = (tmp_path / name for name in ("plain_acl.yml", "acl/a.yml", "acl/b.yml"))
    write(main, "account-1")
    write(other, "account-2")
    empty.touch()
    files = files_in(tmp_path)
    guard = AclGuard(await files.load())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.keep_loaded, guard, 5.0)
        other.write_text(content)
        await trio.sleep(30)
        assert sorted(guard.policy.accounts) == ["account-1", "account-2"]
        assert caplog.text.count("acl/a.yml no longer has accounts") == 1
        fresh = tmp_path / "fresh"
        write(fresh, "account-3")
        fresh.rename(other)
        await trio.sleep(30)
        assert sorted(guard.policy.accounts) == ["account-1", "account-3"]
        other.unlink()
        await trio.sleep(30)
        assert sorted(guard.policy.accounts) == ["account-1"]
        nursery.cancel_scope.cancel()


async def test_name_that_is_not_utf_8_ends_no_node(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "plain_acl.yml", "account-1")
    files = files_in(tmp_path)
    guard = AclGuard(await files.load())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.keep_loaded, guard, 5.0)
        (tmp_path / "acl").mkdir()
        (tmp_path / "acl" / os.fsdecode(b"\xff.yml")).write_bytes(b"#" * ((1 << 20) + 1))
        await trio.sleep(30)
        assert list(guard.policy.accounts) == ["account-1"]
        assert caplog.text.count("acl.reload_failed") == 1
        nursery.cancel_scope.cancel()


async def test_file_deleted_during_a_reload(tmp_path: Path) -> None:
    def gone(path: Path) -> bool:
        raise FileNotFoundError(path)

    write(tmp_path / "plain_acl.yml", "account-1")
    assert list((await files_in(tmp_path, gone).load()).accounts) == ["account-1"]

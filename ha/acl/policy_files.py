"""The files of a policy: plain_acl.yml, and all *.yml and *.yaml in a directory and its subdirectories.

As in RocketMQ, the directory's files are read first, conf/plain_acl.yml last; if several files have the same access
key, the first one counts. Changes are detected by reading the files every few seconds (RocketMQ: AclFileWatchService,
5 s), as a time stamp can miss a change, and not every system reports a rename or an update of a mounted secret. If a
file can't be read or is invalid, or if a file that had accounts or addresses has none now, this is logged once and the
former policy stays in force, so that a half-written file has no effect.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import trio

from ha.errors import ConfigError
from ha.store.files import Disk, OsDisk, is_open_to_others
from ha.store.mapped_file import RunBlocking, run_in_thread

from .addresses import AddressPattern
from .guard import AclGuard
from .policy import Account, AclPolicy
from .yaml_file import FILE_SIZE_MAX, AclFileError, parse_acl_file

logger = logging.getLogger(__name__)

Contents = list[tuple[Path, bytes]]
FILE_COUNT_MAX = 64
DEPTH_MAX = 4
SETTLE_S = 0.2
"""Time in seconds between two reads of changed files; the files are loaded once two successive reads are equal."""


class AclPolicyFiles:
    """Reads the policy from `file` and all files in `directory`, on `disk`, and reads it again when the files change.
    Blocking calls go through `run_blocking`.

    `is_open_to_others`: returns whether every user of the machine can read a file.
    """

    def __init__(
        self,
        file: Path,
        directory: Path,
        *,
        disk: Disk,
        run_blocking: RunBlocking,
        is_open_to_others: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self.file = file
        self.directory = directory
        self._disk = disk
        self._run_blocking = run_blocking
        self._is_open_to_others = is_open_to_others
        self._loaded = b""
        """Digest of the files of the loaded policy."""
        self._seen = b""
        """Digest of the files that were loaded or rejected last."""
        self._filled: frozenset[Path] = frozenset()
        """Files of the loaded policy that have accounts or addresses."""

    async def load(self) -> AclPolicy:
        """Returns the policy of all files. Raises ConfigError, with the file name but no values, if a file can't be
        read or is invalid, or if there is no account and no address."""
        return await self._load(*await self._run_blocking(self._read))

    async def reload(self) -> AclPolicy | None:
        """Returns the policy if the files have changed since it was loaded, else None. Waits until the files stop
        changing (SETTLE_S). Raises ConfigError as `load`, but only once until the files change again. After a
        cancellation, the next call returns the policy."""
        digest, found = await self._run_blocking(self._read)
        if digest == self._seen:
            return None
        before = b""
        while digest != before:
            before = digest
            await trio.sleep(SETTLE_S)
            digest, found = await self._run_blocking(self._read)
        if digest == self._loaded:
            self._seen = digest
            return None
        return await self._load(digest, found)

    async def keep_loaded(self, guard: AclGuard, interval_s: float) -> NoReturn:
        """Replaces the policy of `guard` when the files have changed, checking every `interval_s` seconds, until
        cancelled. If they can't be used, logs an error and keeps the policy."""
        while True:
            await trio.sleep(interval_s)
            try:
                policy = await self.reload()
            except ConfigError as error:
                logger.error('acl.reload_failed reason=%r hint="the former policy stays in force"', error.reason)
                continue
            if policy is not None:
                guard.policy = policy
                logger.info("acl.reloaded file=%s accounts=%d", self.file, len(policy.accounts))

    async def _load(self, digest: bytes, found: Contents | ConfigError) -> AclPolicy:
        policy, warnings = await self._run_blocking(self._parse, digest, found)
        for warning in warnings:
            logger.warning("acl.file_warning warning=%r", warning)
        loaded: AclPolicy = policy
        return loaded

    def _parse(self, digest: bytes, contents: Contents | ConfigError) -> tuple[AclPolicy, list[str]]:
        self._seen = digest
        if isinstance(contents, ConfigError):
            raise contents
        accounts: dict[str, Account] = {}
        patterns: list[AddressPattern] = []
        warnings: list[str] = []
        filled = set()
        for path, content in contents:
            try:
                found = parse_acl_file(content)
            except AclFileError as error:
                raise ConfigError("aclFile", f"{path}: {error}", "a file like RocketMQ's plain_acl.yml") from None
            if found.accounts or found.global_white_hosts:
                filled.add(path)
            elif path in self._filled:
                raise ConfigError("aclFile", f"{path} no longer has accounts", "a file with accounts, or none")
            if self._is_open(path):
                warnings.append(f"{path}: every user of this machine can read its secret keys; chmod o= {path}")
            patterns += found.global_white_hosts
            warnings += [f"{path}: {warning}" for warning in found.warnings]
            for account in found.accounts:
                if account.access_key in accounts:
                    warnings.append(f"{path}: accessKey {account.access_key!r} is in another file, which counts")
                accounts.setdefault(account.access_key, account)
        if not accounts and not patterns:
            raise ConfigError(
                "aclFile",
                f"neither {self.file} nor a file in {self.directory} has an account, so nobody would be let in",
                "a file like RocketMQ's plain_acl.yml",
            )
        self._loaded, self._filled = digest, frozenset(filled)
        return AclPolicy(accounts.values(), patterns), warnings

    def _is_open(self, path: Path) -> bool:
        try:
            return self._is_open_to_others(path)
        except OSError:
            return False  # it was just deleted: the next reload notices

    def _read(self) -> tuple[bytes, Contents | ConfigError]:
        """Returns a digest of the files, and the files; if they can't be read, the text of the error, and the error."""
        try:
            contents = self._contents()
        except ConfigError as error:
            return repr(error.reason).encode(), error
        return _digest_of(contents), contents

    def _contents(self) -> Contents:
        try:
            paths = [*self._found(self.directory, DEPTH_MAX), self.file]
            if len(paths) > FILE_COUNT_MAX:
                raise ConfigError("aclFile", f"{len(paths)} files", f"at most {FILE_COUNT_MAX} files")
            return [(path, self._content(path)) for path in dict.fromkeys(paths) if self._disk.exists(path)]
        except OSError as error:
            raise ConfigError("aclFile", f"{error.filename}: {error.strerror}", "files that can be read") from None

    def _found(self, directory: Path, depth: int) -> Iterator[Path]:
        for name in self._disk.list_dir(directory):
            path = directory / name
            if name.startswith("."):
                continue  # a file of an editor, or the target of a mounted secret's link
            if name.endswith((".yml", ".yaml")):
                yield path
            elif depth:
                try:
                    yield from self._found(path, depth - 1)
                except NotADirectoryError:
                    continue

    def _content(self, path: Path) -> bytes:
        size = self._disk.size(path)
        if size > FILE_SIZE_MAX:
            raise ConfigError("aclFile", f"{path} has {size} bytes", f"at most {FILE_SIZE_MAX} bytes")
        return self._disk.read_bytes(path)


def system_policy_files(file: str, directory: str) -> AclPolicyFiles:
    """Returns the policy files at these paths of the machine's file system, read in worker threads."""
    return AclPolicyFiles(
        Path(file),
        Path(directory),
        disk=OsDisk(),
        run_blocking=run_in_thread,
        is_open_to_others=is_open_to_others,
    )


def _digest_of(contents: Contents) -> bytes:
    digest = hashlib.sha256()
    for path, content in contents:
        digest.update(b"%d %d " % (len(bytes(path)), len(content)))
        digest.update(bytes(path) + content)
    return digest.digest()

"""Reads a secret from a file with one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ha.errors import ConfigError
from ha.store.files import Disk, OsDisk, is_open_to_others
from ha.store.mapped_file import RunBlocking, run_in_thread

logger = logging.getLogger(__name__)

SECRET_FILE_SIZE_MAX = 4096


async def read_secret_file(
    key: str,
    file: str,
    length_min: int,
    *,
    disk: Disk | None = None,
    run_blocking: RunBlocking = run_in_thread,
    is_open_to_others: Callable[[Path], bool] = is_open_to_others,
) -> str:
    """Returns the line in `file`, without a byte order mark. Logs a warning if every user of the machine can read the
    file.

    Raises ConfigError for the configuration key `key`, without the content, if the file can't be read, exceeds
    SECRET_FILE_SIZE_MAX bytes, is not one line of UTF-8, or has fewer than `length_min` characters."""
    path, opened = Path(file), disk or OsDisk()
    accepted = f"a file with one line of at least {length_min} characters"

    def read() -> tuple[bytes, bool]:
        if opened.size(path) > SECRET_FILE_SIZE_MAX:
            raise ConfigError(key, f"{path} has more than {SECRET_FILE_SIZE_MAX} bytes", accepted)
        return opened.read_bytes(path), is_open_to_others(path)

    try:
        content, is_open = await run_blocking(read)
        text: str = content.decode("utf-8-sig").rstrip("\r\n")
    except OSError as error:
        raise ConfigError(key, f"{path}: {error.strerror or type(error).__name__}", accepted) from None
    except UnicodeDecodeError:
        raise ConfigError(key, f"{path} is not UTF-8 text", accepted) from None
    if "\n" in text or "\0" in text:
        raise ConfigError(key, f"{path} has more than one line", accepted)
    if len(text) < length_min:
        raise ConfigError(key, f"{path} has {len(text)} characters", accepted)
    if is_open:
        hint = "every user of this machine can read it"
        logger.warning('config.secret_file_exposed key=%s file=%r hint="%s"', key, str(path), hint)
    return text

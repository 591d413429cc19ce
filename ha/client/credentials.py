"""Default credentials of a client, from the environment.

    HALOG_ACCESS_KEY       the access key
    HALOG_SECRET_KEY       the secret key, or
    HALOG_SECRET_KEY_FILE  a file with the secret key in one line, which takes precedence
    HALOG_SECURITY_TOKEN   an optional security token

Used by every client without explicit credentials, also by `ha` and Spark's executors: a secret on a command line would
be visible to every user of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ha.client.options import ClientOptions
from ha.protocol.acl import AclCredentials

ACCESS_KEY = "HALOG_ACCESS_KEY"
SECRET_KEY = "HALOG_SECRET_KEY"
SECRET_KEY_FILE = "HALOG_SECRET_KEY_FILE"
SECURITY_TOKEN = "HALOG_SECURITY_TOKEN"
_FILE_SIZE_MAX = 4096


def environment_credentials(
    environment: Mapping[str, str] = os.environ, *, access_key: str | None = None, secret_key_file: str | None = None
) -> AclCredentials | None:
    """Returns the credentials in the environment, None if it has none. The arguments take precedence.

    Blocks while it reads the file. Raises ValueError, whose text contains no secret, if one of the two keys is missing
    or the file can't be used."""
    access_key = access_key or environment.get(ACCESS_KEY)
    secret_key_file = secret_key_file or environment.get(SECRET_KEY_FILE)
    secret_key = read_secret_key(secret_key_file) if secret_key_file else environment.get(SECRET_KEY)
    if not access_key and not secret_key:
        return None
    if not access_key:
        raise ValueError(f"a secret key without an access key: {ACCESS_KEY} is not set")
    if not secret_key:
        raise ValueError(f"an access key without its secret key: neither {SECRET_KEY} nor {SECRET_KEY_FILE} is set")
    return AclCredentials(access_key, secret_key, environment.get(SECURITY_TOKEN) or None)


def signing(options: ClientOptions, credentials: AclCredentials | None) -> ClientOptions:
    """Returns `options` with `credentials`. If `credentials` is None, keeps those in `options`, or if there are none,
    sets those of the environment. Raises the errors of `environment_credentials`."""
    if credentials is None:
        credentials = options.credentials or environment_credentials()
    return msgspec.structs.replace(options, credentials=credentials)


def read_secret_key(file: str) -> str:
    """Returns the single line in `file`. Raises ValueError if the file can't be read, or is not one line of UTF-8 text
    of at most 4096 bytes."""
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(_FILE_SIZE_MAX + 1)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or "\n" in text or len(content) > _FILE_SIZE_MAX:
        raise ValueError(f"{file} is not one line of text")
    return text

"""What the commands share: exit codes, the usage error, where name servers are looked for."""

from __future__ import annotations

from ha.client.credentials import environment_credentials
from ha.client.options import name_server_addresses
from ha.protocol.acl import AclCredentials

EXIT_DONE = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_STORED_WEAKLY = 3
EXIT_NOT_READY = 4
EXIT_DAMAGED = 65
EXIT_UNREADABLE = 66
EXIT_UNREACHABLE = 69
EXIT_BUG = 70
EXIT_INTERRUPTED = 130

DEFAULT_SERVERS = "127.0.0.1:9876"


class UsageError(Exception):
    """The command line can't be carried out as it is; the message says what would do."""


def checked_servers(text: str) -> list[str]:
    """The name servers in `text` (host:port joined with ';'). UsageError."""
    try:
        return list(name_server_addresses(text))
    except ValueError as error:
        raise UsageError(f"--servers: {error}") from None


def checked_credentials(access_key: str | None, secret_key_file: str | None) -> AclCredentials | None:
    """The credentials that the flags and the environment name, if any. UsageError."""
    try:
        return environment_credentials(access_key=access_key, secret_key_file=secret_key_file)
    except ValueError as error:
        raise UsageError(f"--access-key, --secret-key-file: {error}") from None

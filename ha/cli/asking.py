"""Runs a request with an Admin client, reports what it could not ask, and defines the flags --yes and --json of several
commands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import anyio
from cyclopts import Parameter

from ha.cli.exits import EXIT_DONE, EXIT_UNREACHABLE
from ha.cli.flags import ClientFlags
from ha.cli.showing import notices, safe
from ha.client import Admin, Client

AnswerT = TypeVar("AnswerT")
Yes = Annotated[bool, Parameter(negative=(), help="Apply the change. Without it, only show what would change.")]
Json = Annotated[bool, Parameter(negative=(), help="Print the result as JSON.")]


def ask(question: Callable[[Admin, Client], Awaitable[AnswerT]], flags: ClientFlags) -> AnswerT:
    """Runs `question` with an Admin and the Client that it uses, and returns its result.

    Raises UsageError for invalid flags, and the errors of `question`.
    """
    servers, options = flags.addresses(), flags.options()

    async def run() -> AnswerT:
        async with Client(servers, options=options) as client, Admin(client) as admin:
            return await question(admin, client)

    return anyio.run(run, backend="trio")


def report_unasked(brokers: list[str]) -> int:
    """Says that the result lacks these broker sets, which have no master. Returns the command's exit code."""
    if not brokers:
        return EXIT_DONE
    notices().print(
        f"ha: {safe(', '.join(brokers))}: no master is registered, so the result lacks what is stored there"
    )
    return EXIT_UNREACHABLE


def print_dry_run_notice() -> None:
    """Prints that nothing was changed."""
    notices().print("ha: dry run, nothing was changed; use --yes to apply")

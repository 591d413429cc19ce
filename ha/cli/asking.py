"""What `ha topic`, `ha group` and `ha offsets` share: an Admin for one question, and what is done only with --yes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import anyio
from cyclopts import Parameter

from ha.cli.flags import ClusterFlags, TlsFlags, WaitFlags, client_options
from ha.cli.showing import notices
from ha.client import Admin, Client

AnswerT = TypeVar("AnswerT")
Yes = Annotated[bool, Parameter(negative=(), help="Do it. Without, only what would be done is told.")]
Json = Annotated[bool, Parameter(negative=(), help="Print the result as JSON.")]


def ask(
    question: Callable[[Admin, Client], Awaitable[AnswerT]], cluster: ClusterFlags, tls: TlsFlags, wait: WaitFlags
) -> AnswerT:
    """Return the answer of `question`. UsageError, and what Admin raises."""
    servers, options = cluster.addresses(), client_options(cluster, tls, wait)

    async def run() -> AnswerT:
        async with Client(servers, options=options) as client, Admin(client) as admin:
            return await question(admin, client)

    return anyio.run(run, backend="trio")


def say_nothing_was_done() -> None:
    """Behind what would be done."""
    notices().print("ha: nothing was changed; --yes does it")

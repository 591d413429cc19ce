"""Runs async tests on both event loops that the SDK supports."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest

_TIMEOUT_S = 60.0


def on_both_backends(
    open_world: Callable[..., AbstractAsyncContextManager[Any]] | None = None, *arguments: Any, **options: Any
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs an async test under asyncio and under trio, within 60 s.

    `open_world(*arguments, **options)` is entered around it, and its value, or each item of a tuple, passed as a
    positional argument. Fixtures and parameters of pytest are keyword-only then."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(backend: str, **fixtures: Any) -> None:
            async def main() -> None:
                with anyio.fail_after(_TIMEOUT_S):
                    if open_world is None:
                        await test(**fixtures)
                        return
                    async with open_world(*arguments, **options) as world:
                        await test(*(world if isinstance(world, tuple) else (world,)), **fixtures)

            anyio.run(main, backend=backend)

        given = [
            each.replace(kind=each.KEYWORD_ONLY)
            for each in inspect.signature(test).parameters.values()
            if open_world is None or each.kind is each.KEYWORD_ONLY
        ]
        backend = inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([backend, *given])  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        parametrized: Callable[..., None] = pytest.mark.parametrize("backend", ["asyncio", "trio"])(run)
        return parametrized

    return decorate

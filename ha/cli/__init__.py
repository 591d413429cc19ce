"""The command `ha`. What each exit code means, for every command, is one table in docs/cli.md.

A command is a module, imported when it is the one that was asked for: `ha --help` loads none of them. Spark, pyarrow
and NumPy are left to those that need them, when they do.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Container, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import cyclopts
from rich.console import Console

from ha import __version__
from ha.cli.completion import completion_of
from ha.cli.exits import (
    EXIT_BUG,
    EXIT_DAMAGED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    EXIT_UNREADABLE,
    EXIT_USAGE,
    UsageError,
)
from ha.errors import (
    ArchiveConflict,
    ArchiveDamaged,
    BrokerError,
    ClientError,
    CorruptLog,
    HalogError,
    OptionError,
    ProtocolError,
    StoreLocked,
    StoreUnreadable,
)

__all__ = ["COMMANDS", "application", "main", "run"]

COMMANDS = {
    "bench": (
        "ha.cli.bench:bench",
        "Send messages to TOPIC and measure how fast they are stored, and how long each takes.",
    ),
    "consume": ("ha.cli.consume:consume", "Print the messages of TOPIC."),
    "doctor": (
        "ha.cli.doctor:doctor",
        "Check a cluster from here: ports, addresses, replication, settings that contradict one another, clocks.",
    ),
    "group": ("ha.cli.group:app", "Consumer groups: list, describe, create, delete."),
    "log": (
        "ha.cli.log:app",
        "Read a store directory without its broker. Needs pyarrow: pip install 'halog[spark]'.",
    ),
    "offsets": ("ha.cli.offsets:app", "How far consumer groups are: show, reset."),
    "produce": ("ha.cli.produce:produce", "Send messages to TOPIC."),
    "spark": (
        "ha.cli.spark:app",
        "Jobs over the log on Apache Spark. They need the extra 'spark': pip install 'halog[spark]'.",
    ),
    "status": ("ha.cli.status:status", "Show nodes, their logs, and how far the slaves are."),
    "switch": ("ha.cli.switch:switch", "Have another member of a failover group become master, and wait until it is."),
    "top": (
        "ha.cli.top:top",
        "Watch nodes and slaves: offsets, lag in bytes and seconds, rates, when a slave will have caught up.",
    ),
    "topic": ("ha.cli.topic:app", "Topics: list, describe, create, delete."),
}
"""Name of each command -> its function or App, and what the list of commands says of it."""


def application(words: Container[str] | None = None) -> cyclopts.App:
    """Return the command line. Of commands that are not among `words` (default: all are) the list alone is known yet.

    A summary given to cyclopts goes before the command's own help, so the one that is asked for comes without.
    """
    app = cyclopts.App(
        name="ha",
        version=version,
        help="Talk to halog and RocketMQ brokers.",
        help_format="plaintext",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, (home, summary) in COMMANDS.items():
        app.command(home, name=name, help=None if words is None or name in words else summary)
    app.command(completion_of(app))
    return app


def version() -> str:
    """halog's version, and whether what can be compiled runs compiled."""
    from ha.protocol.compiled import compiled_twin  # which no other answer of the list needs

    root = Path(__file__).parents[1]
    names = []
    for source in sorted(root.rglob("_*.pyx")):
        name = ".".join(("ha", *source.relative_to(root).with_name(source.stem.removeprefix("_")).parts))
        with suppress(ImportError):  # a module that needs an extra that is not installed does not run at all
            import_module(name)
            names.append(name)
    running = [name for name in names if compiled_twin(name) is not None]
    slower = ", ".join(sorted(set(names) - set(running))) if running else "all of them"
    what = "" if len(running) == len(names) else f"; not compiled, and slower: {slower}"
    return f"{__version__} ({len(running)} of {len(names)} modules run compiled{what})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command; exits with a code of the module's list."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        code = application(words)(words, exit_on_error=False, print_error=True, error_console=errors)
    except cyclopts.CycloptsError:
        return EXIT_USAGE
    except BaseException as error:
        return _explain(_cause(error), errors)
    return code if isinstance(code, int) else EXIT_DONE


def _explain(error: BaseException, errors: Console) -> int:
    """Says what happened, in one line unless it is our own bug, and returns the exit code for it."""
    match error:
        case SystemExit():
            raise error
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case BrokenPipeError():
            # The reader of our output has had enough (`ha consume … | head`); Python must not complain at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_DONE
        case UsageError() | OptionError():
            code = EXIT_USAGE
        case StoreUnreadable():
            code = EXIT_UNREADABLE
        case CorruptLog() | ArchiveDamaged():
            code = EXIT_DAMAGED
        case StoreLocked() | ArchiveConflict():
            code = EXIT_UNREACHABLE
        case BrokerError():
            code = EXIT_REFUSED
        case ClientError() | ProtocolError() | OSError():
            code = EXIT_UNREACHABLE
        case HalogError():
            code = EXIT_REFUSED
        case _:
            from ha.cli import spark

            if spark.is_job_failure(error):
                errors.print(f"ha: {spark.explain(error)}", markup=False)
                return spark.exit_code_of(error)
            traceback.print_exception(error, file=sys.stderr)
            return EXIT_BUG
    errors.print(f"ha: {error}", markup=False)
    return code


def _cause(error: BaseException) -> BaseException:
    """The first single error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

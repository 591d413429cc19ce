"""The command `ha`. What each exit code means, for every command, is one table in docs/cli.md.

A command is a module; what it imports is imported whenever `ha` runs, so Spark, pyarrow and NumPy are left to those
that need them, when they do.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import cyclopts
from rich.console import Console

from ha import __version__
from ha.cli import bench, consume, doctor, group, log, offsets, produce, spark, status, top, topic
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

__all__ = ["app", "main"]

app = cyclopts.App(
    name="ha",
    version=__version__,
    help="Talk to halog and RocketMQ brokers.",
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command(produce.produce)
app.command(consume.consume)
app.command(status.status)
app.command(top.top)
app.command(doctor.doctor)
app.command(topic.app)
app.command(group.app)
app.command(offsets.app)
app.command(bench.bench)
app.command(log.app)
app.command(spark.app)
app.command(completion_of(app))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command; exits with a code of the module's list."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns the exit code."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        code = app(arguments, exit_on_error=False, print_error=True, error_console=errors)
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
        case _ if spark.is_job_failure(error):
            errors.print(f"ha: {spark.explain(error)}", markup=False)
            return spark.exit_code_of(error)
        case _:
            traceback.print_exception(error, file=sys.stderr)
            return EXIT_BUG
    errors.print(f"ha: {error}", markup=False)
    return code


def _cause(error: BaseException) -> BaseException:
    """The first single error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""The command `ha`: produce, consume, status, and the jobs of `ha spark`.

exit code   why
0           done
1           a broker refused; its code and remark are shown. A job: what it looked at is not as it should be
2           usage
3           stored, but not as safely as SEND_OK says; a job left damaged or deleted records out
4           a node is not ready; a job had nothing to compare
65          a log or an archive is damaged
66          a store can't be read
69          nobody reachable, or no answer in time; a store that is in use
70          our own bug
130         Ctrl-C
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import cyclopts
from rich.console import Console

from ha import __version__
from ha.cli import consume, produce, spark, status
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
)
app.command(produce.produce)
app.command(consume.consume)
app.command(status.status)
app.command(spark.app)


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

"""The `ha` command. docs/cli.md lists the exit codes, which are the same for every command.

The module of a command in COMMANDS is imported only when that command runs or shows its help; `ha --help` imports none
of them. Spark, pyarrow and NumPy are imported only by the commands that need them.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Container, Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

import cyclopts

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
from ha.cli.pipes import drop_output, open_missing_streams, unread_output_dropped
from ha.cli.servers import SERVERS, server_of
from ha.cli.unreachable import explain_unreachable
from ha.cli.usage import explain_usage
from ha.errors import (
    ArchiveConflict,
    ArchiveDamaged,
    BrokerError,
    ClientError,
    CorruptLog,
    HalogError,
    LocalProtocolError,
    OptionError,
    ProtocolError,
    RouteNotFound,
    StoreLocked,
    StoreUnreadable,
)
from ha.version import __version__

__all__ = ["COMMANDS", "application", "main", "run"]

COMMANDS = {
    "acl": ("ha.cli.acl:app", "List and change users and their policies, and import plain_acl.yml."),
    "bench": (
        "ha.cli.bench:bench",
        "Send messages to TOPIC and measure throughput and latency.",
    ),
    "broker": ("ha.cli.broker:app", "Add a broker to a running cluster, or drain one."),
    "cluster": ("ha.cli.cluster:app", "Run several broker groups on this machine."),
    "consume": ("ha.cli.consume:consume", "Print the messages of TOPIC."),
    "doctor": (
        "ha.cli.doctor:doctor",
        "Check a cluster from this machine: ports, addresses, replication, contradictory settings, clocks, disks.",
    ),
    "group": ("ha.cli.group:app", "List, describe, create and delete consumer groups."),
    "log": (
        "ha.cli.log:app",
        "Read a store directory without its broker. verify and diff require the extra `log`.",
    ),
    "offsets": ("ha.cli.offsets:app", "Show and reset the offsets of consumer groups."),
    "produce": ("ha.cli.produce:produce", "Send messages to TOPIC."),
    "spark": (
        "ha.cli.spark:app",
        "Run jobs over the log on Apache Spark. Requires the extra 'spark': pip install 'halog[spark]'.",
    ),
    "status": ("ha.cli.status:status", "Show nodes, their logs, and the lag of slaves."),
    "switch": ("ha.cli.switch:switch", "Switch a failover group to another master and wait until it takes over."),
    "top": (
        "ha.cli.top:top",
        "Watch nodes and slaves: offsets, bytes and time behind, rates, estimated time to catch up.",
    ),
    "topic": ("ha.cli.topic:app", "List, describe, create and delete topics."),
}
"""Command name -> (import path of its function or App, summary in the list of commands)."""


def application(words: Container[str] | None = None) -> cyclopts.App:
    """Returns the application. A command in `words` (None: every command) shows its own help, others only a summary.

    cyclopts prefers the summary to a command's own help, so a command in `words` gets no summary.
    """
    app = cyclopts.App(
        name="ha",
        version=version,
        help="Operate halog and RocketMQ brokers.",
        help_format="markdown",
        version_format="plaintext",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, (home, summary) in COMMANDS.items():
        app.command(home, name=name, help=None if words is None or name in words else summary)
    for name in SERVERS:
        app.command(server_of(name))
    app.command(completion_of(app))
    return app


def version() -> str:
    """Returns halog's version, the number of modules that run compiled, and the names of those that don't.

    Modules that can't be imported are listed with the package that they need.
    """
    from ha.protocol.compiled import compiled_twin  # not needed by other commands

    root = Path(__file__).parents[1]
    names, unimportable = [], {}
    for source in sorted(root.rglob("_*.pyx")):
        name = ".".join(("ha", *source.relative_to(root).with_name(source.stem.removeprefix("_")).parts))
        try:
            import_module(name)
            names.append(name)
        except ModuleNotFoundError as error:  # an extra is not installed
            unimportable[name] = (error.name or "").partition(".")[0]
    running = [name for name in names if compiled_twin(name) is not None]
    slower = ", ".join(sorted(set(names) - set(running))) if running else "all"
    what = "" if len(running) == len(names) else f"; slower, not compiled: {slower}"
    for package in sorted(set(unimportable.values())):
        what += f"; needs {package}: {', '.join(name for name in unimportable if unimportable[name] == package)}"
    return f"{__version__} ({len(running)} of {len(names)} modules run compiled{what})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its exit code."""
    open_missing_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack some characters
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (default: that of the process) and returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("ha").addHandler(logging.NullHandler())  # drops the SDK's warnings: the error says the same
    try:
        code = application(words)(words, exit_on_error=False, print_error=False)
        with unread_output_dropped():
            print(end="", flush=True)  # at the end of the process, a broken pipe would be exit code 120
    except cyclopts.CycloptsError as error:
        _print(explain_usage(error))
        return EXIT_USAGE
    except BaseException as error:
        return _explain(_cause(error))
    return code if isinstance(code, int) else EXIT_DONE


def _explain(error: BaseException) -> int:
    """Prints the error, with a traceback only for a bug in halog, and returns its exit code.

    Prints nothing for Ctrl-C and a broken pipe. Re-raises SystemExit, unless a broken pipe caused it.
    """
    match error:
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case BrokenPipeError() | SystemExit(__context__=BrokenPipeError()):  # rich raises the latter, with code 1
            drop_output(sys.stdout.fileno())  # also keeps Python from reporting it at exit
            return EXIT_DONE
        case SystemExit():
            raise error
        case RouteNotFound():
            from ha.cli.names import explain_missing_topic

            _print(explain_missing_topic(error))
            return EXIT_USAGE
        case UsageError() | OptionError() | LocalProtocolError():
            code = EXIT_USAGE
        case UnicodeEncodeError():
            _print("an argument of the command is not UTF-8 text")
            return EXIT_USAGE
        case StoreUnreadable():
            code = EXIT_UNREADABLE
        case CorruptLog() | ArchiveDamaged():
            code = EXIT_DAMAGED
        case StoreLocked() | ArchiveConflict():
            code = EXIT_UNREACHABLE
        case BrokerError():
            code = EXIT_REFUSED
        case ClientError():
            _print(explain_unreachable(error))
            return EXIT_UNREACHABLE
        case ProtocolError() | OSError():
            code = EXIT_UNREACHABLE
        case HalogError():
            code = EXIT_REFUSED
        case _:
            from ha.cli.spark import failures

            if failures.is_job_failure(error):
                _print(failures.explain(error))
                return failures.exit_code_of(error)
            from ha.text_log import indented

            print(indented("".join(traceback.format_exception(error))), file=sys.stderr)
            return EXIT_BUG
    _print(str(error))
    return code


def _print(text: str) -> None:
    """Prints a message on standard error. Control characters, which a peer's text can contain, are escaped."""
    from ha.cli.showing import notices

    notices().print(f"ha: {text}")


def _cause(error: BaseException) -> BaseException:
    """Returns the first exception that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

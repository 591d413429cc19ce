"""`ha master`, `ha slave`, `ha member`, `ha namesrv`, `ha proxy`: the same as `python -m ha.master` and so on."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import cyclopts
from cyclopts import Parameter

SERVERS = {
    "master": "Run a master, and a name server inside it unless namesrvAddr is set.",
    "slave": "Run a slave, by default of a master on this machine.",
    "member": "Run a member of a failover group.",
    "namesrv": "Run a name server.",
    "proxy": "Run a front for RocketMQ 5's gRPC clients.",
}
"""Command name -> summary; `ha.NAME` is the module that runs it."""

_DETAILS = """
Takes --config FILE, --set KEY=VALUE, --log-format text|json and --print-config. Prints a READY line with its addresses
when it serves, and logs to stderr; SIGTERM or Ctrl-C stops it.
"""


def server_of(name: str) -> cyclopts.App:
    """Returns the command that runs the server `name`. Its module parses the arguments, --help included."""
    summary = f"{SERVERS[name]} Same as `python -m ha.{name}`."
    command = cyclopts.App(
        name=name, help=f"{summary}\n{_DETAILS}", help_format="markdown", help_flags=(), version_flags=()
    )

    @command.default
    def server(
        *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    ) -> NoReturn:
        run_server(name, arguments)

    return command


def run_server(name: str, arguments: tuple[str, ...]) -> NoReturn:
    """Replaces this process with the server's, so that its memory holds no modules of the command line.

    With -P, Python does not import files in the current folder that are named like modules.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", f"ha.{name}", *arguments])

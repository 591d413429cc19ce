"""`ha completion`: prints shell completion scripts."""

from __future__ import annotations

from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from ha.cli.exits import EXIT_DONE

Shell = Literal["bash", "zsh", "fish"]


def completion_of(app: cyclopts.App) -> cyclopts.App:
    """Returns the command that prints the completion script of `app`."""
    command = cyclopts.App(name="completion", help="Print a shell completion script for `ha`.", help_format="markdown")

    @command.default
    def completion(shell: Annotated[Shell, Parameter(help="bash, zsh or fish.")], /) -> int:
        """Print the completion script for SHELL. For bash, add this to ~/.bashrc: source <(ha completion bash)."""
        print(app.generate_completion(shell=shell))
        return EXIT_DONE

    return command

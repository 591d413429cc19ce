"""`ha completion`: what a shell needs to complete commands and flags."""

from __future__ import annotations

from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from ha.cli.exits import EXIT_DONE

Shell = Literal["bash", "zsh", "fish"]


def completion_of(app: cyclopts.App) -> cyclopts.App:
    """The command, which completes `app`."""
    command = cyclopts.App(name="completion", help="Print a shell's completion of `ha`.", help_format="plaintext")

    @command.default
    def completion(shell: Annotated[Shell, Parameter(help="bash, zsh or fish.")], /) -> int:
        """Print what completes `ha` in SHELL, for its start-up file: source <(ha completion bash)."""
        print(app.generate_completion(shell=shell))
        return EXIT_DONE

    return command

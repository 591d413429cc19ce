"""Runs a random test from a seed, in a directory that is kept if the test fails."""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType

from scripts.directories import add_directory_option, create_directory
from scripts.interruption import EXIT_CODE, first_cause, interrupt_on_signals

Say = Callable[[str], None]
"""Prints a line with the time since the start"""
console = Console(highlight=False, soft_wrap=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --seed and --directory."""
    parser.add_argument("--seed", type=int, help="seed of the first run (default: random)")
    add_directory_option(parser)


def run_seeded(options: argparse.Namespace, name: str, test: Callable[[int, Path, Say], RenderableType]) -> int:
    """Call `test` with seed and directory, print what it returns, and delete the directory; return 0.

    After an AssertionError return 1, keep the directory, and print the error and the seed. After SIGINT, SIGTERM or
    SIGHUP stop all processes, do the same, and return 130.
    """
    interrupt_on_signals()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    directory = create_directory(options.directory, name)
    began_s = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began_s:7.1f} s  {text}", markup=False)

    try:
        shown = test(seed, directory, say)
    except BaseException as error:
        cause = first_cause(error)
        if isinstance(cause, KeyboardInterrupt):
            said, code = "Interrupted; all processes were stopped", EXIT_CODE
        elif isinstance(cause, AssertionError):
            said, code = str(cause), 1
        else:
            raise
        console.print(f"\n{said}", style="bold red", markup=False)
        console.print(f"Seed {seed}. All files are in {directory}", markup=False)
        return code
    shutil.rmtree(directory, ignore_errors=True)
    console.print(shown)
    return 0

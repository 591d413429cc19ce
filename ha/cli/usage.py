"""Explains in one line what is wrong with a command line."""

from __future__ import annotations

import difflib

import cyclopts


def explain_usage(error: cyclopts.CycloptsError) -> str:
    """Returns a message that describes a usage error and lists the accepted commands, or refers to --help."""
    command = " ".join(("ha", *(error.command_chain or ())))
    words = error.unused_tokens or []
    if isinstance(error, cyclopts.UnknownCommandError) and error.app is not None and words:
        names = sorted(name for name in error.app if not name.startswith("-"))
        near = difflib.get_close_matches(words[0], names, n=1)
        guess = f" did you mean {near[0]!r}?" if near else ""
        return f"{words[0]!r} is not a command;{guess} {command} has {', '.join(names)}"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return f"unexpected argument {words[0]!r}; see {command} --help"
    error.verbose = False
    text = str(error)
    return f"{text[0].lower()}{text[1:].rstrip('.')}; see {command} --help"

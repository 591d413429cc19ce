"""Formats log records as text, one line each: UTC time, level, logger, message.

Values may come from peers: a line break in the name of a group could begin a line that looks like another record, and
an escape sequence could change how a terminal shows the previous lines. So all characters that are not printable are
escaped, in every record. A traceback follows in lines that begin with a tab, which no record does.
"""

from __future__ import annotations

import logging
import time


def escape(text: str) -> str:
    """Replaces each character that is not printable, line breaks of all kinds included, by its Python escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def indented(text: str) -> str:
    """Escapes each line of a traceback, which can quote text of peers, and begins it with a tab."""
    return "\n".join(f"\t{escape(line)}" for line in text.splitlines())


class TextFormatter(logging.Formatter):
    """Formats a record as one line, followed by the indented lines of its traceback, if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns `record` as text, without a line break at the end."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{moment}.{int(record.msecs):03}Z {record.levelname} {record.name}"
        lines = [escape(f"{head} {record.getMessage()}")]
        if record.exc_info:
            lines.append(indented(self.formatException(record.exc_info)))
        return "\n".join(lines)

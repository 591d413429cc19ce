"""Writes files in Prometheus' text format, for the textfile collector of its node exporter."""

from __future__ import annotations

import logging
from pathlib import Path

from ha.spark.jobs.synced import replace_file

logger = logging.getLogger("ha.spark")


def quoted(text: str) -> str:
    """Returns `text` escaped for use as a label value."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def replace_metrics(file: Path, text: str) -> None:
    """Replaces the content of `file` atomically, so that the collector never reads a partial file.

    If writing fails, a warning is logged and the old file remains.
    """
    try:
        replace_file(file, text.encode())
    except OSError as error:
        logger.warning("metrics.not_written file=%r error=%r", str(file), str(error))

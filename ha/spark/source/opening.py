"""Opens the `LogSource` that the options name."""

from __future__ import annotations

from contextlib import ExitStack

from ha.spark.source.local import LocalSource
from ha.spark.source.log_source import LogSource
from ha.spark.source.options import SourceOptions


def open_source(options: SourceOptions) -> LogSource:
    """Opens the source that the option `path` or `servers` names. If requested, wraps it in a source that reads an
    archive first (option `archive`) or omits uncommitted rows (option `isolation`).

    Raises OptionError; StoreUnreadable, OSError or ClientError if the log can't be read; ArchiveError if the archive
    can't be read.
    """
    source = _open(options)
    if options.archive is not None:
        from ha.spark.source.archived_source import ArchivedSource

        with ExitStack() as undo:
            undo.callback(source.close)
            archived = ArchivedSource(source, options)
            undo.pop_all()
        return archived
    if options.isolation == "read_uncommitted":
        return source
    from ha.spark.sink.committed_source import CommittedSource
    from ha.spark.sink.options import COMMIT_TOPIC

    commit_topic = options.commit_topic or COMMIT_TOPIC
    return CommittedSource(source, stops_at_pending=options.kind == "stream", commit_topic=commit_topic)


def _open(options: SourceOptions) -> LogSource:
    if options.servers:
        from ha.spark.source.network import open_network_source  # the client is needed only here

        return open_network_source(options)
    return LocalSource(options.paths, options.broker_names)

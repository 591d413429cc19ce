"""Finds which brokers the directories of the option `path` belong to, and which of them are replicas of one log.

A broker has the name that its store records. With `servers` it has the same name, so a checkpoint is valid for both. A
store without a name, such as RocketMQ's, is named after its directory. Earlier versions named all stores that way, so
the directories' names are aliases, which stay valid in checkpoints and options.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import msgspec

from ha.arrow.replicas import is_same_log, stored_broker_name
from ha.errors import OptionError, StoreUnreadable
from ha.spark.source.log_source import Brokers

Paths = tuple[str, ...]
"""Directories with replicas of one log, in the order in which they are tried."""


class Stores(msgspec.Struct, frozen=True):
    """The store directories that a query reads. `replicas`: broker name -> directories, in the order given. `brokers`:
    the names, with their aliases."""

    replicas: dict[str, Paths]
    brokers: Brokers


def find_stores(paths: Sequence[str], broker_names: Sequence[str] = ()) -> Stores:
    """Returns the stores that `paths` name; globs are expanded and sorted.

    With `broker_names`, directories with the same name count as replicas. Raises StoreUnreadable for a glob that
    matches no directory, and StoreUnreadable or OSError if logs can't be compared because one can't be read. Raises
    OptionError if there are names, but not one for each directory; if replicas of one log have different names, or
    different logs the same; and without names, if different logs would be named after directories with the same name.
    """
    directories = _directories(paths)
    if broker_names and len(broker_names) != len(directories):
        reason = f"{len(broker_names)} names for {len(directories)} directories"
        raise OptionError("brokerName", reason, "a name for each directory, in order")
    same = _logs(directories)
    names = list(broker_names) or _own_names(directories, same)
    replicas: dict[str, Paths] = {}
    for name, directory in zip(names, directories, strict=True):
        replicas[name] = (*replicas.get(name, ()), directory)
    for one, other in combinations(range(len(directories)), 2):
        if (same[one] == same[other]) and names[one] != names[other]:
            raise OptionError(
                "brokerName",
                f"{directories[one]} and {directories[other]} are replicas of one log",
                "the same name for both, or no names",
            )
        if (
            same[one] != same[other]
            and names[one] == names[other]
            and is_same_log(Path(directories[one]), Path(directories[other])) is False
        ):
            raise OptionError(
                "brokerName",
                f"{directories[one]} and {directories[other]} are different logs, and both are named {names[one]!r}",
                "a different name for each log",
            )
    aliases = {Path(directory).name: name for name, directory in zip(names, directories, strict=True)}
    return Stores(replicas, Brokers(replicas, aliases={} if broker_names else aliases))


def _directories(paths: Sequence[str]) -> list[str]:
    directories: list[str] = []
    for path in paths:
        found = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
        found = [name for name in found if Path(name).is_dir()] if glob.has_magic(path) else found
        if not found:
            raise StoreUnreadable(Path(path), "no directory matches it")
        directories += [str(Path(name).resolve()) for name in found]
    return directories


def _logs(directories: Sequence[str]) -> list[int]:
    """Returns a number for each directory, equal for replicas of one log."""
    logs = list(range(len(directories)))
    for one, other in combinations(range(len(directories)), 2):
        if is_same_log(Path(directories[one]), Path(directories[other])):
            logs = [logs[one] if log == logs[other] else log for log in logs]
    return logs


def _own_names(directories: Sequence[str], logs: Sequence[int]) -> list[str]:
    """Returns the name of each directory's broker: the stored one, else the name of the log's first directory.

    If different logs have the same stored name, they belong to different clusters, and that name is not used. Raises
    OptionError if two logs would be named after directories with the same name.
    """
    first: dict[int, str] = {}
    stored: dict[int, str] = {}
    for log, directory in zip(logs, directories, strict=True):
        first.setdefault(log, directory)
        name = stored_broker_name(Path(directory))
        if name:
            stored.setdefault(log, name)
    for one, other in combinations(dict(stored).items(), 2):
        logs_of_name = one[0], other[0]
        if one[1] == other[1] and is_same_log(*(Path(first[log]) for log in logs_of_name)) is False:
            stored.update((log, Path(first[log]).name) for log in logs_of_name)
    names = {log: stored.get(log) or Path(directory).name for log, directory in first.items()}
    unnamed = [name for log, name in names.items() if log not in stored or name == Path(first[log]).name]
    for name in unnamed:
        if unnamed.count(name) > 1:
            raise OptionError(
                "brokerName",
                f"it is missing, and {unnamed.count(name)} directories are called {name!r}",
                "a name for each path, in order; the same name twice means replicas of one log",
            )
    return [names[log] for log in logs]

"""Which brokers the directories of the option `path` belong to, and which of them are replicas of one log.

A broker's name is the one that its store states, as by `servers`; a checkpoint holds for both. A store without one,
such as RocketMQ's, is named after its directory, as all were by earlier versions: these names stay valid in checkpoints
and options, as aliases.
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
"""The replicas of one log, best first."""


class Stores(msgspec.Struct, frozen=True):
    """Broker name -> directories of its replicas, in the order given; and the brokers' names with their aliases."""

    replicas: dict[str, Paths]
    brokers: Brokers


def find_stores(paths: Sequence[str], broker_names: Sequence[str] = ()) -> Stores:
    """Return the stores that `paths` name; globs are expanded and sorted.

    StoreUnreadable for a path that matches nothing. OptionError unless there is one name for each directory, or none at
    all, or if replicas of one log have different names, or different logs one name.
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
    """Return a number for each directory; equal ones for replicas of one log."""
    logs = list(range(len(directories)))
    for one, other in combinations(range(len(directories)), 2):
        if is_same_log(Path(directories[one]), Path(directories[other])):
            logs = [logs[one] if log == logs[other] else log for log in logs]
    return logs


def _own_names(directories: Sequence[str], logs: Sequence[int]) -> list[str]:
    """Return the name of each directory's broker: the stored one, else that of the log's first directory.

    If different logs have the same stored name, they are of several clusters, and that name is not used.
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

"""Selects the files of an archive to merge: small neighbours in physical order, but no large file with small ones.

A run of neighbours is merged if its largest file is at most half of the run's size. Each row is then rewritten about
log2(target size / size of the file in which it was archived) times in total, however many small files continuous
archiving adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ha.spark.jobs.archive.manifest import ArchivedFile


def plan_merges(
    files: Iterable[ArchivedFile], *, target_file_bytes: int, files_min: int
) -> list[tuple[ArchivedFile, ...]]:
    """Returns runs of files to be merged, each of one topic and day and in physical order.

    A run has at least `files_min` files, or at least two if together they reach `target_file_bytes`, which ends the
    run. Files of at least half that size are not merged, and separate runs. A run also ends where the queue offsets of
    a topic begin again, so that the manifest still shows that the topic was created again (`State.created_again`).
    """
    partitions: dict[tuple[str, str], list[ArchivedFile]] = defaultdict(list)
    for file in files:
        partitions[file.topic or "", str(file.date)].append(file)
    runs: list[tuple[ArchivedFile, ...]] = []
    for _, members in sorted(partitions.items()):
        small: list[ArchivedFile] = []
        highest: dict[int, int] = {}
        for file in sorted(members, key=lambda each: each.physical_begin):
            if file.bytes >= target_file_bytes / 2:
                runs.extend(_worthwhile(small, files_min))
                small = []
                continue
            if any(span.first <= highest.get(span.queue_id, -1) for span in file.queues):
                runs.extend(_worthwhile(small, files_min))
                small, highest = [], {}
            highest.update((span.queue_id, span.last) for span in file.queues)
            small.append(file)
            if sum(each.bytes for each in small) >= target_file_bytes:
                runs.extend(_worthwhile(small, files_min=2))  # together they fill a file
                small = []
        runs.extend(_worthwhile(small, files_min))
    return runs


def _worthwhile(run: list[ArchivedFile], files_min: int) -> list[tuple[ArchivedFile, ...]]:
    if len(run) < files_min:
        return []
    sizes = [file.bytes for file in run]
    if 2 * max(sizes) <= sum(sizes):
        return [tuple(run)]
    at = sizes.index(max(sizes))
    return _worthwhile(run[:at], files_min) + _worthwhile(run[at + 1 :], files_min)

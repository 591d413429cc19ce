"""Parquet: files by the executors, commits by the manifest."""

from __future__ import annotations

import msgspec
from pyspark import TaskContext

from ha.spark.jobs.archive.base import ArchiveJob
from ha.spark.jobs.archive.compaction import plan_merges
from ha.spark.jobs.archive.files import (
    MergeTask,
    RangeTask,
    Written,
    merge_files,
    write_range,
)
from ha.spark.jobs.archive.manifest import Commit, Hole


class ParquetJob(ArchiveJob):
    """Files by the executors, commits by the manifest."""

    def append(self, ranges: list[tuple[int, int]], begin: int, end: int, holes: tuple[Hole, ...]) -> None:
        """See ArchiveJob."""
        sequence = self.state.sequence + 1
        run = self.manifest.stage(sequence)
        written: list[Written] = self.run(
            _write_range, self.tasks(ranges, run, sequence), self.range_progress(begin, end)
        )
        self._commit(
            self.commit_of(
                "append",
                end,
                added=tuple(file for each in written for file in each.files),
                holes=holes,
                damaged=sum(each.damaged for each in written),
                last=next((each.last for each in reversed(written) if each.last is not None), None),
            )
        )
        self.result.rows += sum(each.rows for each in written)
        self.result.damaged += sum(each.damaged for each in written)

    def compact(self) -> None:
        """See ArchiveJob."""
        options = self.options
        runs = plan_merges(
            self.state.files.values(),
            target_file_bytes=options.target_file_bytes,
            files_min=options.compact_files_min,
        )
        for start in range(0, len(runs), self.slots):
            chosen = runs[start : start + self.slots]
            sequence = self.state.sequence + 1
            run = self.manifest.stage(sequence)
            files = self.tasks([(0, 0)], run, sequence)[0].files
            tasks = [
                MergeTask(
                    archive=str(self.manifest.archive),
                    broker_name=self.reader.broker_name,
                    run=run,
                    sequence=sequence,
                    number=number,
                    sources=sources,
                    # A run may exceed the target by its last file, and must still become one file.
                    files=msgspec.structs.replace(files, target_file_bytes=2 * files.target_file_bytes),
                )
                for number, sources in enumerate(chosen)
            ]
            written: list[Written] = self.run(_merge_files, tasks, lambda done, total: None)
            merged = tuple(file.path for sources in chosen for file in sources)
            assert self.state.covered_end is not None
            added = tuple(file for each in written for file in each.files)
            self._commit(self.commit_of("compact", self.state.covered_end, added=added, removed=merged))
            self.result.merged_files += len(merged)
            self.progress("compact", start + len(chosen), len(runs))

    def _commit(self, commit: Commit) -> None:
        self.manifest.commit(commit)
        self.manifest.apply(commit)
        self.manifest.clear_staging()
        self.state.fold(commit)
        self.result.commits += 1
        self.result.files += len(commit.added)
        self.result.file_bytes += sum(file.bytes for file in commit.added)


def _write_range(task: RangeTask) -> Written:
    return write_range(task, task_attempt())


def _merge_files(task: MergeTask) -> Written:
    return merge_files(task, task_attempt())


def task_attempt() -> int:
    """Return a number that no other attempt at a task of this application has; 0 outside of Spark."""
    context = TaskContext.get()
    return context.taskAttemptId() if context is not None else 0

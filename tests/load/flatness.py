"""What counts as growth, in runs whose load is the same all the time."""

from collections import Counter
from collections.abc import Sequence

from tests.load.real_soak import Row
from tests.load.virtual_soak import Sample

SETTLED_SHARE = 0.25
"""Warm-up of a real run, until caches and allocators are filled."""

OWN_GROWTH_MAX = 0.10
OWN_GROWTH_FREE = 4 << 20
"""Allowed growth of private memory, as a fraction or in bytes: fragmentation, not a leak per request."""

SETTLED_H = 1.5
"""Of a virtual run: by then retention deletes as much as comes."""

OBJECT_GROWTH_MAX = 0.005
"""Tracked objects and memory blocks: what is in flight at a full hour differs by less."""


def growth_of_rows(rows: Sequence[Row]) -> list[str]:
    """What is larger at the end of a real run than once it had settled, in words."""
    settled, last = rows[int(len(rows) * SETTLED_SHARE)], rows[-1]
    found = []
    for name in ("own_bytes", "slave_own_bytes_max"):
        before, after = getattr(settled, name), getattr(last, name)
        if after > before + max(before * OWN_GROWTH_MAX, OWN_GROWTH_FREE):
            found.append(f"{name} from {before:,} to {after:,}")
    for name in ("descriptor_count", "task_count", "slave_descriptors_max", "slave_tasks_max"):
        before, after = getattr(settled, name), getattr(last, name)
        if after > before + 8:  # requests to the admin port, and files that are just being synced
            found.append(f"{name} from {before} to {after}")
    return found


def growth_of_samples(samples: Sequence[Sample]) -> list[str]:
    """What is larger at the end of a virtual run than once it had settled, in words."""
    settled, last = next(sample for sample in samples if sample.hour >= SETTLED_H), samples[-1]
    assert last.hour > settled.hour
    found = []
    if last.task_count != settled.task_count:
        found.append(f"tasks from {settled.task_count} to {last.task_count}")
    for name in ("object_count", "block_count"):
        before, after = getattr(settled, name), getattr(last, name)
        if after > before * (1 + OBJECT_GROWTH_MAX):
            kinds = (Counter(last.kinds) - Counter(settled.kinds)).most_common(5)
            found.append(f"{name} from {before:,} to {after:,}; most of all {kinds}")
    for name, before in settled.tables.items():
        after = last.tables[name]
        if after > before + max(3, before * 0.1):
            found.append(f"{name} from {before} to {after}")
    return found

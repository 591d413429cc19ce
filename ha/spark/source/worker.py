"""What a task does for the Python process that it runs in."""

from __future__ import annotations

import gc
from functools import cache

import numpy as np

_BLOCK_BYTES = 16 << 20


@cache
def freeze_imports() -> None:
    """Take what the process has made so far, which is mostly modules, out of the garbage collector's sight; once.

    Spark's worker collects garbage after each task. Over the 50,000 objects of NumPy, pyarrow and PySpark that takes 20
    ms of a processor; it was 9 % of the samples in a profile of a worker that read 256 MiB a task.
    """
    gc.freeze()


@cache
def keep_heap() -> None:
    """Have the process keep up to 32 MiB that it frees, and use them again; once.

    NumPy's arrays of a batch with properties are some 6 MB. glibc gives that much back to the kernel each time it is
    free and has every page of it made anew for the next batch, which took longer than building the maps in it. It
    keeps twice the size of the largest block that it has seen freed; an untouched one costs nothing.
    """
    np.empty(_BLOCK_BYTES, np.uint8)

"""Entries of consume queues (`store_files.py` describes them) as a NumPy type."""

from __future__ import annotations

import numpy as np

ENTRY_DTYPE = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])

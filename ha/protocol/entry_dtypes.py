"""Entries of consume queues and index files (`store_files.py` says what they are) as NumPy types."""

from __future__ import annotations

import numpy as np

ENTRY_DTYPE = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
INDEX_ENTRY_DTYPE = np.dtype([("key_hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])

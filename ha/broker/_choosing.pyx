"""Compiled twin of `choose` in choosing.py."""

from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

import array

from ha.protocol._layout cimport BLANK_SIZE, ENTRY_SIZE, read_int64, read_uint32

from ha.broker.choosing import Choice, Wanted, WrongEntryError

cdef array.array _NUMBERS = array.array("q")


def choose(bytes entries not None, long long queue_offset, limits not None, tags_codes):
    cdef long long count_max, bytes_max, log_start, log_end, place, previous_end = 0, total_size = 0
    cdef int size
    cdef bint has_removed = False
    cdef Py_ssize_t number = 0, found = 0, count = PyBytes_GET_SIZE(entries) // ENTRY_SIZE
    cdef const unsigned char *at = <const unsigned char *>PyBytes_AS_STRING(entries)
    count_max, bytes_max, log_start, log_end = limits
    cdef array.array queue_offsets = array.clone(_NUMBERS, min(count, count_max), False)
    cdef array.array places = array.clone(_NUMBERS, min(count, count_max), False)
    cdef array.array sizes = array.clone(_NUMBERS, min(count, count_max), False)
    while number < count:
        place, size = read_int64(at), <int>read_uint32(at + 8)
        if size != BLANK_SIZE:
            if size <= 0 or place < previous_end or place > log_end - size:
                if found:
                    break
                raise WrongEntryError(queue_offset + number)
            previous_end = place + size
        if place < log_start:
            has_removed = True
        elif size != BLANK_SIZE and (tags_codes is None or read_int64(at + 12) in tags_codes):
            if found and (found == count_max or total_size + size > bytes_max):
                break
            total_size += size
            queue_offsets.data.as_longlongs[found] = queue_offset + number
            places.data.as_longlongs[found] = place
            sizes.data.as_longlongs[found] = size
            found += 1
        number += 1
        at += ENTRY_SIZE
    for column in (queue_offsets, places, sizes):
        array.resize(column, found)
    return Choice(Wanted(queue_offsets, places, sizes), number, has_removed)

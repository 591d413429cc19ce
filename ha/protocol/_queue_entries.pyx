"""Compiled twin of `count_entries` in queue_entries.py."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

from ha.protocol._layout cimport BLANK_SIZE, ENTRY_SIZE, read_int64, read_uint32


def count_entries(bytes raw not None, unsigned long long last_end):
    cdef const unsigned char *at = <const unsigned char *>PyBytes_AS_STRING(raw)
    cdef Py_ssize_t size_of_raw = PyBytes_GET_SIZE(raw), count = 0, place
    cdef unsigned long long physical_offset
    cdef int size
    cdef bint is_end = True
    if size_of_raw % ENTRY_SIZE:
        raise ValueError("no whole entries")
    with nogil:
        for place in range(size_of_raw // ENTRY_SIZE):
            physical_offset = <unsigned long long>read_int64(at)
            size = <int>read_uint32(at + 8)
            if physical_offset >> 63 or size <= 0:
                break
            if size != BLANK_SIZE:
                if physical_offset < last_end:
                    is_end = False
                    break
                last_end = physical_offset + <unsigned long long>size
            count += 1
            at += ENTRY_SIZE
    return count, last_end, is_end

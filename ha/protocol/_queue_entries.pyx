"""The compiled twin of what counts the entries of a queue (queue_entries.py; store_files.py says where what stands)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

cdef enum:
    ENTRY_SIZE = 20
    BLANK_SIZE = 0x7FFFFFFF


cdef inline unsigned int _uint32(const unsigned char *at) noexcept nogil:
    return <unsigned int>at[0] << 24 | <unsigned int>at[1] << 16 | <unsigned int>at[2] << 8 | at[3]


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
            physical_offset = <unsigned long long>_uint32(at) << 32 | _uint32(at + 4)
            size = <int>_uint32(at + 8)
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

"""Compiled twins of the functions in index_entries.py."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

from ha.protocol._layout cimport (
    INDEX_ENTRY_SIZE, KEY_SIZE, PAGE_SLOTS, SECONDS_MAX, read_int64, read_uint32, write_int64, write_uint32,
)

cdef inline int _hash_at(const char *at) noexcept:
    cdef int key_hash
    memcpy(&key_hash, at, 4)
    return key_hash & 0x7FFFFFFF


def chain_keys(bytes keys not None, slots not None, int first, long long begin_ms):
    cdef int[::1] newest = slots
    cdef int slot_count = <int>newest.shape[0]
    cdef Py_ssize_t count = PyBytes_GET_SIZE(keys) // KEY_SIZE, place, free_count = 0
    cdef bytes entries = PyBytes_FromStringAndSize(NULL, count * INDEX_ENTRY_SIZE)
    cdef const char *key = PyBytes_AS_STRING(keys)
    cdef unsigned char *at = <unsigned char *>PyBytes_AS_STRING(entries)
    cdef long long physical_offset, store_ms, seconds
    cdef int slot, previous
    if not slot_count:
        raise ZeroDivisionError("no slots")
    for place in range(count):
        memcpy(&physical_offset, key + 4, 8)
        memcpy(&store_ms, key + 12, 8)
        seconds = (store_ms - begin_ms) // 1000 if begin_ms > 0 and store_ms > begin_ms else 0
        slot = _hash_at(key) % slot_count
        previous = newest[slot]
        free_count += previous == 0
        write_uint32(at, <unsigned int>_hash_at(key))
        write_int64(at + 4, physical_offset)
        write_uint32(at + 12, <unsigned int>min(seconds, SECONDS_MAX))
        write_uint32(at + 16, <unsigned int>previous)
        newest[slot] = first + <int>place
        if first + place == 1:
            begin_ms = store_ms
        key += KEY_SIZE
        at += INDEX_ENTRY_SIZE
    # Restores the slots: they may point to entries only once these are written. No other thread ran meanwhile.
    for place in range(count):
        key -= KEY_SIZE
        at -= INDEX_ENTRY_SIZE
        newest[_hash_at(key) % slot_count] = <int>read_uint32(at + 16)
    return entries, free_count


def link_slots(bytes keys not None, slots not None, int first, bytearray dirty_pages not None):
    cdef int[::1] newest = slots
    cdef unsigned char[::1] pages = dirty_pages
    cdef int slot_count = <int>newest.shape[0], slot
    cdef Py_ssize_t count = PyBytes_GET_SIZE(keys) // KEY_SIZE, place
    cdef const char *key = PyBytes_AS_STRING(keys)
    if not slot_count:
        raise ZeroDivisionError("no slots")
    for place in range(count):
        slot = _hash_at(key) % slot_count
        newest[slot] = first + <int>place
        pages[slot // PAGE_SLOTS] = 1
        key += KEY_SIZE


def count_used(slots not None, long long stop):
    cdef int[::1] leads = slots
    cdef Py_ssize_t place, used_count = 0
    cdef int least = 0, most = 0
    if not leads.shape[0]:
        raise ValueError("no slots")
    with nogil:
        for place in range(leads.shape[0]):
            least = min(least, leads[place])
            most = max(most, leads[place])
            used_count += leads[place] != 0
    return used_count if least >= 0 and most < stop else -1


def follow_chains(bytes entries not None, newest_of_slots not None, int first, long long last_physical):
    cdef int[::1] newest = newest_of_slots
    cdef int slot_count = <int>newest.shape[0], key_hash, previous, slot
    cdef Py_ssize_t count = PyBytes_GET_SIZE(entries) // INDEX_ENTRY_SIZE, place, fitting_count = 0, free_count = 0
    cdef const unsigned char *at = <const unsigned char *>PyBytes_AS_STRING(entries)
    cdef long long physical_offset
    if not slot_count:
        raise ZeroDivisionError("no slots")
    with nogil:
        for place in range(count):
            key_hash, previous = <int>read_uint32(at), <int>read_uint32(at + 16)
            physical_offset = read_int64(at + 4)
            if key_hash < 0 or <int>read_uint32(at + 12) < 0 or physical_offset < last_physical:
                break
            slot = key_hash % slot_count
            if previous != newest[slot]:
                break
            free_count += previous == 0
            newest[slot] = first + <int>place
            last_physical = physical_offset
            fitting_count += 1
            at += INDEX_ENTRY_SIZE
    return fitting_count, free_count, last_physical

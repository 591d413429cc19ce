"""Compiled twin of `usual_properties` in stored_properties.py."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.string cimport memchr, memcmp, memcpy

cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(object text)
    void *PyUnicode_DATA(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)


cdef inline bint _begins(const char *at, Py_ssize_t size, const char *mark, Py_ssize_t mark_size) noexcept:
    return size >= mark_size and memcmp(at, mark, mark_size) == 0


cdef inline bint _is_unusual(const char *at, Py_ssize_t size) noexcept:
    """Returns whether `usual_properties` does not handle this pair."""
    cdef char first = at[0]
    if first == c"T":
        return (_begins(at, size, b"TRACE_ON\x01", 9) or _begins(at, size, b"TRAN_MSG\x01", 9)
                or _begins(at, size, b"TIMER_D", 7))
    if first == c"C":
        return _begins(at, size, b"CLUSTER\x01", 8)
    if first == c"D":
        return _begins(at, size, b"DELAY\x01", 6)
    if first == c"M":
        return _begins(at, size, b"MSG_REGION\x01", 11)
    return first == c"W" and _begins(at, size, b"WAIT\x01false", 10)


def usual_properties(str text not None, bytes suffix not None, unique_id):
    cdef const char *begin
    cdef const char *at
    cdef const char *end
    cdef const char *stop
    cdef char *to
    cdef Py_ssize_t size, added = 0
    cdef bytes stored
    cdef str own_key = None, unique_key
    if not PyUnicode_IS_ASCII(text):
        return None
    begin = at = <const char *>PyUnicode_DATA(text)
    size = PyUnicode_GET_LENGTH(text)
    end = begin + size
    while at < end:
        stop = <const char *>memchr(at, 2, end - at)
        if stop == NULL:
            stop = end
        if stop > at:
            if _is_unusual(at, stop - at):
                return None
            if at[0] == c"U" and _begins(at, stop - at, b"UNIQ_KEY\x01", 9):
                if own_key is not None or stop - at == 9:
                    return None
                own_key = PyUnicode_DecodeASCII(at + 9, stop - at - 9, NULL)
        at = stop + 1
    cdef bint needs_end = size and end[-1] != 2
    unique_key = own_key
    if own_key is None:
        unique_key = unique_id()
        if not PyUnicode_IS_ASCII(unique_key):
            raise ValueError(f"unique id with non-ASCII characters: {unique_key!r}")
        added = PyUnicode_GET_LENGTH(unique_key) + 10
    stored = PyBytes_FromStringAndSize(NULL, size + needs_end + added + PyBytes_GET_SIZE(suffix))
    to = PyBytes_AS_STRING(stored)
    memcpy(to, begin, size)
    to += size
    if needs_end:
        to[0] = 2
        to += 1
    if added:
        memcpy(to, b"UNIQ_KEY\x01", 9)
        memcpy(to + 9, PyUnicode_DATA(unique_key), added - 10)
        to[added - 1] = 2
        to += added
    memcpy(to, PyBytes_AS_STRING(suffix), PyBytes_GET_SIZE(suffix))
    return stored, unique_key

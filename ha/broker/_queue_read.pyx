"""The compiled twin of what puts the messages of an answer together (queue_read.py)."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy


def joined(span, long long base, list runs not None):
    cdef Py_buffer view
    cdef long long begin, end, size = 0
    cdef bytes body
    cdef char *at
    PyObject_GetBuffer(span, &view, PyBUF_SIMPLE)
    try:
        for begin, end in runs:
            if begin < base or end < begin or end - base > view.len:
                raise ValueError(f"[{begin}, {end}) is not in {view.len} bytes from {base} on")
            size += end - begin
        body = PyBytes_FromStringAndSize(NULL, size)
        at = PyBytes_AS_STRING(body)
        for begin, end in runs:
            memcpy(at, <const char *>view.buf + (begin - base), end - begin)
            at += end - begin
    finally:
        PyBuffer_Release(&view)
    return body

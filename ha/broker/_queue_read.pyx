"""Compiled twins of `near_end` and `gathered` in queue_read.py."""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy

import array

from ha.protocol._layout cimport PLACE_SIZE, read_int64, read_uint32

from ha.broker.choosing import WrongEntryError


def near_end(wanted, Py_ssize_t number, long long begin, long long gap_max, long long size_max):
    cdef array.array places = wanted.physical_offsets, sizes = wanted.sizes
    cdef Py_ssize_t count = len(sizes)
    cdef long long *place = places.data.as_longlongs
    cdef long long *size = sizes.data.as_longlongs
    cdef long long end = place[number] + size[number]
    number += 1
    while number < count and place[number] - end <= gap_max and place[number] + size[number] - begin <= size_max:
        end = place[number] + size[number]
        number += 1
    return end


def gathered(list spans not None, wanted, int queue_id):
    cdef array.array queue_offsets = wanted.queue_offsets, places = wanted.physical_offsets, sizes = wanted.sizes
    cdef Py_ssize_t count = len(sizes), number, size, left, here, next_span = 0
    cdef long long base = 0, place, total_size = 0
    cdef Py_buffer view
    cdef bint has_view = False
    cdef bytes body
    cdef unsigned char *at
    for number in range(count):
        total_size += sizes.data.as_longlongs[number]
    body = PyBytes_FromStringAndSize(NULL, total_size)
    at = <unsigned char *>PyBytes_AS_STRING(body)
    try:
        for number in range(count):
            place, size = places.data.as_longlongs[number], sizes.data.as_longlongs[number]
            left = size
            while left:
                while not has_view or place >= base + view.len:
                    if next_span == len(spans):
                        raise ValueError(f"{place} is in none of the spans")
                    if has_view:
                        has_view = False
                        PyBuffer_Release(&view)
                    base, span = spans[next_span]
                    PyObject_GetBuffer(span, &view, PyBUF_SIMPLE)
                    has_view = True
                    next_span += 1
                if place < base:
                    raise ValueError(f"{place} is in none of the spans")
                here = min(left, base + view.len - place)
                memcpy(at, <const unsigned char *>view.buf + (place - base), here)
                at += here
                place += here
                left -= here
            if (
                size < PLACE_SIZE
                or read_uint32(at - size) != <unsigned int>size
                or <int>read_uint32(at - size + 12) != queue_id
                or read_int64(at - size + 20) != queue_offsets.data.as_longlongs[number]
                or read_int64(at - size + 28) != places.data.as_longlongs[number]
            ):
                raise WrongEntryError(queue_offsets.data.as_longlongs[number])
    finally:
        if has_view:
            PyBuffer_Release(&view)
    return body

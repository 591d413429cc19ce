"""Compiled twin of pump.py."""

from libc.errno cimport EINTR, errno
from posix.types cimport off_t
from posix.unistd cimport read, write

from ha.protocol._layout cimport FRAMES_MAX, REPORT_SIZE, TRANSFER_HEADER_SIZE, read_int64, read_uint32, write_int64

import os


cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

    ssize_t pwritev(int file, const iovec *pieces, int count, off_t position)


def pump(
    int source, unsigned char[::1] buffer not None, long long offset, int file, long long position, long long room,
    Py_ssize_t bulk_size_min,
):
    cdef iovec bodies[FRAMES_MAX]
    cdef unsigned char report[REPORT_SIZE]
    cdef unsigned char *start = &buffer[0]
    cdef Py_ssize_t received, taken = 0, size = 0, sent = 0, body_size
    cdef int count = 0, error = 0
    with nogil:
        received = read(source, start, buffer.shape[0])
        while received < 0 and errno == EINTR:
            received = read(source, start, buffer.shape[0])
        error = errno
        while count < FRAMES_MAX and taken + TRANSFER_HEADER_SIZE < received:
            body_size = <int>read_uint32(start + taken + 8)
            if read_int64(start + taken) != offset + size or body_size <= 0:
                break
            if body_size > room - size or body_size > received - taken - TRANSFER_HEADER_SIZE:
                break
            bodies[count].iov_base = start + taken + TRANSFER_HEADER_SIZE
            bodies[count].iov_len = body_size
            count += 1
            size += body_size
            taken += TRANSFER_HEADER_SIZE + body_size
        if count and pwritev(file, bodies, count, position) < size:
            taken = size = 0
        if 0 < taken < bulk_size_min:
            write_int64(report, offset + size)
            sent = max(0, write(source, report, REPORT_SIZE))
    if received < 0:
        raise OSError(error, os.strerror(error))
    return received, taken, size, sent

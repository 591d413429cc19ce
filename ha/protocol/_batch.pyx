"""Compiled twins of the functions in batch.py."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

from ha.protocol._layout cimport (
    BATCH_ENTRY_SIZE_MIN, BATCH_HEAD_SIZE, PROPERTIES_SIZE_MAX, read_uint16, read_uint32, write_bytes, write_uint16,
    write_uint32,
)

from ha.errors import LocalProtocolError, RemoteProtocolError


def encode_batch(entries):
    cdef bytes body, properties, encoded
    cdef int flag
    cdef Py_ssize_t size = 0
    cdef unsigned char *at
    cdef tuple entry
    cdef list known = list(entries)
    for entry in known:
        flag, body, properties = entry
        if len(properties) > PROPERTIES_SIZE_MAX:
            raise LocalProtocolError(f"properties of {len(properties)} bytes")
        size += BATCH_ENTRY_SIZE_MIN + len(body) + len(properties)
    encoded = PyBytes_FromStringAndSize(NULL, size)
    at = <unsigned char *>PyBytes_AS_STRING(encoded)
    for entry in known:
        flag, body, properties = entry
        at = write_uint32(at, BATCH_ENTRY_SIZE_MIN + len(body) + len(properties))
        at = write_uint32(write_uint32(at, 0), 0)
        at = write_bytes(write_uint32(write_uint32(at, flag), len(body)), body)
        at = write_bytes(write_uint16(at, len(properties)), properties)
    return encoded


def decode_batch(raw, *, count_max=None):
    cdef bytes data = raw if type(raw) is bytes else bytes(raw)
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    # 64 bits: no sum of the 32-bit sizes below overflows.
    cdef long long position = 0, end = len(data), size, body_size, properties_at, properties_size, entry_end, flag
    cdef long long left = -1 if count_max is None else count_max
    cdef list entries = []
    while position < end:
        if end - position < BATCH_ENTRY_SIZE_MIN:
            raise RemoteProtocolError(f"batch entry of {end - position} bytes")
        size, flag = <int>read_uint32(start + position), <int>read_uint32(start + position + 12)
        body_size = <int>read_uint32(start + position + 16)
        properties_at = position + BATCH_ENTRY_SIZE_MIN + body_size
        entry_end = position + size
        if body_size < 0 or entry_end > end or properties_at > entry_end:
            raise RemoteProtocolError(f"batch entry of {size} bytes and a body of {body_size}")
        properties_size = <short>read_uint16(start + properties_at - 2)
        if properties_at + properties_size != entry_end:
            raise RemoteProtocolError(f"batch entry of {size} bytes with properties of {properties_size}")
        if left == 0:
            raise RemoteProtocolError(f"batch of more than {count_max} messages")
        left -= 1
        entries.append((
            flag,
            PyBytes_FromStringAndSize(<const char *>start + position + BATCH_HEAD_SIZE, body_size),
            PyBytes_FromStringAndSize(<const char *>start + properties_at, properties_size),
        ))
        position = entry_end
    if not entries:
        raise RemoteProtocolError("empty batch")
    return entries

"""The compiled twin of batch.py: what it says holds here."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

from ha.errors import LocalProtocolError, RemoteProtocolError


cdef inline long long _int32(const unsigned char *at) noexcept nogil:
    return <int>(<unsigned int>at[0] << 24 | <unsigned int>at[1] << 16 | <unsigned int>at[2] << 8 | at[3])


cdef inline unsigned char *_put_int32(unsigned char *at, long long value) noexcept nogil:
    at[0], at[1], at[2], at[3] = value >> 24 & 255, value >> 16 & 255, value >> 8 & 255, value & 255
    return at + 4


cdef inline unsigned char *_put_bytes(unsigned char *at, bytes value):
    memcpy(at, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
    return at + PyBytes_GET_SIZE(value)


def encode_batch(entries):
    cdef bytes body, properties, encoded
    cdef int flag
    cdef Py_ssize_t size = 0
    cdef unsigned char *at
    cdef tuple entry
    cdef list known = list(entries)
    for entry in known:
        flag, body, properties = entry
        if len(properties) > 32767:
            raise LocalProtocolError(f"properties of {len(properties)} bytes")
        size += 22 + len(body) + len(properties)
    encoded = PyBytes_FromStringAndSize(NULL, size)
    at = <unsigned char *>PyBytes_AS_STRING(encoded)
    for entry in known:
        flag, body, properties = entry
        at = _put_int32(at, 22 + len(body) + len(properties))
        at = _put_int32(_put_int32(at, 0), 0)
        at = _put_int32(_put_int32(at, flag), len(body))
        at = _put_bytes(at, body)
        at[0], at[1] = len(properties) >> 8, len(properties) & 255
        at = _put_bytes(at + 2, properties)
    return encoded


def decode_batch(raw, *, count_max=None):
    cdef bytes data = raw if type(raw) is bytes else bytes(raw)
    cdef const unsigned char *start = <const unsigned char *>PyBytes_AS_STRING(data)
    # 64 bits: no sum of the 32-bit sizes below overflows.
    cdef long long position = 0, end = len(data), size, body_size, properties_at, properties_size, entry_end, flag
    cdef long long left = -1 if count_max is None else count_max
    cdef list entries = []
    while position < end:
        if end - position < 22:
            raise RemoteProtocolError(f"batch entry of {end - position} bytes")
        size, flag, body_size = _int32(start + position), _int32(start + position + 12), _int32(start + position + 16)
        properties_at = position + 22 + body_size
        entry_end = position + size
        if body_size < 0 or entry_end > end or properties_at > entry_end:
            raise RemoteProtocolError(f"batch entry of {size} bytes and a body of {body_size}")
        properties_size = <short>(start[properties_at - 2] << 8 | start[properties_at - 1])
        if properties_at + properties_size != entry_end:
            raise RemoteProtocolError(f"batch entry of {size} bytes with properties of {properties_size}")
        if left == 0:
            raise RemoteProtocolError(f"batch of more than {count_max} messages")
        left -= 1
        entries.append((
            flag,
            PyBytes_FromStringAndSize(<const char *>start + position + 20, body_size),
            PyBytes_FromStringAndSize(<const char *>start + properties_at, properties_size),
        ))
        position = entry_end
    if not entries:
        raise RemoteProtocolError("empty batch")
    return entries

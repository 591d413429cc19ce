"""The compiled twin of what takes records apart (record.py, whose table says where what stands)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

from isal.isal_zlib import crc32

cdef enum:
    MAGIC_V1 = 0xDAA320A7
    BORNHOST_V6 = 0x10
    STOREHOST_V6 = 0x20
    HEAD_SIZE_V4 = 88
    PROPERTIES_SIZE_MAX = 32767
    TOPIC_SIZE_V1_MAX = 127
    INT32_MAX = 0x7FFFFFFF


cdef inline unsigned int _uint32_at(const unsigned char *at) noexcept:
    return (<unsigned int>at[0] << 24) | (<unsigned int>at[1] << 16) | (<unsigned int>at[2] << 8) | at[3]


cdef inline long long _int64_at(const unsigned char *at) noexcept:
    return <long long>((<unsigned long long>_uint32_at(at) << 32) | _uint32_at(at + 4))


cdef inline Py_ssize_t _properties_at(const unsigned char *at, Py_ssize_t room) noexcept:
    """Where the properties of the record at `at` are, if it is a sound one of V1 with IPv4 hosts; else 0."""
    cdef Py_ssize_t size, body_size, topic_end, properties_size
    if room < HEAD_SIZE_V4 + 3:
        return 0
    size, body_size = <int>_uint32_at(at), <int>_uint32_at(at + HEAD_SIZE_V4 - 4)
    if _uint32_at(at + 4) != MAGIC_V1 or _uint32_at(at + 36) & (BORNHOST_V6 | STOREHOST_V6):
        return 0
    if size > room or body_size < 0 or HEAD_SIZE_V4 + body_size + 3 > size:
        return 0
    topic_end = HEAD_SIZE_V4 + body_size + 1 + at[HEAD_SIZE_V4 + body_size]
    if at[HEAD_SIZE_V4 + body_size] > TOPIC_SIZE_V1_MAX or topic_end + 2 > size:
        return 0
    properties_size = (<Py_ssize_t>at[topic_end] << 8) | at[topic_end + 1]
    return topic_end + 2 if properties_size <= PROPERTIES_SIZE_MAX and topic_end + 2 + properties_size == size else 0


def split_records(bytes body not None, *, bint verify_crc=True):
    cdef const unsigned char *begin = <const unsigned char *>PyBytes_AS_STRING(body)
    cdef const unsigned char *at
    cdef Py_ssize_t position = 0, end = PyBytes_GET_SIZE(body), size, body_size, properties_at
    cdef list found = []
    cdef bytes content
    while position < end:
        at = begin + position
        properties_at = _properties_at(at, end - position)
        if properties_at:
            size, body_size = <int>_uint32_at(at), <int>_uint32_at(at + HEAD_SIZE_V4 - 4)
            content = PyBytes_FromStringAndSize(<const char *>at + HEAD_SIZE_V4, body_size)
            if not verify_crc or <unsigned int>crc32(content) & INT32_MAX == _uint32_at(at + 8):
                found.append((
                    (
                        size,
                        <int>_uint32_at(at + 4),
                        <int>_uint32_at(at + 8),
                        <int>_uint32_at(at + 12),
                        <int>_uint32_at(at + 16),
                        _int64_at(at + 20),
                        _int64_at(at + 28),
                        <int>_uint32_at(at + 36),
                        _int64_at(at + 40),
                        PyBytes_FromStringAndSize(<const char *>at + 48, 8),
                        _int64_at(at + 56),
                        PyBytes_FromStringAndSize(<const char *>at + 64, 8),
                        <int>_uint32_at(at + 72),
                        _int64_at(at + 76),
                        body_size,
                    ),
                    content,
                    PyBytes_FromStringAndSize(<const char *>at + properties_at, size - properties_at),
                ))
                position += size
                continue
        # Not here when this module is made, which is while that one is.
        from ha.protocol.record import _split_unusual
        parts, position = _split_unusual(body, position, verify_crc=verify_crc)
        found.append(parts)
    return found

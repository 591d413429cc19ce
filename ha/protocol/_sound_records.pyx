"""The compiled twin of what looks for good records (sound_records.py; record.py's table says where what stands)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

from isal.isal_zlib import crc32

cdef enum:
    MAGIC_V1 = 0xDAA320A7
    MAGIC_V2 = 0xDAA320AB
    BORNHOST_V6 = 0x10
    STOREHOST_V6 = 0x20
    RECORD_SIZE_MIN = 91
    HEAD_SIZE_V4 = 88
    TOPIC_SIZE_V1_MAX = 127
    PROPERTIES_SIZE_MAX = 32767


cdef inline unsigned int _int32(const unsigned char *at) noexcept:
    return (<unsigned int>at[0] << 24) | (<unsigned int>at[1] << 16) | (<unsigned int>at[2] << 8) | at[3]


cdef Py_ssize_t _sound_size(const unsigned char *at, Py_ssize_t room, long long physical_offset,
                            Py_ssize_t *body_at, Py_ssize_t *body_size) noexcept:
    """The size of the record at `at`, and where its body is; 0 if its parts are not as they should be."""
    cdef Py_ssize_t size, head_size, end, topic_size, properties_size
    cdef unsigned int magic, sys_flag
    cdef unsigned long long claimed
    if room < RECORD_SIZE_MIN:
        return 0
    size, magic, sys_flag = <int>_int32(at), _int32(at + 4), _int32(at + 36)
    claimed = (<unsigned long long>_int32(at + 28) << 32) | _int32(at + 32)
    if size < RECORD_SIZE_MIN or size > room or claimed != <unsigned long long>physical_offset:
        return 0
    head_size = HEAD_SIZE_V4 + (12 if sys_flag & BORNHOST_V6 else 0) + (12 if sys_flag & STOREHOST_V6 else 0)
    if (magic != MAGIC_V1 and magic != MAGIC_V2) or head_size + 3 > size:
        return 0
    body_at[0], body_size[0] = head_size, <int>_int32(at + head_size - 4)
    end = head_size + body_size[0]
    if body_size[0] < 0 or end + (3 if magic == MAGIC_V1 else 4) > size:
        return 0
    if magic == MAGIC_V1:
        topic_size = at[end]
        end += 1 + topic_size
        if topic_size > TOPIC_SIZE_V1_MAX:
            return 0
    else:
        topic_size = (<Py_ssize_t>at[end] << 8) | at[end + 1]
        end += 2 + topic_size
        if topic_size > PROPERTIES_SIZE_MAX:
            return 0
    if end + 2 > size:
        return 0
    properties_size = (<Py_ssize_t>at[end] << 8) | at[end + 1]
    return size if properties_size <= PROPERTIES_SIZE_MAX and end + 2 + properties_size == size else 0


def sound_records(bytes buffer not None, long long base_offset, Py_ssize_t end):
    cdef const unsigned char *begin = <const unsigned char *>PyBytes_AS_STRING(buffer)
    cdef Py_ssize_t position = 0, last = -1, size, body_at = 0, body_size = 0
    cdef unsigned int found
    end = min(end, PyBytes_GET_SIZE(buffer))
    with memoryview(buffer) as view:
        while True:
            size = _sound_size(begin + position, end - position, base_offset + position, &body_at, &body_size)
            if not size:
                return position, last
            body_at += position
            found = crc32(view[body_at:body_at + body_size])
            if found & 0x7FFFFFFF != _int32(begin + position + 8):
                return position, last
            last = position
            position += size

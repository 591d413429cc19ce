"""Byte layouts and limits shared by all compiled twins, and the C functions that read and write them.

The Python modules define the formats; tests/protocol/test_layout.py compares every constant here with theirs.
The caller must check that the bytes at `at` exist before it calls one of the functions.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.string cimport memcpy


cdef enum:
    # codes.SysFlag
    BORNHOST_V6 = 0x10
    STOREHOST_V6 = 0x20
    TRANSACTION_MASK = 0xC
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC

    # properties
    PROPERTIES_SIZE_MAX = 32767

    # record
    MAGIC_V1 = 0xDAA320A7
    MAGIC_V2 = 0xDAA320AB
    RECORD_SIZE_MIN = 91
    TOPIC_SIZE_V1_MAX = 127
    CRC_MASK = 0x7FFFFFFF
    HEAD_SIZE = 88
    STORE_TIMESTAMP_AT = 56
    HOST_SIZE_V4 = 8
    HOST_SIZE_V6 = 20
    PLACE_SIZE = 36

    # record_encoding
    PROPERTY_CRC_SIZE = 20

    # record_digest, store_files, index_entries
    KEY_SIZE = 20
    ENTRY_SIZE = 20
    BLANK_SIZE = 0x7FFFFFFF
    INDEX_ENTRY_SIZE = 20
    PAGE_SLOTS = 1024
    SECONDS_MAX = 0x7FFFFFFF

    # batch
    BATCH_HEAD_SIZE = 20
    BATCH_ENTRY_SIZE_MIN = 22

    # request_parser
    SEND_FIELD_COUNT = 14
    ACK_FIELD_COUNT = 6
    POP_FIELD_COUNT = 13
    ACK_COUNT_MAX = 64

    # ha_frame, pump
    TRANSFER_HEADER_SIZE = 12
    REPORT_SIZE = 8
    FRAMES_MAX = 64

    INT32_MAX = 0x7FFFFFFF


cdef inline unsigned int read_uint16(const unsigned char *at) noexcept nogil:
    return (<unsigned int>at[0] << 8) | at[1]


cdef inline unsigned int read_uint32(const unsigned char *at) noexcept nogil:
    return (<unsigned int>at[0] << 24) | (<unsigned int>at[1] << 16) | (<unsigned int>at[2] << 8) | at[3]


cdef inline long long read_int64(const unsigned char *at) noexcept nogil:
    return <long long>((<unsigned long long>read_uint32(at) << 32) | read_uint32(at + 4))


# Each write function returns the position after what it wrote.


cdef inline unsigned char *write_uint16(unsigned char *at, unsigned int value) noexcept nogil:
    at[0] = <unsigned char>(value >> 8)
    at[1] = <unsigned char>value
    return at + 2


cdef inline unsigned char *write_uint32(unsigned char *at, unsigned int value) noexcept nogil:
    at[0] = <unsigned char>(value >> 24)
    at[1] = <unsigned char>(value >> 16)
    at[2] = <unsigned char>(value >> 8)
    at[3] = <unsigned char>value
    return at + 4


cdef inline unsigned char *write_int64(unsigned char *at, long long value) noexcept nogil:
    return write_uint32(write_uint32(at, <unsigned int>(<unsigned long long>value >> 32)), <unsigned int>value)


cdef inline unsigned char *write_bytes(unsigned char *at, bytes raw) noexcept:
    memcpy(at, PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw))
    return at + PyBytes_GET_SIZE(raw)


cdef struct Record:
    # The fixed fields that more than one twin needs, and the parts as byte positions from the record's start.
    Py_ssize_t size
    unsigned int body_crc, sys_flag
    int queue_id
    long long queue_offset, physical_offset, store_timestamp_ms
    Py_ssize_t store_at  # of the store timestamp; the hosts lie before and after it
    Py_ssize_t body_at, body_size, topic_at, topic_size, properties_at, properties_size


cdef inline bint parse_record(const unsigned char *at, Py_ssize_t available, Record *record) noexcept nogil:
    """Reads the record at `at`; record.py describes the format. Returns False if no complete, well-formed record lies
    within `available` bytes. Checks neither the body CRC nor the physical offset."""
    cdef unsigned int magic
    cdef Py_ssize_t length_size = 1
    if available < RECORD_SIZE_MIN:
        return False
    record.size = <int>read_uint32(at)
    magic = read_uint32(at + 4)
    if record.size < RECORD_SIZE_MIN or record.size > available:
        return False
    if magic != MAGIC_V1:
        if magic != MAGIC_V2:
            return False
        length_size = 2
    record.body_crc = read_uint32(at + 8)
    record.queue_id = <int>read_uint32(at + 12)
    record.queue_offset = read_int64(at + 20)
    record.physical_offset = read_int64(at + 28)
    record.sys_flag = read_uint32(at + 36)
    record.store_at, record.body_at = STORE_TIMESTAMP_AT, HEAD_SIZE
    if record.sys_flag & (BORNHOST_V6 | STOREHOST_V6):
        if record.sys_flag & BORNHOST_V6:
            record.body_at += HOST_SIZE_V6 - HOST_SIZE_V4
            record.store_at += HOST_SIZE_V6 - HOST_SIZE_V4
        if record.sys_flag & STOREHOST_V6:
            record.body_at += HOST_SIZE_V6 - HOST_SIZE_V4
        if record.body_at > record.size:
            return False
    record.store_timestamp_ms = read_int64(at + record.store_at)
    record.body_size = <int>read_uint32(at + record.body_at - 4)
    record.topic_at = record.body_at + record.body_size + length_size
    if record.body_size < 0 or record.topic_at + 2 > record.size:
        return False
    if length_size == 1:
        record.topic_size = at[record.topic_at - 1]
        if record.topic_size > TOPIC_SIZE_V1_MAX:
            return False
    else:
        record.topic_size = read_uint16(at + record.topic_at - 2)
        if record.topic_size > PROPERTIES_SIZE_MAX:
            return False
    record.properties_at = record.topic_at + record.topic_size + 2
    if record.properties_at > record.size:
        return False
    record.properties_size = read_uint16(at + record.properties_at - 2)
    return (record.properties_size <= PROPERTIES_SIZE_MAX
            and record.properties_at + record.properties_size == record.size)

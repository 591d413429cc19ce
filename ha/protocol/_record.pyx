"""Compiled twins of `split_records` and `sound_records` in record.py."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

from ha.protocol._layout cimport CRC_MASK, Record, parse_record, read_int64, read_uint32

from isal.isal_zlib import crc32


def split_records(bytes body not None, *, bint verify_crc=True):
    cdef const unsigned char *begin = <const unsigned char *>PyBytes_AS_STRING(body)
    cdef const unsigned char *at
    cdef const unsigned char *at_store
    cdef const unsigned char *at_body
    cdef Py_ssize_t position = 0, end = PyBytes_GET_SIZE(body)
    cdef Record record
    cdef list found = []
    cdef bytes content
    while position < end:
        at = begin + position
        if parse_record(at, end - position, &record):
            content = PyBytes_FromStringAndSize(<const char *>at + record.body_at, record.body_size)
            if not verify_crc or <unsigned int>crc32(content) & CRC_MASK == record.body_crc:
                at_store, at_body = at + record.store_at, at + record.body_at
                found.append((
                    (
                        record.size,
                        <int>read_uint32(at + 4),
                        <int>record.body_crc,
                        record.queue_id,
                        <int>read_uint32(at + 16),
                        record.queue_offset,
                        record.physical_offset,
                        <int>record.sys_flag,
                        read_int64(at + 40),
                        PyBytes_FromStringAndSize(<const char *>at + 48, record.store_at - 48),
                        record.store_timestamp_ms,
                        PyBytes_FromStringAndSize(<const char *>at_store + 8, at_body - 16 - (at_store + 8)),
                        <int>read_uint32(at_body - 16),
                        read_int64(at_body - 12),
                        record.body_size,
                    ),
                    content,
                    PyBytes_FromStringAndSize(<const char *>at + record.properties_at, record.properties_size),
                ))
                position += record.size
                continue
        # Raises the error that describes the fault. record.py imports this module, so it is imported only here.
        from ha.protocol.record import decode_record
        decode_record(body, position, verify_crc=verify_crc)
        raise AssertionError(f"the twins disagree about the record at {position}")
    return found


def sound_records(bytes buffer not None, long long base_offset, Py_ssize_t end):
    cdef const unsigned char *begin = <const unsigned char *>PyBytes_AS_STRING(buffer)
    cdef Py_ssize_t position = 0, last = -1, body_at
    cdef Record record
    end = min(end, PyBytes_GET_SIZE(buffer))
    with memoryview(buffer) as view:
        while parse_record(begin + position, end - position, &record):
            body_at = position + record.body_at
            if (record.physical_offset != base_offset + position
                    or <unsigned int>crc32(view[body_at:body_at + record.body_size]) & CRC_MASK != record.body_crc):
                break
            last = position
            position += record.size
    return position, last

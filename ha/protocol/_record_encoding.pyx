"""Compiled twin of `record_run` in record_encoding.py."""

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyObject
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from ha.protocol._layout cimport (
    BORNHOST_V6, CRC_MASK, HEAD_SIZE, HOST_SIZE_V4, HOST_SIZE_V6, MAGIC_V1, PROPERTIES_SIZE_MAX, PROPERTY_CRC_SIZE,
    STOREHOST_V6, TOPIC_SIZE_V1_MAX, TRANSACTION_MASK, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK, write_bytes,
    write_int64, write_uint16, write_uint32,
)

from isal.isal_zlib import crc32

from ha.protocol.codes import PutStatus
from ha.protocol.record_encoding import topic_field

cdef Py_ssize_t HEAD_SIZE_WITHOUT_HOSTS = HEAD_SIZE - 2 * HOST_SIZE_V4


cdef struct Run:
    unsigned char *at
    Py_ssize_t size, room


cdef inline unsigned int _host_flag(bytes host, unsigned int flag) except? 0xFFFFFFFF:
    """Returns `flag` if `host` is an IPv6 host, 0 for IPv4. Raises ValueError for any other size."""
    if PyBytes_GET_SIZE(host) == HOST_SIZE_V4:
        return 0
    if PyBytes_GET_SIZE(host) == HOST_SIZE_V6:
        return flag
    raise ValueError(f"host of {len(host)} bytes")


cdef inline unsigned char *_grow(Run *run, Py_ssize_t size) except NULL:
    """Extends a run by `size` bytes, and returns a pointer to these. Raises MemoryError."""
    cdef unsigned char *at
    if run.size + size > run.room:
        at = <unsigned char *>realloc(run.at, 2 * (run.size + size))
        if at == NULL:
            raise MemoryError
        run.at, run.room = at, 2 * (run.size + size)
    run.size += size
    return run.at + run.size - size


def record_run(messages, Py_ssize_t first, dict queue_offsets not None, dict advanced not None,
               long long physical_offset, Py_ssize_t room, store_timestamp_ms, bytes store_host not None, *,
               Py_ssize_t body_size_max, Py_ssize_t properties_size_max, bint append_property_crc, result):
    cdef Run run
    cdef list results = []
    run.at, run.size, run.room = NULL, 0, 0
    try:
        _fill(&run, results, messages, first, queue_offsets, advanced, physical_offset, room, store_timestamp_ms,
              store_host, body_size_max, properties_size_max, append_property_crc, result)
        return PyBytes_FromStringAndSize(<char *>run.at, run.size), results
    finally:
        free(run.at)


cdef bint _fill(Run *run, list results, messages, Py_ssize_t first, dict queue_offsets, dict advanced,
                long long physical_offset, Py_ssize_t room, store_timestamp_ms, bytes store_host,
                Py_ssize_t body_size_max, Py_ssize_t properties_size_max, bint append_property_crc,
                result) except False:
    cdef object ok = PutStatus.PUT_OK, topic, body, field_of = None
    cdef tuple key = None
    cdef bytes properties, born_host, field = b""
    cdef Py_ssize_t number, count = len(messages), body_size, properties_size, size
    cdef long long queue_offset, next_offset = 0, store_ms = store_timestamp_ms
    cdef unsigned int store_flag = _host_flag(store_host, STOREHOST_V6), sys_flag
    cdef bint is_counted, needs_separator = False
    cdef unsigned char *begin
    cdef unsigned char *at
    cdef Py_buffer view
    cdef PyObject *known
    for number in range(first, count):
        message = messages[number]
        topic, body, properties = message.topic, message.body, message.properties
        body_size, properties_size = len(body), PyBytes_GET_SIZE(properties)
        if body_size > body_size_max or properties_size > properties_size_max:
            break
        sys_flag = <unsigned int><int>message.sys_flag
        is_counted = sys_flag & TRANSACTION_MASK not in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK)
        queue_offset = 0
        if is_counted:
            # Consecutive messages are often in the same queue.
            if key is None or topic is not key[0] or message.queue_id is not key[1]:
                key = (topic, message.queue_id)
                known = PyDict_GetItemWithError(advanced, key)
                if known == NULL:
                    known = PyDict_GetItemWithError(queue_offsets, key)
                if known == NULL:
                    break
                next_offset = <object>known
            queue_offset = next_offset
        if topic is not field_of:
            field, field_of = topic_field(topic), topic
        if append_property_crc:
            needs_separator = properties_size and PyBytes_AS_STRING(properties)[properties_size - 1] != 2
            properties_size += needs_separator + PROPERTY_CRC_SIZE
        born_host = message.born_host
        size = HEAD_SIZE_WITHOUT_HOSTS + PyBytes_GET_SIZE(born_host) + PyBytes_GET_SIZE(store_host) + body_size
        size += PyBytes_GET_SIZE(field) + 2 + properties_size
        if size > room or properties_size > PROPERTIES_SIZE_MAX or PyBytes_GET_SIZE(field) > 1 + TOPIC_SIZE_V1_MAX:
            break
        sys_flag &= ~<unsigned int>(BORNHOST_V6 | STOREHOST_V6)
        sys_flag |= _host_flag(born_host, BORNHOST_V6) | store_flag
        begin = _grow(run, size)
        at = write_uint32(begin, <unsigned int>size)
        at = write_uint32(at, MAGIC_V1)
        at = write_uint32(at, <unsigned int>crc32(body) & CRC_MASK)
        at = write_uint32(at, <unsigned int><int>message.queue_id)
        at = write_uint32(at, <unsigned int><int>message.flag)
        at = write_int64(at, queue_offset)
        at = write_int64(at, physical_offset)
        at = write_uint32(at, sys_flag)
        at = write_int64(at, message.born_timestamp_ms)
        at = write_bytes(at, born_host)
        at = write_int64(at, store_ms)
        at = write_bytes(at, store_host)
        at = write_uint32(at, <unsigned int><int>message.reconsume_times)
        at = write_int64(at, message.prepared_transaction_offset)
        at = write_uint32(at, <unsigned int>body_size)
        PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
        memcpy(at, view.buf, body_size)
        PyBuffer_Release(&view)
        at = write_bytes(write_uint16(write_bytes(at + body_size, field), properties_size), properties)
        if append_property_crc:
            _write_property_crc(begin, at, needs_separator)
        if is_counted:
            next_offset = queue_offset + 1
            advanced[key] = next_offset
        results.append(result(ok, physical_offset, size, queue_offset, store_timestamp_ms))
        physical_offset += size
        room -= size
    return True


cdef bint _write_property_crc(unsigned char *begin, unsigned char *at, bint needs_separator) except False:
    """Writes the property that holds the CRC of the record from `begin` to `at`."""
    cdef unsigned int crc
    cdef int digit
    if needs_separator:
        at[0] = 2
        at += 1
    crc = <unsigned int>crc32(PyMemoryView_FromMemory(<char *>begin, at - begin, PyBUF_READ)) & CRC_MASK
    memcpy(at, b"__CRC32#\x01", 9)
    for digit in range(9, 19):
        at[digit] = <unsigned char>(c"0" + crc % 10)
        crc //= 10
    at[19] = 2
    return True

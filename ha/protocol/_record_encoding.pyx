"""The compiled twins of what puts messages into records (record_encoding.py; record.py says where what stands).

A number that does not fit its field raises OverflowError; whoever calls has checked it.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from ha.protocol._layout cimport (
    BORNHOST_V6, HEAD_SIZE, HOST_SIZE_V4, HOST_SIZE_V6, INT32_MAX, MAGIC_V1, MAGIC_V2, PROPERTIES_SIZE_MAX,
    STOREHOST_V6, TOPIC_SIZE_V1_MAX, TRANSACTION_MASK, write_bytes, write_int64, write_uint16, write_uint32,
)

from isal.isal_zlib import crc32

from ha.errors import LocalProtocolError
from ha.protocol.codes import PutStatus
from ha.protocol.record_encoding import TOPIC_ALWAYS_FITS, _topic_field

cdef Py_ssize_t HEAD_SIZE_WITHOUT_HOSTS = HEAD_SIZE - 2 * HOST_SIZE_V4


cdef inline unsigned int _host_flag(bytes host, unsigned int flag) except? 0xFFFFFFFF:
    """`flag` if `host` is an IPv6 one."""
    if PyBytes_GET_SIZE(host) == HOST_SIZE_V4:
        return 0
    if PyBytes_GET_SIZE(host) == HOST_SIZE_V6:
        return flag
    raise ValueError(f"host of {len(host)} bytes")


def record_pieces(message, queue_offset, physical_offset, store_timestamp_ms, bytes store_host not None,
                  append_property_crc=False):
    cdef bytes topic_field = _topic_field(message.topic), born_host = message.born_host
    cdef bytes properties = message.properties, before, behind
    cdef object body = message.body
    cdef bint has_crc = append_property_crc
    cdef Py_ssize_t body_size = len(body), topic_field_size = len(topic_field), properties_size = len(properties)
    cdef Py_ssize_t head_size = HEAD_SIZE_WITHOUT_HOSTS + len(born_host) + len(store_host), size
    cdef unsigned char *at
    cdef unsigned int sys_flag
    if has_crc:
        if properties_size and PyBytes_AS_STRING(properties)[properties_size - 1] != 2:
            properties += b"\x02"
        properties_size = len(properties) + 20
    if properties_size > PROPERTIES_SIZE_MAX or topic_field_size > 2 + PROPERTIES_SIZE_MAX:
        raise LocalProtocolError(
            f"topic of {topic_field_size - 2} or properties of {properties_size} bytes exceed a record's fields"
        )
    sys_flag = <unsigned int><int>message.sys_flag & ~<unsigned int>(BORNHOST_V6 | STOREHOST_V6)
    sys_flag |= _host_flag(born_host, BORNHOST_V6) | _host_flag(store_host, STOREHOST_V6)
    size = head_size + body_size + topic_field_size + 2 + properties_size
    if size > INT32_MAX:
        raise OverflowError(f"record of {size} bytes")

    behind = PyBytes_FromStringAndSize(NULL, topic_field_size + 2 + len(properties))
    write_bytes(write_uint16(write_bytes(<unsigned char *>PyBytes_AS_STRING(behind), topic_field), properties_size), properties)

    before = PyBytes_FromStringAndSize(NULL, head_size)
    at = <unsigned char *>PyBytes_AS_STRING(before)
    at = write_uint32(at, <unsigned int>size)
    at = write_uint32(at, MAGIC_V1 if topic_field_size <= 1 + TOPIC_SIZE_V1_MAX else MAGIC_V2)
    at = write_uint32(at, <unsigned int>crc32(body) & INT32_MAX)
    at = write_uint32(at, <unsigned int><int>message.queue_id)
    at = write_uint32(at, <unsigned int><int>message.flag)
    at = write_int64(at, queue_offset)
    at = write_int64(at, physical_offset)
    at = write_uint32(at, sys_flag)
    at = write_int64(at, message.born_timestamp_ms)
    at = write_bytes(at, born_host)
    at = write_int64(at, store_timestamp_ms)
    at = write_bytes(at, store_host)
    at = write_uint32(at, <unsigned int><int>message.reconsume_times)
    at = write_int64(at, message.prepared_transaction_offset)
    write_uint32(at, <unsigned int>body_size)
    if has_crc:
        digits = f"{crc32(behind, crc32(body, crc32(before))) & 0x7FFFFFFF:010d}"[::-1]
        behind = b"%b__CRC32#\x01%b\x02" % (behind, digits.encode())
    return before, body, behind


cdef struct Run:
    unsigned char *at
    Py_ssize_t size, room


cdef inline unsigned char *_more(Run *run, Py_ssize_t size) except NULL:
    """Room for `size` more bytes of a run."""
    cdef unsigned char *at
    if run.size + size > run.room:
        at = <unsigned char *>realloc(run.at, 2 * (run.size + size))
        if at == NULL:
            raise MemoryError
        run.at, run.room = at, 2 * (run.size + size)
    run.size += size
    return run.at + run.size - size


def record_run(messages, Py_ssize_t first, dict queue_offsets not None, long long physical_offset, Py_ssize_t room,
               store_timestamp_ms, bytes store_host not None, *, Py_ssize_t body_size_max,
               Py_ssize_t properties_size_max, result):
    cdef Run run
    cdef list results = []
    run.at, run.size, run.room = NULL, 0, 0
    try:
        _fill(&run, results, messages, first, queue_offsets, physical_offset, room, store_timestamp_ms, store_host,
              body_size_max, properties_size_max, result)
        return PyBytes_FromStringAndSize(<char *>run.at, run.size), results
    finally:
        free(run.at)


cdef bint _fill(Run *run, list results, messages, Py_ssize_t first, dict queue_offsets, long long physical_offset,
                Py_ssize_t room, store_timestamp_ms, bytes store_host, Py_ssize_t body_size_max,
                Py_ssize_t properties_size_max, result) except False:
    cdef object ok = PutStatus.PUT_OK, topic, body, key
    cdef bytes properties, born_host, topic_field = b""
    cdef object field_of = None
    cdef Py_ssize_t number, count = len(messages), topic_size_max = TOPIC_ALWAYS_FITS
    cdef Py_ssize_t body_size, properties_size, size
    cdef long long queue_offset, store_ms = store_timestamp_ms
    cdef unsigned int store_flag = _host_flag(store_host, STOREHOST_V6), sys_flag
    cdef unsigned char *at
    cdef Py_buffer view
    cdef PyObject *known
    for number in range(first, count):
        message = messages[number]
        topic, body, properties = message.topic, message.body, message.properties
        body_size, properties_size = len(body), PyBytes_GET_SIZE(properties)
        sys_flag = <unsigned int><int>message.sys_flag
        key = (topic, message.queue_id)
        known = PyDict_GetItemWithError(queue_offsets, key)
        if (known == NULL or len(topic) > topic_size_max or body_size > body_size_max
                or properties_size > properties_size_max or sys_flag & TRANSACTION_MASK):
            break
        queue_offset = <object>known
        if topic is not field_of:
            topic_field, field_of = _topic_field(topic), topic
        born_host = message.born_host
        size = HEAD_SIZE_WITHOUT_HOSTS + PyBytes_GET_SIZE(born_host) + PyBytes_GET_SIZE(store_host) + body_size
        size += PyBytes_GET_SIZE(topic_field) + 2 + properties_size
        if size > room or properties_size > PROPERTIES_SIZE_MAX:
            break
        sys_flag &= ~<unsigned int>(BORNHOST_V6 | STOREHOST_V6)
        sys_flag |= _host_flag(born_host, BORNHOST_V6) | store_flag
        at = write_uint32(_more(run, size), <unsigned int>size)
        at = write_uint32(at, MAGIC_V1)
        at = write_uint32(at, <unsigned int>crc32(body) & INT32_MAX)
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
        write_bytes(write_uint16(write_bytes(at + body_size, topic_field), properties_size), properties)
        queue_offsets[key] = queue_offset + 1
        results.append(result(ok, physical_offset, size, queue_offset, store_timestamp_ms))
        physical_offset += size
        room -= size
    return True


def is_batch_of_one_queue(messages):
    first = messages[0]
    topic, queue_id, sys_flag, born_host = first.topic, first.queue_id, first.sys_flag, first.born_host
    born_timestamp_ms, reconsume_times = first.born_timestamp_ms, first.reconsume_times
    prepared_transaction_offset = first.prepared_transaction_offset
    for message in messages:
        if (
            _differ(message.queue_id, queue_id)
            or _differ(message.sys_flag, sys_flag)
            or _differ(message.born_timestamp_ms, born_timestamp_ms)
            or _differ(message.reconsume_times, reconsume_times)
            or _differ(message.prepared_transaction_offset, prepared_transaction_offset)
            or _differ(message.topic, topic)
            or _differ(message.born_host, born_host)
        ):
            return False
    return True


cdef inline bint _differ(one, other) except -1:
    return one is not other and one != other


def batch_pieces(messages, sizes, *, queue_offset, physical_offset, store_timestamp_ms, bytes store_host not None):
    """One piece with all of them."""
    first = messages[0]
    cdef bytes topic_field = _topic_field(first.topic), born_host = first.born_host, body, properties, shared, records
    cdef Py_ssize_t topic_field_size = len(topic_field), properties_size, total = 0, size, shared_size
    cdef long long next_queue_offset = queue_offset, next_physical_offset = physical_offset
    cdef unsigned int sys_flag, queue_id = <unsigned int><int>first.queue_id
    cdef unsigned char *at
    cdef unsigned char *end
    if topic_field_size > 2 + PROPERTIES_SIZE_MAX:
        raise LocalProtocolError(f"topic of {topic_field_size - 2} bytes exceeds a record's field")
    sys_flag = <unsigned int><int>first.sys_flag & ~<unsigned int>(BORNHOST_V6 | STOREHOST_V6)
    sys_flag |= _host_flag(born_host, BORNHOST_V6) | _host_flag(store_host, STOREHOST_V6)

    # From sysFlag to the prepared transaction offset.
    shared_size = HEAD_SIZE_WITHOUT_HOSTS - 40 + len(born_host) + len(store_host)
    shared = PyBytes_FromStringAndSize(NULL, shared_size)
    at = write_uint32(<unsigned char *>PyBytes_AS_STRING(shared), sys_flag)
    at = write_bytes(write_int64(at, first.born_timestamp_ms), born_host)
    at = write_bytes(write_int64(at, store_timestamp_ms), store_host)
    at = write_uint32(at, <unsigned int><int>first.reconsume_times)
    write_int64(at, first.prepared_transaction_offset)

    for size in sizes:
        if not 0 <= size <= INT32_MAX:
            raise OverflowError(f"record of {size} bytes")
        total += size
    records = PyBytes_FromStringAndSize(NULL, total)
    at = <unsigned char *>PyBytes_AS_STRING(records)
    end = at + total
    for message, one_size in zip(messages, sizes, strict=True):
        of_message = message.body
        body = of_message if type(of_message) is bytes else bytes(of_message)
        properties = message.properties
        properties_size = len(properties)
        if properties_size > PROPERTIES_SIZE_MAX:
            raise LocalProtocolError(f"properties of {properties_size} bytes exceed a record's field")
        size = one_size
        if size != 36 + shared_size + 4 + len(body) + topic_field_size + 2 + properties_size or size > end - at:
            raise ValueError(f"the record is not {size} bytes long")
        at = write_uint32(at, <unsigned int>size)
        at = write_uint32(at, MAGIC_V1 if topic_field_size <= 1 + TOPIC_SIZE_V1_MAX else MAGIC_V2)
        at = write_uint32(at, <unsigned int>crc32(body) & INT32_MAX)
        at = write_uint32(at, queue_id)
        at = write_uint32(at, <unsigned int><int>message.flag)
        at = write_int64(at, next_queue_offset)
        at = write_int64(at, next_physical_offset)
        at = write_bytes(at, shared)
        at = write_bytes(write_uint32(at, <unsigned int>len(body)), body)
        at = write_bytes(write_uint16(write_bytes(at, topic_field), properties_size), properties)
        next_queue_offset += 1
        next_physical_offset += size
    return [records]

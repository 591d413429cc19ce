"""The compiled twin of what digests records for dispatch (record_digest.py; record.py's table says where what stands).

What is unusual (long topics, IPv6 hosts, keys that are not ASCII, delayed messages, damage) is `scan_record`'s.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define ha_prefetch(at) __builtin_prefetch(at)
    #else
    #define ha_prefetch(at)
    #endif
    """
    void _prefetch "ha_prefetch"(const void *at) noexcept

from ha.protocol.record import RecordHead, scan_record
from ha.protocol.record_digest import (
    TAG_INFIX, QueueRun, RecordDigest, end_of_run, hash_before, index_key_hashes,
)
from ha.protocol.topic_names import SCHEDULE_TOPIC

cdef enum:
    MAGIC_V1 = 0xDAA320A7
    HOSTS_V6 = 0x30
    TRANSACTION_MASK = 0xC
    COMMIT = 0x8
    ROLLBACK = 0xC
    RECORD_SIZE_MIN = 91
    HEAD_SIZE = 88
    TOPIC_SIZE_V1_MAX = 127
    ENTRY_SIZE = 20
    KEY_SIZE = 20


cdef struct Row:
    Py_ssize_t run
    long long physical_offset
    long long queue_offset
    long long tags_code
    unsigned int size


cdef struct Span:
    const unsigned char *at
    Py_ssize_t size


cdef struct Record:
    unsigned int size, sys_flag
    int queue_id
    long long queue_offset, physical_offset, store_ms
    Span topic, properties


cdef struct Queue:
    Span topic
    int queue_id
    Py_ssize_t run
    unsigned int before, before_tags
    bint is_usual


cdef struct Queues:
    Queue *all
    Py_ssize_t count
    unsigned int *places
    unsigned int mask


cdef struct Values:
    Span unique_key, keys, tags


cdef struct Buffer:
    unsigned char *at
    Py_ssize_t size, room


cdef inline unsigned int _int32(const unsigned char *at) noexcept:
    return (<unsigned int>at[0] << 24) | (<unsigned int>at[1] << 16) | (<unsigned int>at[2] << 8) | at[3]


cdef inline long long _int64(const unsigned char *at) noexcept:
    return <long long>((<unsigned long long>_int32(at) << 32) | _int32(at + 4))


cdef inline void _put_int32(unsigned char *at, unsigned int value) noexcept:
    at[0] = <unsigned char>(value >> 24)
    at[1] = <unsigned char>(value >> 16)
    at[2] = <unsigned char>(value >> 8)
    at[3] = <unsigned char>value


cdef inline void _put_int64(unsigned char *at, long long value) noexcept:
    _put_int32(at, <unsigned int>(<unsigned long long>value >> 32))
    _put_int32(at + 4, <unsigned int>value)


cdef bint _parse(const unsigned char *at, Py_ssize_t available, Record *record) noexcept:
    """Read the record at `at` if it is sound and of the usual kind."""
    cdef Py_ssize_t topic_at, properties_at, topic_size
    cdef long long body_size
    if available < RECORD_SIZE_MIN:
        return False
    record.size = _int32(at)
    if _int32(at + 4) != MAGIC_V1 or record.size < RECORD_SIZE_MIN or <Py_ssize_t>record.size > available:
        return False
    record.queue_id = <int>_int32(at + 12)
    record.queue_offset = _int64(at + 20)
    record.physical_offset = _int64(at + 28)
    record.sys_flag = _int32(at + 36)
    record.store_ms = _int64(at + 56)
    body_size = <int>_int32(at + 84)
    topic_at = HEAD_SIZE + body_size + 1
    if record.sys_flag & HOSTS_V6 or body_size < 0 or topic_at + 2 > record.size:
        return False
    topic_size = at[topic_at - 1]
    properties_at = topic_at + topic_size + 2
    if topic_size > TOPIC_SIZE_V1_MAX or properties_at > record.size:
        return False
    if properties_at + (<Py_ssize_t>at[properties_at - 2] << 8) + at[properties_at - 1] != record.size:
        return False
    record.topic.at, record.topic.size = at + topic_at, topic_size
    record.properties.at, record.properties.size = at + properties_at, record.size - properties_at
    return True


cdef inline bint _is_ascii(const unsigned char *at, Py_ssize_t size) noexcept:
    cdef unsigned long long seen = 0, word = 0
    while size >= 8:
        memcpy(&word, at, 8)
        seen |= word
        at += 8
        size -= 8
    while size > 0:
        seen |= at[0]
        at += 1
        size -= 1
    return not seen & <unsigned long long>0x8080808080808080


cdef bint _find_values(Span properties, Values *values) noexcept:
    """Find the values of properties that dispatch looks at: of several the last one that is not empty. False if one of
    them is not ASCII."""
    cdef const unsigned char *at = properties.at
    cdef const unsigned char *end = properties.at + properties.size
    cdef const unsigned char *stop
    cdef Span *value
    cdef Py_ssize_t mark_size, size
    cdef bint are_ascii = True
    values.unique_key.size = values.keys.size = values.tags.size = 0
    while at < end:
        stop = <const unsigned char *>memchr(at, 2, end - at)
        if stop == NULL:
            stop = end
        size = stop - at
        value = NULL
        if size > 5 and at[0] == c"T" and memcmp(at, b"TAGS\x01", 5) == 0:
            value, mark_size = &values.tags, 5
        elif size > 5 and at[0] == c"K" and memcmp(at, b"KEYS\x01", 5) == 0:
            value, mark_size = &values.keys, 5
        elif size > 9 and at[0] == c"U" and memcmp(at, b"UNIQ_KEY\x01", 9) == 0:
            value, mark_size = &values.unique_key, 9
        if value != NULL:
            value.at, value.size = at + mark_size, size - mark_size
            are_ascii = are_ascii and _is_ascii(value.at, value.size)
        at = stop + 1
    return are_ascii


cdef inline unsigned int _hash(unsigned int before, const unsigned char *at, Py_ssize_t size) noexcept:
    # Four at once: a product waits for the one before it, and a key has some forty characters.
    while size >= 4:
        before = before * 923521 + at[0] * <unsigned int>29791 + at[1] * <unsigned int>961 + at[2] * <unsigned int>31
        before += at[3]
        at += 4
        size -= 4
    while size > 0:
        before = before * 31 + at[0]
        at += 1
        size -= 1
    return before


cdef inline bint _add_key(Buffer *keys, unsigned int key_hash, Record *record) except False:
    cdef unsigned char *at
    cdef unsigned int positive
    if keys.size + KEY_SIZE > keys.room:
        at = <unsigned char *>realloc(keys.at, 2 * keys.room + 64 * KEY_SIZE)
        if at == NULL:
            raise MemoryError
        keys.at, keys.room = at, 2 * keys.room + 64 * KEY_SIZE
    at = keys.at + keys.size
    # No number that C has no int for: comparing with one makes a Python object of each hash.
    positive = key_hash if <int>key_hash >= 0 else 0 - key_hash
    if <int>positive < 0:
        positive = 0
    memcpy(at, &positive, 4)
    memcpy(at + 4, &record.physical_offset, 8)
    memcpy(at + 12, &record.store_ms, 8)
    keys.size += KEY_SIZE
    return True


cdef bint _add_keys(Buffer *keys, Record *record, Values *values, unsigned int before, unsigned int before_tags,
                    bint with_tags) except False:
    """Add the keys of a record as `index_key_hashes` has them."""
    cdef const unsigned char *at
    cdef const unsigned char *end
    cdef const unsigned char *stop
    if record.sys_flag & TRANSACTION_MASK == ROLLBACK:
        return True
    if values.unique_key.size:
        _add_key(keys, _hash(before, values.unique_key.at, values.unique_key.size), record)
    at, end = values.keys.at, values.keys.at + values.keys.size
    while values.keys.size and at < end:
        stop = <const unsigned char *>memchr(at, 32, end - at)
        if stop == NULL:
            stop = end
        if stop > at:
            _add_key(keys, _hash(before, at, stop - at), record)
        at = stop + 1
    if with_tags and values.tags.size:
        _add_key(keys, _hash(before_tags, values.tags.at, values.tags.size), record)
    return True


def digest_records(buffer, base_offset, segment_end, *, Py_ssize_t count_max, Py_ssize_t bytes_max, delay_levels_ms,
                   bint with_keys, bint with_tags):
    cdef Py_buffer view
    cdef Row *rows = NULL
    cdef Queues queues
    cdef Buffer keys
    cdef Py_ssize_t row_max
    keys.at, keys.size, keys.room = NULL, 0, 0
    queues.all, queues.count, queues.places, queues.mask = NULL, 0, NULL, 1
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        row_max = max(min(count_max, view.len // RECORD_SIZE_MIN), 0) + 1
        while <Py_ssize_t>queues.mask < 2 * row_max:
            queues.mask = 2 * queues.mask + 1
        rows = <Row *>malloc(row_max * sizeof(Row))
        queues.all = <Queue *>malloc(row_max * sizeof(Queue))
        queues.places = <unsigned int *>calloc(queues.mask + 1, sizeof(unsigned int))
        if rows == NULL or queues.all == NULL or queues.places == NULL:
            raise MemoryError
        return _digest(buffer, &view, base_offset, segment_end, count_max, bytes_max, delay_levels_ms, with_keys,
                       with_tags, rows, &queues, &keys)
    finally:
        free(rows)
        free(queues.all)
        free(queues.places)
        free(keys.at)
        PyBuffer_Release(&view)


cdef inline Queue *_find_queue(Queues *queues, Record *record) noexcept:
    """The record's queue among those met before; a new one, with a run of -1 and no name, if it is none of them."""
    cdef Queue *queue
    # A topic's last four bytes, which digits often are. What is before a short one is the record's, too.
    cdef unsigned int place = _int32(record.topic.at + record.topic.size - 4)
    place = ((place ^ <unsigned int>record.queue_id * <unsigned int>0x9E3779B1) * <unsigned int>0x85EBCA6B) >> 8
    while queues.places[place & queues.mask]:
        queue = &queues.all[queues.places[place & queues.mask] - 1]
        if (queue.queue_id == record.queue_id and queue.topic.size == record.topic.size
                and not memcmp(queue.topic.at, record.topic.at, record.topic.size)):
            return queue
        place += 1
    queue = &queues.all[queues.count]
    queues.count += 1
    queues.places[place & queues.mask] = <unsigned int>queues.count
    queue.topic, queue.queue_id, queue.run = record.topic, record.queue_id, -1
    queue.before = queue.before_tags = 0
    queue.is_usual = False
    return queue


cdef Py_ssize_t _run_of(dict runs, list names, str topic, int queue_id) except -1:
    """The number of a queue's run, which may be a new one."""
    name = topic, queue_id
    known = runs.get(name)
    if known is None:
        known = runs[name] = len(names)
        names.append(name)
    return known


cdef object _digest(object buffer, Py_buffer *view, long long base_offset, long long segment_end,
                    Py_ssize_t count_max, Py_ssize_t bytes_max, object delay_levels_ms, bint with_keys,
                    bint with_tags, Row *rows, Queues *queues, Buffer *keys):
    cdef const unsigned char *begin = <const unsigned char *>view.buf
    cdef Py_ssize_t end = view.len, position = 0, count = 0, row_count = 0, run, queue_count
    cdef Record record, last
    cdef Values values
    cdef Queue *queue
    cdef bint is_usual
    cdef long long tags_code
    cdef dict runs = {}
    cdef list names = [], topics = []
    cdef str topic
    trouble = None
    values.unique_key.size = values.keys.size = values.tags.size = 0
    while position < end and count < count_max and position < bytes_max:
        queue = NULL
        is_usual = _parse(begin + position, end - position, &record)
        is_usual = is_usual and record.physical_offset == base_offset + position
        if is_usual:
            # Records are often alike. What isn't in the cache yet is fetched meanwhile; a wrong guess does no harm.
            _prefetch(begin + position + 2 * record.size)
            _prefetch(begin + position + 3 * record.size - 32)
            queue_count = queues.count
            queue = _find_queue(queues, &record)
            if queues.count > queue_count:
                topic = record.topic.at[: record.topic.size].decode("utf-8", "replace")
                topics.append(topic)
                queue.is_usual = topic != SCHEDULE_TOPIC
                if with_keys:
                    queue.before = <unsigned int><int>hash_before(topic, "")
                    queue.before_tags = <unsigned int><int>hash_before(topic, TAG_INFIX) if with_tags else 0
            is_usual = queue.is_usual and _find_values(record.properties, &values)
        if is_usual:
            tags_code = <int>_hash(0, values.tags.at, values.tags.size)
            if with_keys:
                _add_keys(keys, &record, &values, queue.before, queue.before_tags, with_tags)
        else:
            found = scan_record(buffer, position, end, delay_levels_ms=delay_levels_ms)
            if type(found) is not RecordHead or found.physical_offset != base_offset + position:
                position, trouble = end_of_run(found, buffer, position, base_offset, segment_end)
                break
            queue, topic = NULL, found.topic
            record.size, record.sys_flag = found.total_size, <unsigned int><int>found.sys_flag
            record.queue_id, record.queue_offset = found.queue_id, found.queue_offset
            record.physical_offset, record.store_ms = found.physical_offset, found.store_timestamp_ms
            tags_code = found.tags_code
            if with_keys:
                for each in index_key_hashes(found, with_tags=with_tags):
                    _add_key(keys, each, &record)
        if record.sys_flag & TRANSACTION_MASK in (0, COMMIT):
            if queue == NULL:
                run = _run_of(runs, names, topic, record.queue_id)
            elif queue.run < 0:
                run = queue.run = _run_of(runs, names, topics[queue - queues.all], record.queue_id)
            else:
                run = queue.run
            rows[row_count].run = run
            rows[row_count].physical_offset = record.physical_offset
            rows[row_count].queue_offset = record.queue_offset
            rows[row_count].tags_code = tags_code
            rows[row_count].size = record.size
            row_count += 1
        last = record
        count += 1
        position += record.size
    return RecordDigest(
        count,
        position,
        trouble,
        base_offset if count else -1,
        last.physical_offset if count else -1,
        last.store_ms if count else -1,
        _queue_runs(names, rows, row_count),
        PyBytes_FromStringAndSize(<char *>keys.at, keys.size),
    )


cdef list _queue_runs(list names, Row *rows, Py_ssize_t row_count):
    """Put the rows together by queue."""
    cdef Py_ssize_t run_count = len(names), run, row, place
    cdef Py_ssize_t *counts
    cdef Py_ssize_t *order
    cdef unsigned char *at
    cdef bint are_consecutive
    cdef list found = [], codes
    cdef bytes entries
    cdef long long code = 0
    cdef object known_code = 0
    if not run_count:
        return found
    # Where each run begins in `order`, which has the rows by run; then where it ends.
    counts = <Py_ssize_t *>malloc((run_count + 1 + row_count) * sizeof(Py_ssize_t))
    if counts == NULL:
        raise MemoryError
    try:
        order = counts + run_count + 1
        for run in range(run_count + 1):
            counts[run] = 0
        for row in range(row_count):
            counts[rows[row].run + 1] += 1
        for run in range(run_count):
            counts[run + 1] += counts[run]
        for row in range(row_count):
            run = rows[row].run
            order[counts[run]] = row
            counts[run] += 1
        place = 0
        for run in range(run_count):
            entries = PyBytes_FromStringAndSize(NULL, (counts[run] - place) * ENTRY_SIZE)
            at = <unsigned char *>PyBytes_AS_STRING(entries)
            codes, are_consecutive = [], True
            first = place
            while place < counts[run]:
                row = order[place]
                _put_int64(at, rows[row].physical_offset)
                _put_int32(at + 8, rows[row].size)
                _put_int64(at + 12, rows[row].tags_code)
                at += ENTRY_SIZE
                if rows[row].tags_code != code:
                    code = rows[row].tags_code
                    known_code = code
                codes.append(known_code)
                if place > first and rows[row].queue_offset != rows[order[place - 1]].queue_offset + 1:
                    are_consecutive = False
                place += 1
            offsets = None
            if not are_consecutive:
                offsets = [rows[order[each]].queue_offset for each in range(first, place)]
            topic, queue_id = names[run]
            found.append(QueueRun(topic, queue_id, rows[order[first]].queue_offset, entries, codes, offsets))
        return found
    finally:
        free(counts)

"""Compiled twin of `digest_records` in record_digest.py.

Delayed messages, records whose tags or keys are not ASCII, and damage are left to `scan_record`.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy

from ha.protocol._layout cimport (
    ENTRY_SIZE, KEY_SIZE, RECORD_SIZE_MIN, TRANSACTION_COMMIT, TRANSACTION_MASK, TRANSACTION_ROLLBACK, Record,
    parse_record, read_uint32, write_int64, write_uint32,
)

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
from ha.protocol.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC

cdef struct Row:
    Py_ssize_t run
    long long physical_offset
    long long queue_offset
    long long tags_code
    unsigned int size


cdef struct Span:
    const unsigned char *at
    Py_ssize_t size


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


cdef bint _find_values(const unsigned char *at, Py_ssize_t properties_size, Values *values) noexcept:
    """Finds the properties that dispatch needs in the string at `at`; of repeated ones the last that is not empty.
    Returns False if one of them is not ASCII."""
    cdef const unsigned char *end = at + properties_size
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
    # Four at a time, as each product depends on the previous one and a key has about forty characters.
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
    # Only numbers that fit a C int: comparing with a larger one would create a Python object for each hash.
    positive = key_hash if <int>key_hash >= 0 else 0 - key_hash
    if <int>positive < 0:
        positive = 0
    memcpy(at, &positive, 4)
    memcpy(at + 4, &record.physical_offset, 8)
    memcpy(at + 12, &record.store_timestamp_ms, 8)
    keys.size += KEY_SIZE
    return True


cdef bint _add_keys(Buffer *keys, Record *record, Values *values, unsigned int before, unsigned int before_tags,
                    bint with_tags) except False:
    """Adds the keys of a record like `index_key_hashes`."""
    cdef const unsigned char *at
    cdef const unsigned char *end
    cdef const unsigned char *stop
    if record.sys_flag & TRANSACTION_MASK == TRANSACTION_ROLLBACK:
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


cdef inline Queue *_find_queue(Queues *queues, const unsigned char *topic, Record *record) noexcept:
    """Returns the queue of a record; if it was not seen before, a new one with run -1 and no name."""
    cdef Queue *queue
    # The last four bytes of a topic are often digits. Before a short topic lie other bytes of the record.
    cdef unsigned int place = read_uint32(topic + record.topic_size - 4)
    place = ((place ^ <unsigned int>record.queue_id * <unsigned int>0x9E3779B1) * <unsigned int>0x85EBCA6B) >> 8
    while queues.places[place & queues.mask]:
        queue = &queues.all[queues.places[place & queues.mask] - 1]
        if (queue.queue_id == record.queue_id and queue.topic.size == record.topic_size
                and not memcmp(queue.topic.at, topic, record.topic_size)):
            return queue
        place += 1
    queue = &queues.all[queues.count]
    queues.count += 1
    queues.places[place & queues.mask] = <unsigned int>queues.count
    queue.topic.at, queue.topic.size = topic, record.topic_size
    queue.queue_id, queue.run = record.queue_id, -1
    queue.before = queue.before_tags = 0
    queue.is_usual = False
    return queue


cdef Py_ssize_t _run_of(dict runs, list names, str topic, int queue_id) except -1:
    """Returns the number of the run of a queue, which may be a new one."""
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
    cdef const unsigned char *at
    cdef Py_ssize_t end = view.len, position = 0, count = 0, row_count = 0, run, queue_count
    cdef Record record
    cdef long long last_physical_offset = -1, last_store_timestamp_ms = -1
    cdef Values values
    cdef Queue *queue
    cdef bint is_usual
    cdef long long tags_code
    cdef dict runs = {}
    cdef list names = [], topics = []
    cdef str topic
    damage = None
    values.unique_key.size = values.keys.size = values.tags.size = 0
    while position < end and count < count_max and position < bytes_max:
        queue = NULL
        at = begin + position
        is_usual = parse_record(at, end - position, &record)
        is_usual = is_usual and record.physical_offset == base_offset + position
        if is_usual:
            # Records often have similar sizes. Fetching the next ones into the cache early is harmless if the guess is wrong.
            _prefetch(at + 2 * record.size)
            _prefetch(at + 3 * record.size - 32)
            queue_count = queues.count
            queue = _find_queue(queues, at + record.topic_at, &record)
            if queues.count > queue_count:
                topic = (at + record.topic_at)[:record.topic_size].decode("utf-8", "replace")
                topics.append(topic)
                queue.is_usual = topic not in (SCHEDULE_TOPIC, TIMER_TOPIC)
                if with_keys:
                    queue.before = <unsigned int><int>hash_before(topic, "")
                    queue.before_tags = <unsigned int><int>hash_before(topic, TAG_INFIX) if with_tags else 0
            is_usual = queue.is_usual and _find_values(at + record.properties_at, record.properties_size, &values)
        if is_usual:
            tags_code = <int>_hash(0, values.tags.at, values.tags.size)
            if with_keys:
                _add_keys(keys, &record, &values, queue.before, queue.before_tags, with_tags)
        else:
            found = scan_record(buffer, position, end, delay_levels_ms=delay_levels_ms)
            if type(found) is not RecordHead or found.physical_offset != base_offset + position:
                position, damage = end_of_run(found, buffer, position, base_offset, segment_end)
                break
            queue, topic = NULL, found.topic
            record.size, record.sys_flag = found.total_size, <unsigned int><int>found.sys_flag
            record.queue_id, record.queue_offset = found.queue_id, found.queue_offset
            record.physical_offset, record.store_timestamp_ms = found.physical_offset, found.store_timestamp_ms
            tags_code = found.tags_code
            if with_keys:
                for each in index_key_hashes(found, with_tags=with_tags):
                    _add_key(keys, each, &record)
        if record.sys_flag & TRANSACTION_MASK in (0, TRANSACTION_COMMIT):
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
            rows[row_count].size = <unsigned int>record.size
            row_count += 1
        last_physical_offset, last_store_timestamp_ms = record.physical_offset, record.store_timestamp_ms
        count += 1
        position += record.size
    return RecordDigest(
        count,
        position,
        damage,
        base_offset if count else -1,
        last_physical_offset,
        last_store_timestamp_ms,
        _queue_runs(names, rows, row_count),
        PyBytes_FromStringAndSize(<char *>keys.at, keys.size),
    )


cdef list _queue_runs(list names, Row *rows, Py_ssize_t row_count):
    """Groups the rows by queue."""
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
    # The start of each run in `order`, which holds the rows by run; later its end.
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
                write_int64(at, rows[row].physical_offset)
                write_uint32(at + 8, rows[row].size)
                write_int64(at + 12, rows[row].tags_code)
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

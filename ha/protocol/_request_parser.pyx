"""Compiled twin of `read_requests` in request_parser.py.

Reads headers in the form RocketMQ's clients write: ASCII, no spaces, each name once, request code 310, 320, 200050 or
200051. Any other header is left to `read_request`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.string cimport memcmp, memset

from ha.protocol._layout cimport (
    ACK_COUNT_MAX, ACK_FIELD_COUNT, POP_FIELD_COUNT, PROPERTIES_SIZE_MAX, SEND_FIELD_COUNT, read_uint32
)

from ha.protocol.codes import LanguageCode
from ha.protocol.pop import ORDER_QUEUE
from ha.protocol.remoting import BODY_COPIED_MAX, LANGUAGE_BY_NAME
from ha.protocol.request_parser import (
    AckCommand, AckedPop, OnlyAck, OnlyPop, OnlyShort, PopCommand, SendCommand, read_request
)

cdef Py_ssize_t BODY_COPIED = BODY_COPIED_MAX
cdef long long ORDER = ORDER_QUEUE


cdef struct Span:
    const unsigned char *at
    Py_ssize_t size
    bint has_escapes


cdef struct Header:
    long long code, flag, opaque, version
    Span language
    Span ext[SEND_FIELD_COUNT]  # in the order of the struct's fields


cdef struct Acked:  # AckedPop
    Span group, topic
    long long queue_id, pop_time_ms
    bint is_order


cdef inline const unsigned char *_text(const unsigned char *at, const unsigned char *end, Span *span) noexcept:
    """Returns the position after the closing quote of the string that starts at `at`; NULL if it has control or
    non-ASCII characters, or no closing quote."""
    span.at, span.has_escapes = at, False
    while at < end:
        if at[0] == c'"':
            span.size = at - span.at
            return at + 1
        if at[0] < 0x20 or at[0] >= 0x80:
            return NULL
        if at[0] == c"\\":
            span.has_escapes = True
            at += 1
        at += 1
    return NULL


cdef inline const unsigned char *_parse_number(const unsigned char *at, const unsigned char *end, int digits_max,
                                               long long *value) noexcept:
    """Returns the end of the integer at `at`; NULL if it is not in canonical form (no leading zeros, no "-0")."""
    cdef bint is_negative = at < end and at[0] == c"-"
    cdef const unsigned char *begin
    at += is_negative
    begin = at
    value[0] = 0
    while at < end and c"0" <= at[0] <= c"9" and at - begin < digits_max:
        value[0] = value[0] * 10 + (at[0] - c"0")
        at += 1
    if at == begin or (begin[0] == c"0" and (at - begin > 1 or is_negative)):
        return NULL
    if is_negative:
        value[0] = -value[0]
    return at


cdef inline const unsigned char *_parse_int32(const unsigned char *at, const unsigned char *end,
                                              long long *value) noexcept:
    at = _parse_number(at, end, 10, value)
    return at if at != NULL and -0x80000000LL <= value[0] <= 0x7FFFFFFFLL else NULL


cdef inline const unsigned char *_value(const unsigned char *at, const unsigned char *end, Span *value) noexcept:
    """Reads the string of an ext field, which starts at `at`. Returns the position of the comma or brace after it; NULL
    if there is none, or the field was read before."""
    if value.at != NULL:
        return NULL
    at = _text(at, end, value)
    return at if at != NULL and at < end and at[0] in (c",", c"}") else NULL


cdef const unsigned char *_send_fields(const unsigned char *at, const unsigned char *end, Header *header) noexcept:
    cdef int place
    while end - at >= 5 and at[0] == c'"' and c"a" <= at[1] <= c"n" and memcmp(at + 2, b'":"', 3) == 0:
        place = at[1] - c"a"
        at = _value(at + 5, end, &header.ext[place])
        if at == NULL or at[0] == c"}":
            return at if at == NULL else at + 1
        at += 1
    return NULL


cdef inline bint _is(Span *span, const char *text, Py_ssize_t size) noexcept:
    return span.size == size and memcmp(span.at, text, size) == 0


cdef class Names:
    """The names of a struct's ext fields."""

    cdef list names
    cdef int count
    cdef const char *texts[SEND_FIELD_COUNT]
    cdef Py_ssize_t sizes[SEND_FIELD_COUNT]

    def __cinit__(self, tuple names, int count):
        cdef int place
        assert len(names) == count <= SEND_FIELD_COUNT
        self.names, self.count = [name.encode() for name in names], count
        for place in range(count):
            self.texts[place] = PyBytes_AS_STRING(self.names[place])
            self.sizes[place] = PyBytes_GET_SIZE(self.names[place])


cdef Names ACK_NAMES = Names(OnlyAck.__struct_encode_fields__, ACK_FIELD_COUNT)
cdef Names POP_NAMES = Names(OnlyPop.__struct_encode_fields__, POP_FIELD_COUNT)


cdef const unsigned char *_named_fields(const unsigned char *at, const unsigned char *end, Header *header,
                                        Names names) noexcept:
    cdef Span name
    cdef int place
    while at < end and at[0] == c'"':
        at = _text(at + 1, end, &name)
        if at == NULL or end - at < 2 or at[0] != c":" or at[1] != c'"':
            return NULL
        place = 0
        while place < names.count and not _is(&name, names.texts[place], names.sizes[place]):
            place += 1
        if place == names.count:
            return NULL
        at = _value(at + 2, end, &header.ext[place])
        if at == NULL or at[0] == c"}":
            return at if at == NULL else at + 1
        at += 1
    return NULL


cdef bint _scan(const unsigned char *at, const unsigned char *end, Header *header) noexcept:
    """Finds the values of a header. Returns False if it does not have the usual form."""
    cdef Span name, ignored
    cdef int place
    cdef unsigned int seen = 0, bit
    for place in range(SEND_FIELD_COUNT):
        header.ext[place].at = NULL
    header.code = header.flag = header.opaque = header.version = 0
    header.language.at = NULL
    if end - at < 12 or memcmp(at, b'{"code":', 8):
        return False
    at += 1
    while at < end and at[0] == c'"':
        at = _text(at + 1, end, &name)
        if at == NULL or at == end or at[0] != c":":
            return False
        at += 1
        if name.size == 4 and memcmp(name.at, b"code", 4) == 0:
            bit, at = 1, _parse_int32(at, end, &header.code)
        elif name.size == 4 and memcmp(name.at, b"flag", 4) == 0:
            bit, at = 2, _parse_int32(at, end, &header.flag)
        elif name.size == 6 and memcmp(name.at, b"opaque", 6) == 0:
            bit, at = 4, _parse_int32(at, end, &header.opaque)
        elif name.size == 7 and memcmp(name.at, b"version", 7) == 0:
            bit, at = 8, _parse_int32(at, end, &header.version)
        elif name.size == 8 and memcmp(name.at, b"language", 8) == 0 and at < end and at[0] == c'"':
            bit, at = 16, _text(at + 1, end, &header.language)
        elif name.size == 9 and memcmp(name.at, b"extFields", 9) == 0 and at < end and at[0] == c"{":
            bit = 32
            if header.code == 200051:
                at = _named_fields(at + 1, end, header, ACK_NAMES)
            elif header.code == 200050:
                at = _named_fields(at + 1, end, header, POP_NAMES)
            elif header.code == 310 or header.code == 320:
                at = _send_fields(at + 1, end, header)
            else:
                return False
        elif name.size == 23 and memcmp(name.at, b"serializeTypeCurrentRPC", 23) == 0 and at < end and at[0] == c'"':
            bit, at = 64, _text(at + 1, end, &ignored)
            if ignored.has_escapes:
                return False
        else:
            return False
        if at == NULL or at == end or seen & bit:
            return False
        seen |= bit
        if at[0] == c"}":
            return at + 1 == end and seen & 33 == 33 and not header.language.has_escapes
        if at[0] != c",":
            return False
        at += 1
    return False


cdef object _string(Span *span):
    """Returns the string of a span; None if it has an escape that RocketMQ's clients don't write."""
    cdef unsigned char text[PROPERTIES_SIZE_MAX]
    cdef const unsigned char *at = span.at
    cdef const unsigned char *end = span.at + span.size
    cdef Py_ssize_t size = 0
    cdef int digit, low
    if not span.has_escapes:
        return PyUnicode_DecodeASCII(<const char *>span.at, span.size, NULL)
    if span.size > PROPERTIES_SIZE_MAX:
        return None
    while at < end:
        if at[0] != c"\\":
            text[size] = at[0]
            at += 1
        elif end - at >= 6 and memcmp(at, b"\\u00", 4) == 0 and c"0" <= at[4] <= c"7":
            digit = at[5]
            if c"0" <= digit <= c"9":
                low = digit - c"0"
            elif c"a" <= digit | 0x20 <= c"f":
                low = (digit | 0x20) - c"a" + 10
            else:
                return None
            text[size] = <unsigned char>((at[4] - c"0") * 16 + low)
            at += 6
        elif end - at >= 2 and at[1] in (c'"', c"\\", c"/"):
            text[size] = at[1]
            at += 2
        else:
            return None
        size += 1
    return PyUnicode_DecodeASCII(<const char *>text, size, NULL)


cdef inline bint _ext_number(Span *span, bint is_long, long long *value) noexcept:
    cdef const unsigned char *end = span.at + span.size
    return (_parse_number(span.at, end, 18, value) if is_long else _parse_int32(span.at, end, value)) == end


cdef inline bint _ext_bool(Span *span, bint *value) noexcept:
    value[0] = _is(span, b"true", 4)
    return value[0] or _is(span, b"false", 5)


cdef object _send_request(Header *header):
    """Returns the request in the ext fields of a header; None if one is missing or does not have the usual form."""
    cdef Span *ext = header.ext
    cdef long long queue_nums, queue_id, sys_flag, born_timestamp, flag, times = 0, times_max = 0
    cdef bint unit_mode = False, batch = False
    cdef int place
    for place in range(8):
        if ext[place].at == NULL:
            return None
    if not (
        _ext_number(&ext[3], False, &queue_nums)
        and _ext_number(&ext[4], False, &queue_id)
        and _ext_number(&ext[5], False, &sys_flag)
        and _ext_number(&ext[6], True, &born_timestamp)
        and _ext_number(&ext[7], False, &flag)
        and (ext[9].at == NULL or _ext_number(&ext[9], False, &times))
        and (ext[10].at == NULL or _ext_bool(&ext[10], &unit_mode))
        and (ext[11].at == NULL or _ext_number(&ext[11], False, &times_max))
        and (ext[12].at == NULL or _ext_bool(&ext[12], &batch))
    ):
        return None
    group, topic, default_topic = _string(&ext[0]), _string(&ext[1]), _string(&ext[2])
    properties = "" if ext[8].at == NULL else _string(&ext[8])
    broker_name = None if ext[13].at == NULL else _string(&ext[13])
    if group is None or topic is None or default_topic is None or properties is None:
        return None
    if broker_name is None and ext[13].at != NULL:
        return None
    return OnlyShort(
        producer_group=group,
        topic=topic,
        default_topic=default_topic,
        default_topic_queue_nums=queue_nums,
        queue_id=queue_id,
        sys_flag=sys_flag,
        born_timestamp=born_timestamp,
        flag=flag,
        properties=properties,
        reconsume_times=times,
        unit_mode=unit_mode,
        max_reconsume_times=None if ext[11].at == NULL else times_max,
        batch=batch,
        broker_name=broker_name,
    )


cdef object _pop_request(Header *header):
    """Returns the request in the ext fields of a header; None if one is missing or does not have the usual form."""
    cdef Span *ext = header.ext
    cdef long long queue_id, max_msg_nums, invisible_time, poll_time, born_time, init_mode
    cdef bint order = False
    cdef int place
    for place in range(8):
        if ext[place].at == NULL:
            return None
    if not (
        _ext_number(&ext[2], False, &queue_id)
        and _ext_number(&ext[3], False, &max_msg_nums)
        and _ext_number(&ext[4], True, &invisible_time)
        and _ext_number(&ext[5], True, &poll_time)
        and _ext_number(&ext[6], True, &born_time)
        and _ext_number(&ext[7], False, &init_mode)
        and (ext[10].at == NULL or _ext_bool(&ext[10], &order))
    ):
        return None
    texts = [None if ext[place].at == NULL else _string(&ext[place]) for place in (0, 1, 8, 9, 11, 12)]
    for place, text in zip((0, 1, 8, 9, 11, 12), texts):
        if text is None and ext[place].at != NULL:
            return None
    return OnlyPop(
        consumer_group=texts[0],
        topic=texts[1],
        queue_id=queue_id,
        max_msg_nums=max_msg_nums,
        invisible_time=invisible_time,
        poll_time=poll_time,
        born_time=born_time,
        init_mode=init_mode,
        exp_type=texts[2],
        exp=texts[3],
        order=order,
        attempt_id=texts[4],
        broker_name=texts[5],
    )


cdef bint _read_ack(Header *header, Acked *acked, long long *offset) noexcept:
    """Reads the ext fields of an acknowledgement. Returns False if one is missing or does not have the usual form."""
    cdef Span *ext = header.ext
    cdef int place
    for place in range(ACK_FIELD_COUNT - 1):
        if ext[place].at == NULL:
            return False
    if ext[5].at != NULL and ext[5].has_escapes:
        return False
    acked.group = ext[0]
    acked.topic = ext[1]
    return (
        _ext_number(&ext[2], False, &acked.queue_id)
        and _ext_number(&ext[4], True, offset)
        and _read_handle(&ext[3], acked)
    )


cdef bint _read_handle(Span *span, Acked *acked) noexcept:
    """Reads a receipt handle. Returns False if it does not have the usual form."""
    cdef const unsigned char *at = span.at
    cdef const unsigned char *end = span.at + span.size
    cdef long long numbers[7]  # without the sixth word, the broker's name
    cdef int number
    if span.has_escapes:
        return False
    for number in range(5):
        at = _parse_number(at, end, 18, &numbers[number])
        if at == NULL or at == end or at[0] != c" ":
            return False
        at += 1
    while at < end and at[0] != c" ":
        at += 1
    for number in range(5, 7):
        if at == end or at[0] != c" ":
            return False
        at = _parse_number(at + 1, end, 18, &numbers[number])
        if at == NULL:
            return False
    acked.pop_time_ms, acked.is_order = numbers[1], numbers[3] == ORDER
    return at == end or at[0] == c" "


cdef inline bint _is_same_text(Span *span, Span *other) noexcept:
    return span.size == other.size and memcmp(span.at, other.at, span.size) == 0


cdef inline bint _is_same_pop(Acked *acked, Acked *other) noexcept:
    return (
        acked.pop_time_ms == other.pop_time_ms
        and acked.queue_id == other.queue_id
        and acked.is_order == other.is_order
        and _is_same_text(&acked.topic, &other.topic)
        and _is_same_text(&acked.group, &other.group)
    )


cdef object _acked_pop(Acked *acked):
    """Returns the AckedPop; None if a string has an escape that RocketMQ's clients don't write."""
    group, topic = _string(&acked.group), _string(&acked.topic)
    if group is None or topic is None:
        return None
    return AckedPop(group, topic, acked.queue_id, acked.pop_time_ms, bool(acked.is_order))


def read_requests(bytes data not None, Py_ssize_t length_max, Py_ssize_t header_size_max):
    cdef const unsigned char *begin = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef const unsigned char *at
    cdef Py_ssize_t position = 0, end = PyBytes_GET_SIZE(data), length, header_size, body_at, frame_end
    cdef Header header
    cdef Span known_language
    cdef Acked acked, known_acked
    cdef long long offset, known_flag = 0, known_version = 0
    cdef Py_ssize_t count = 0
    cdef list commands = []
    # Offsets and opaques of the last command if further acknowledgements can join it: it acknowledges messages of
    # `popped`, has `known_flag` and `known_version`, and has no body. Otherwise None.
    cdef list known_offsets = None, known_opaques = None
    cdef object body, command, request, last = None, popped = None, language = LanguageCode.OTHER
    known_language.at, known_language.size = NULL, -1
    memset(&known_acked, 0, sizeof(known_acked))
    while end - position >= 8:
        at = begin + position
        length, header_size = <int>read_uint32(at), read_uint32(at + 4)
        frame_end, body_at = position + 4 + length, position + 8 + header_size
        # In another encoding, the first byte of the header size is not 0, so the size appears to be too large.
        if not 4 <= length <= length_max or header_size > header_size_max or frame_end > end or body_at > frame_end:
            break
        if header_size < 12 or memcmp(at + 8, b'{"code":', 8):
            break
        if frame_end - body_at <= BODY_COPIED:
            body = PyBytes_FromStringAndSize(<const char *>begin + body_at, frame_end - body_at)
        else:
            body = memoryview(data)[body_at:frame_end]
        command = None
        if _scan(at + 8, begin + body_at, &header):
            if header.language.at == NULL:
                language, known_language.size = LanguageCode.OTHER, -1
            elif (header.language.size != known_language.size
                  or memcmp(header.language.at, known_language.at, known_language.size)):
                known_language = header.language
                name = PyUnicode_DecodeASCII(<const char *>known_language.at, known_language.size, NULL)
                language = LANGUAGE_BY_NAME.get(name, LanguageCode.OTHER)
            if header.code == 200050:
                request = _pop_request(&header)
                if request is not None:
                    command = PopCommand(
                        header.code, header.opaque, header.flag, language, header.version, body=body, request=request
                    )
            elif header.code != 200051:
                request = _send_request(&header)
                if request is not None:
                    command = SendCommand(
                        header.code, header.opaque, header.flag, language, header.version, body=body, request=request
                    )
            elif _read_ack(&header, &acked, &offset):
                if popped is None or not _is_same_pop(&acked, &known_acked):
                    popped = _acked_pop(&acked)
                    known_acked = acked
                    known_offsets = None
                if popped is not None:
                    if (known_offsets is not None and len(known_offsets) < ACK_COUNT_MAX and frame_end == body_at
                            and header.flag == known_flag and header.version == known_version
                            and language is last.language):
                        known_offsets.append(offset)
                        known_opaques.append(header.opaque)
                        position = frame_end
                        count += 1
                        continue
                    command = AckCommand(
                        header.code,
                        header.opaque,
                        header.flag,
                        language,
                        header.version,
                        body=body,
                        popped=popped,
                        offsets=[offset],
                        opaques=[header.opaque],
                    )
        if command is None:
            command = read_request(PyBytes_FromStringAndSize(<const char *>at + 8, header_size), body)
            if command is None:
                break
        position = frame_end
        count += 1
        known_offsets = None
        if type(command) is AckCommand:
            if type(last) is AckCommand and last.is_continued_by(command):
                last.offsets.extend(command.offsets)
                last.opaques.extend(command.opaques)
                continue
            if command.popped is popped and not body:
                known_offsets, known_opaques = command.offsets, command.opaques
                known_flag, known_version = header.flag, header.version
        commands.append(command)
        last = command
    return commands, position, count

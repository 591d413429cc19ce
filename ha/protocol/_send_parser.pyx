"""Compiled twin of `read_sends` in send_parser.py.

Reads headers in the form RocketMQ's clients write: ASCII, no spaces, each name once, request code 310 or 320. Any other
header is left to `read_send`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.string cimport memcmp

from ha.protocol._layout cimport PROPERTIES_SIZE_MAX, SEND_FIELD_COUNT, read_uint32

from ha.protocol.codes import LanguageCode
from ha.protocol.remoting import BODY_COPIED_MAX, LANGUAGE_BY_NAME
from ha.protocol.send_parser import OnlyShort, SendCommand, read_send

cdef Py_ssize_t BODY_COPIED = BODY_COPIED_MAX


cdef struct Span:
    const unsigned char *at
    Py_ssize_t size
    bint has_escapes


cdef struct Header:
    long long code, flag, opaque, version
    Span language
    Span ext[SEND_FIELD_COUNT]


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


cdef const unsigned char *_ext_fields(const unsigned char *at, const unsigned char *end, Header *header) noexcept:
    cdef int place
    while end - at >= 5 and at[0] == c'"' and c"a" <= at[1] <= c"n" and memcmp(at + 2, b'":"', 3) == 0:
        place = at[1] - c"a"
        if header.ext[place].at != NULL:
            return NULL
        at = _text(at + 5, end, &header.ext[place])
        if at == NULL or at == end:
            return NULL
        if at[0] == c"}":
            return at + 1
        if at[0] != c",":
            return NULL
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
    if end - at < 12 or memcmp(at, b'{"code":3', 9):
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
            bit, at = 32, _ext_fields(at + 1, end, header)
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
            return at + 1 == end and seen & 33 == 33 and header.code in (310, 320) and not header.language.has_escapes
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


cdef inline bint _is(Span *span, const char *text, Py_ssize_t size) noexcept:
    return span.size == size and memcmp(span.at, text, size) == 0


cdef inline bint _ext_number(Span *span, bint is_long, long long *value) noexcept:
    cdef const unsigned char *end = span.at + span.size
    return (_parse_number(span.at, end, 18, value) if is_long else _parse_int32(span.at, end, value)) == end


cdef object _request(Header *header):
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
        and (ext[11].at == NULL or _ext_number(&ext[11], False, &times_max))
    ):
        return None
    if ext[10].at != NULL:
        unit_mode = _is(&ext[10], b"true", 4)
        if not unit_mode and not _is(&ext[10], b"false", 5):
            return None
    if ext[12].at != NULL:
        batch = _is(&ext[12], b"true", 4)
        if not batch and not _is(&ext[12], b"false", 5):
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


def read_sends(bytes data not None, Py_ssize_t length_max, Py_ssize_t header_size_max):
    cdef const unsigned char *begin = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef const unsigned char *at
    cdef Py_ssize_t position = 0, end = PyBytes_GET_SIZE(data), length, header_size, body_at, frame_end
    cdef Header header
    cdef Span known_language
    cdef list commands = []
    cdef object body, request, language = LanguageCode.OTHER
    known_language.at, known_language.size = NULL, -1
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
        request = _request(&header) if _scan(at + 8, begin + body_at, &header) else None
        if request is None:
            command = read_send(PyBytes_FromStringAndSize(<const char *>at + 8, header_size), body)
            if command is None:
                break
        else:
            if header.language.at == NULL:
                language, known_language.size = LanguageCode.OTHER, -1
            elif (header.language.size != known_language.size
                  or memcmp(header.language.at, known_language.at, known_language.size)):
                known_language = header.language
                name = PyUnicode_DecodeASCII(<const char *>known_language.at, known_language.size, NULL)
                language = LANGUAGE_BY_NAME.get(name, LanguageCode.OTHER)
            command = SendCommand(
                header.code, header.opaque, header.flag, language, header.version, body=body, request=request
            )
        commands.append(command)
        position = frame_end
    return commands, position

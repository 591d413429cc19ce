"""The constants and layouts of the compiled twins (`_layout.pxd`) are those of the Python modules."""

import re
from pathlib import Path

import ha.protocol
from ha.protocol import batch, codes, ha_frame, index_entries, properties, record, record_digest, record_encoding
from ha.protocol.codes import SysFlag
from ha.protocol.request_parser import ACK_COUNT_MAX, OnlyAck, OnlyPop, OnlyShort
from ha.protocol.store_files import BLANK_SIZE, ENTRY_SIZE, INDEX_ENTRY_SIZE
from ha.replication import pump

FOLDER = Path(ha.protocol.__file__).parent
ELSEWHERE = {
    "HEAD_SIZE": record.HEADS[0].size,
    "HOST_SIZE_V4": len(record.encode_host("127.0.0.1", 0)),
    "HOST_SIZE_V6": len(record.encode_host("::1", 0)),
    "STORE_TIMESTAMP_AT": record.HEADS[0].size - 32,
    "PLACE_SIZE": record.RECORD_PLACE.size,
    "INT32_MAX": 2**31 - 1,
    "BLANK_SIZE": BLANK_SIZE,
    "ENTRY_SIZE": ENTRY_SIZE,
    "INDEX_ENTRY_SIZE": INDEX_ENTRY_SIZE,
    "SEND_FIELD_COUNT": len(OnlyShort.__struct_fields__),
    "ACK_FIELD_COUNT": len(OnlyAck.__struct_fields__),
    "POP_FIELD_COUNT": len(OnlyPop.__struct_fields__),
    "ACK_COUNT_MAX": ACK_COUNT_MAX,
    "BATCH_HEAD_SIZE": batch.HEAD_SIZE,
    "BATCH_ENTRY_SIZE_MIN": batch.ENTRY_SIZE_MIN,
}
MODULES = (SysFlag, codes, properties, record, record_encoding, record_digest, index_entries, ha_frame, pump)


def test_constants_are_those_of_the_python_modules() -> None:
    enum = (FOLDER / "_layout.pxd").read_text().partition("cdef enum:\n")[2].partition("\n\n\n")[0]
    shared = {name: int(value, 0) for name, value in re.findall(r"^    (\w+) = (\w+)$", enum, re.MULTILINE)}
    assert shared.keys() >= ELSEWHERE.keys()
    for name, value in shared.items():
        expected = ELSEWHERE.get(name)
        if expected is None:
            expected = next(vars(module)[name] for module in MODULES if name in vars(module))
        assert value == expected & 0xFFFFFFFF, name


def test_compiled_twins_define_no_constants_of_their_own() -> None:
    for source in FOLDER.parent.rglob("_*.pyx"):
        assert "cdef enum:" not in source.read_text(), source

"""The inputs of bench/run growth: a sparse but valid log, messages for many queues, batches."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from bench.aims import AIMS
from bench.cases import CASES, Tools
from bench.growth import GROWTH, LONE_RATE, LONG_BODY_BYTES, measure_groups, write_long_log
from bench.load import FIRST_OPAQUE, templates
from bench.rounds import File
from bench.sides import Halog, Terms
from bench.table import markdown
from ha.protocol.batch import decode_batch
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions

MIB = 1 << 20
SEGMENTS, SEGMENT_BYTES = 3, 64 * MIB


def size_on_disk(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.glob("commitlog/*"))


async def test_long_log_is_valid_and_sparse(tmp_path: Path) -> None:
    end = write_long_log(tmp_path, SEGMENTS, segment_bytes=SEGMENT_BYTES)
    assert size_on_disk(tmp_path) < MIB
    options = StoreOptions(root=tmp_path, segment_size=SEGMENT_BYTES)
    async with open_message_store(options) as store:
        assert (store.log.min_offset, store.log.max_offset.value) == (0, end)
        queues = [store.queues.get("long", number) for number in range(4)]
        count = sum(queue.max_offset for queue in queues if queue is not None)
        assert count == SEGMENTS * (SEGMENT_BYTES // LONG_BODY_BYTES)
        assert store.log.dispatched_offset.value == end
        assert store.damage_statistics().log.open_count == 0
    assert size_on_disk(tmp_path) < MIB  # reading filled no hole


def frame(template: tuple[bytes, bytes]) -> tuple[dict[str, Any], bytes]:
    before, after = template
    data = before + b"%d" % FIRST_OPAQUE + after
    length, header_length = struct.unpack_from(">ii", data)
    assert length == len(data) - 4
    return json.loads(data[8 : 8 + header_length]), data[8 + header_length :]


def test_templates_address_each_queue() -> None:
    found = [frame(each) for each in templates("bench", 1024, "group", 1000)]
    assert [header["extFields"]["e"] for header, _ in found] == [str(number) for number in range(1000)]
    assert {len(body) for _, body in found} == {1024}
    assert {header["code"] for header, _ in found} == {310}


def test_brokers_can_decode_batches() -> None:
    header, body = frame(templates("bench", 100, "group", batch=32)[0])
    assert header["code"] == 320
    messages = decode_batch(body)
    assert len(messages) == 32
    assert set(messages) == {(0, (b"0123456789abcdef" * 7)[:100], b"TAGS\x01bench\x02")}


def test_definitions_are_consistent() -> None:
    cases = {case.name: {metric.key for metric in case.metrics} for case in (*CASES, *GROWTH)}
    assert len(cases) == len(CASES) + len(GROWTH)
    assert all({key for panel in case.panels for key in panel.keys} <= cases[case.name] for case in GROWTH)
    assert all(aim.key in cases[aim.case] for aim in AIMS)


def test_table_of_growth(tmp_path: Path) -> None:
    file = File(tmp_path / "runs.jsonl")
    head = {"kind": "run", "case": "log", "peer": "halog", "side": "halog"}
    file.append(
        [
            {**head, "round": number, "point": gib, "rate": 100.0 + number, "seconds": 0.5, "killed_s": 1.0}
            for number in range(3)
            for gib in (16, 1)
        ]
    )
    rows = [row for row in markdown(file.lines()).splitlines() if row.startswith("| 1")]
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 16"]
    assert "| 101 (100-102) |" in rows[0]


@pytest.mark.processes
def test_groups_share_a_fixed_rate(tmp_path: Path) -> None:
    terms = Terms(seconds=0.5, warm_s=0.1, ballast=False)
    [case] = [case for case in GROWTH if case.name == "groups"]
    run = measure_groups(Tools(terms), Halog(terms, tmp_path), 2, LONE_RATE, "--in-flight", 2, "--evenly")
    assert run.point == 2
    assert set(run.found["memory_mib"]) == {"namesrv", "master", "slave", "master-of-2", "slave-of-2"}
    assert {metric.key for metric in case.metrics} <= run.found.keys()
    assert run.found["messages"] > 2
    assert min(run.found["log_bytes"]) > 0  # the shares are even only on a machine that has the time for this rate

"""What bench/run tuning shows of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.tuning import GAPS_MIB, HEARTBEATS_MS, TRANSFERS, draw, tables


def copy(size: int, mb_per_s: float) -> dict[str, Any]:
    return {"case": "transfer", "bytes_each": size, "mb_per_s": mb_per_s, "master_cpu_s": 0.5, "slave_cpu_s": 1.25}


def test_copies_with_one_size_of_frames_are_one_row() -> None:
    runs = [copy(size, rate) for size in TRANSFERS for rate in (100.0, 140.0)]
    [(question, head, rows)] = tables(runs)
    assert "haTransferBatchSize" in question
    assert [row[0] for row in rows] == [f"{size:,}" for size in TRANSFERS]
    assert rows[0][1:] == ["120 (100-140)", "0.50 (0.50-0.50)", "1.25 (1.25-1.25)"]
    assert len(head) == len(rows[0])


def test_statuses_that_nobody_got_are_none() -> None:
    latency = {"p50": 1.25, "p99": 2999.96, "max": 3001.0}
    run = {"case": "gap", "gap_mib": 16, "statuses": {"SLAVE_NOT_AVAILABLE": 1200}, "latency_ms": latency}
    [(_, head, rows)] = tables([run])
    assert rows == [["16", "0", "1,200", "0", "1.2", "3,000.0", "3,001.0"]]
    assert len(head) == len(rows[0])


def test_each_case_has_a_table_of_its_own() -> None:
    beat = {"case": "heartbeat", "heartbeat_ms": HEARTBEATS_MS[0], "counts_s": 0.96}
    beat["cpu_ms_a_second"] = {"master": 10.0, "slave": 8.04}
    questions = [question for question, _, _ in tables([copy(size, 1.0) for size in TRANSFERS] + [beat])]
    assert len(questions) == 2
    [(_, head, rows)] = tables([beat])
    assert rows == [["250", "1,000", "10.0", "8.0", "1.0"]]
    assert len(head) == len(rows[0])


def test_curves_of_all_cases_are_a_picture(tmp_path: Path) -> None:
    gaps = [{"case": "gap", "gap_mib": gap, "sent": 4, "statuses": {"SEND_OK": 1}} for gap in GAPS_MIB]
    used = {"master": 2.0, "slave": 3.0}
    beats = [
        {"case": "heartbeat", "heartbeat_ms": ms, "counts_s": 1.0, "cpu_ms_a_second": used} for ms in HEARTBEATS_MS
    ]
    draw([*(copy(size, 1.0) for size in TRANSFERS), *gaps, *beats], tmp_path / "tuning.png")
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")

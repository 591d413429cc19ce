"""Tables and plots of bench/run tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.tuning import GAPS_MIB, HEARTBEATS_MS, TRANSFERS, draw, tables


def copy(size: int, mb_per_s: float) -> dict[str, Any]:
    return {"case": "transfer", "bytes_each": size, "mb_per_s": mb_per_s, "master_cpu_s": 0.5, "slave_cpu_s": 1.25}


def test_each_case_has_one_table() -> None:
    copies = [copy(size, n * 1000 + rate) for n, size in enumerate(TRANSFERS) for rate in (100.0, 140.0)]
    latency = {"p50": 1.25, "p99": 2999.96, "max": 3001.0}
    gap = {"case": "gap", "gap_mib": 16, "statuses": {"SLAVE_NOT_AVAILABLE": 1200}, "latency_ms": latency}
    beat = {"case": "heartbeat", "heartbeat_ms": HEARTBEATS_MS[0], "counts_s": 0.96}
    beat["cpu_ms_a_second"] = {"master": 10.0, "slave": 8.04}
    transfers, gaps, heartbeats = tables([*copies, gap, beat])
    assert "haTransferBatchSize" in transfers[0]
    assert [row[0] for row in transfers[2]] == [f"{size:,}" for size in TRANSFERS]
    assert transfers[2][0][1:] == ["120 (100-140)", "0.50 (0.50-0.50)", "1.25 (1.25-1.25)"]
    assert gaps[2] == [["16", "0", "1,200", "0", "1.2", "3,000.0", "3,001.0"]]
    assert heartbeats[2] == [["250", "1,000", "10.0", "8.0", "1.0"]]
    assert all(len(head) == len(rows[0]) for _, head, rows in (transfers, gaps, heartbeats))
    assert list(tables([beat])) == [heartbeats]


def test_all_cases_are_plotted(tmp_path: Path) -> None:
    gaps = [{"case": "gap", "gap_mib": gap, "sent": 4, "statuses": {"SEND_OK": 1}} for gap in GAPS_MIB]
    used = {"master": 2.0, "slave": 3.0}
    beats = [
        {"case": "heartbeat", "heartbeat_ms": ms, "counts_s": 1.0, "cpu_ms_a_second": used} for ms in HEARTBEATS_MS
    ]
    draw([*(copy(size, 1.0) for size in TRANSFERS), *gaps, *beats], tmp_path / "tuning.png")
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")

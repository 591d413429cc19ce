"""Tables and plots of bench/run tuning."""

from pathlib import Path
from typing import Any

from bench.tuning import GAPS_MIB, HEARTBEATS_MS, TRANSFERS, draw, tables


def copy(size: int, mb_per_s: float) -> dict[str, Any]:
    return {"case": "transfer", "bytes_each": size, "mb_per_s": mb_per_s, "master_cpu_s": 0.5, "slave_cpu_s": 1.25}


def test_each_case_has_one_table_and_is_plotted(tmp_path: Path) -> None:
    copies = [copy(size, n * 1000 + rate) for n, size in enumerate(TRANSFERS) for rate in (100.0, 140.0)]
    latency = {"p50": 1.25, "p99": 2999.96, "max": 3001.0}
    statuses = {"SLAVE_NOT_AVAILABLE": 1200}
    gaps = [
        {"case": "gap", "gap_mib": mib, "sent": 1200, "statuses": statuses, "latency_ms": latency} for mib in GAPS_MIB
    ]
    used = {"master": 10.0, "slave": 8.04}
    beats = [
        {"case": "heartbeat", "heartbeat_ms": ms, "counts_s": 0.96, "cpu_ms_a_second": used} for ms in HEARTBEATS_MS
    ]
    shown = list(tables([*copies, *gaps, *beats]))
    assert "haTransferBatchSize" in shown[0][0]
    transfer_rows, gap_rows, beat_rows = (rows for _, _, rows in shown)
    assert [row[0] for row in transfer_rows] == [f"{size:,}" for size in TRANSFERS]
    assert transfer_rows[0][1:] == ["120 (100-140)", "0.50 (0.50-0.50)", "1.25 (1.25-1.25)"]
    assert gap_rows[GAPS_MIB.index(16)] == ["16", "0", "1,200", "0", "1.2", "3,000.0", "3,001.0"]
    assert beat_rows[0] == ["250", "1,000", "10.0", "8.0", "1.0"]
    assert all(len(head) == len(rows[0]) for _, head, rows in shown)
    assert list(tables(beats)) == shown[2:]
    draw([*copies, *gaps, *beats], tmp_path / "tuning.png")
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")

"""Targets are compared with the best release of a peer at each point."""

from typing import Any

from bench.aims import markdown


def run(case: str, side: str, point: Any, **found: float) -> dict[str, Any]:
    return {"kind": "run", "round": 0, "case": case, "peer": side.split(":")[0], "side": side, "point": point, **found}


def test_best_release_counts() -> None:
    lines = [
        *(run("sends", "halog", 16, rate=rate, p99_ms=4.0) for rate in (9000.0, 13_000.0, 20_000.0)),
        run("sends", "rocketmq-4.9.7", 16, rate=8000.0, p99_ms=9.0),
        run("sends", "rocketmq-5.5.0", 16, rate=10_000.0, p99_ms=7.0),
        run("starting", "halog", "after kill -9", seconds=2.0),
        run("starting", "rocketmq-4.9.7", "after kill -9", seconds=10.0),
        run("consumption", "halog", "pull 1,024", rate=300_000.0),
        run("consumption", "halog, its SDK", "pull 1,024", rate=200_000.0),
        run("consumption", "rocketmq-4.9.7", "pull 1,024", rate=400_000.0),
    ]
    rows = markdown(lines).splitlines()[2:]
    assert rows == [
        "| sends/s, Java client | 16 | 13,000 | rocketmq-5.5.0 | 10,000 | **1.30** | ≥ 1.3 | yes |",
        "| their p99, ms | 16 | 4.00 | rocketmq-5.5.0 | 7.00 | **0.57** | ≤ 0.5 | no |",
        "| messages/s consumed, Java client | pull 1,024 | 300,000 | rocketmq-4.9.7 | 400,000 | **0.75** | ≥ 1 | no |",
        "| messages/s consumed, SDK | pull 1,024 | 200,000 | rocketmq-4.9.7 | 400,000 | **0.50** | ≥ 0.7 | no |",
        "| s to READY | after kill -9 | 2.00 | rocketmq-4.9.7 | 10.00 | **0.20** | ≤ 0.2 | yes |",
    ]

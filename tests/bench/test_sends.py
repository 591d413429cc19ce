"""What bench/run sends says of stretches in which the nodes were watched."""

from __future__ import annotations

from typing import Any

from bench.sends import comparison


def stretch(is_watched: bool, mb_per_s: float, in_flight: int = 64) -> dict[str, Any]:
    return {"in_flight": in_flight, "is_watched": is_watched, "mb_per_s": mb_per_s}


def test_what_watching_takes_is_said_pair_by_pair_and_of_all() -> None:
    alone, watched = (10.0, 20.0, 40.0), (9.0, 19.0, 42.0)  # 10 %, 5 % and -5 % less; 70 of 70
    stretches = [stretch(False, rate) for rate in alone] + [stretch(True, rate) for rate in watched]
    [row] = comparison([*stretches, stretch(False, 8.0, 16), stretch(True, 6.0, 16)], [64])
    assert row == ["64", "20.0 (10.0-40.0)", "19.0 (9.0-42.0)", "5.0 (-5.0 to 10.0)", "0.0"]


def test_one_pair_is_no_scatter() -> None:
    [row] = comparison([stretch(False, 8.0), stretch(True, 6.0)], [64])
    assert row[-2:] == ["25.0 (25.0 to 25.0)", "25.0"]

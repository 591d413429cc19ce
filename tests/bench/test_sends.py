"""bench/run sends reports the cost of watching the nodes."""

from typing import Any

from bench.sends import comparison


def stretch(is_watched: bool, mb_per_s: float, in_flight: int = 64) -> dict[str, Any]:
    return {"in_flight": in_flight, "is_watched": is_watched, "mb_per_s": mb_per_s}


def test_cost_of_watching_is_reported_by_pair_and_in_total() -> None:
    alone, watched = (10.0, 20.0, 40.0), (9.0, 19.0, 42.0)  # 10 %, 5 % and -5 % less; 70 of 70
    stretches = [stretch(False, rate) for rate in alone] + [stretch(True, rate) for rate in watched]
    rows = comparison([*stretches, stretch(False, 8.0, 16), stretch(True, 6.0, 16)], [64, 16])
    assert rows[0] == ["64", "20.0 (10.0-40.0)", "19.0 (9.0-42.0)", "5.0 (-5.0 to 10.0)", "0.0"]
    assert rows[1][-2:] == ["25.0 (25.0 to 25.0)", "25.0"]  # a single pair

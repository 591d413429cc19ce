"""Numbers and times as pages write them, and times as people do."""

import pytest

from ha.admin.dashboard.formats import duration, iso_ms, parse_time_ms, rate, size, time_ms


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (1000 << 20, "1.0 GiB"),
     (300 << 10, "300 KiB"), (1 << 60, "1024 PiB")],
)  # fmt: skip
def test_sizes(value: int | None, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (-1.0, "0.0 s"), (0.25, "0.2 s"), (10.0, "10 s"), (60.0, "1 min"), (75.4, "1 min 15 s"),
     (7260.0, "2 h 1 min"), (90_000.0, "1 d 1 h")],
)  # fmt: skip
def test_durations(value: float | None, text: str) -> None:
    assert duration(value) == text


def test_rates() -> None:
    assert [rate(value) for value in (None, 0.0, 12.345, 1234.5)] == ["–", "0", "12.3", "1,234"]


def test_times() -> None:
    assert time_ms(1_741_503_901_250) == "2025-03-09 07:05:01.250 UTC"
    assert iso_ms(1_741_503_901_250) == "2025-03-09T07:05:01.250+00:00"
    for nonsense in (-1, 0, 1 << 62):
        assert time_ms(nonsense) == f"{nonsense} ms"
        assert iso_ms(nonsense) == ""


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2025-03-09 07:05:01", 1_741_503_901_000),
        (" 2025-03-09T07:05:01.250 UTC", 1_741_503_901_250),
        ("2025-03-09T08:05:01+01:00", 1_741_503_901_000),
        ("2025-03-09", 1_741_478_400_000),
        ("1741503901250", 1_741_503_901_250),
        ("9" * 30, 253_402_300_799_999),
        ("yesterday", None),
        ("2025-13-09", None),
        ("12", None),
    ],
)
def test_times_that_people_write(text: str, ms: int | None) -> None:
    assert parse_time_ms(text) == ms

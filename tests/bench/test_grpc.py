"""What bench/grpc.py makes of the client's output."""

import pytest

from bench.clients import RunError
from bench.grpc import RECEIVE, parse, rows_of

OUTPUT = """\
send flight=64 9000/s p50 5.00 ms p99 20.00 ms failed 3
send flight=1 1200/s p50 0.80 ms p99 2.10 ms failed 0
send flight=16 4800/s p50 3.20 ms p99 7.00 ms failed 0
send flight=64 11000/s p50 5.50 ms p99 12.25 ms failed 0
receive+ack 10000/s (received 120000, acknowledged 120000, empty 2, failed 0)
"""


def test_the_first_sends_are_warm_up() -> None:
    runs = parse(OUTPUT)
    assert [(run["what"], run["rate"]) for run in runs] == [
        ("send, 1 in flight", 1200),
        ("send, 16 in flight", 4800),
        ("send, 64 in flight", 11000),
        (RECEIVE, 10000),
    ]
    assert (runs[2]["p50_ms"], runs[2]["p99_ms"]) == (5.5, 12.25)


@pytest.mark.parametrize(
    ("before", "after"),
    [("12.25 ms failed 0", "12.25 ms failed 1"), ("empty 2, failed 0", "empty 2, failed 1"), ("receive+ack", "crash")],
)
def test_a_run_with_a_failed_call_is_not_valid(before: str, after: str) -> None:
    with pytest.raises(RunError):
        parse(OUTPUT.replace(before, after))


def test_ratios_are_of_medians() -> None:
    runs = [
        {"what": RECEIVE, "side": side, "rate": rate, "foreign_cores": 0.1}
        for side, rate in (
            ("halog", 100.0),
            ("RocketMQ", 60.0),
            ("halog", 300.0),
            ("RocketMQ", 100.0),
            ("halog", 200.0),
        )
    ]
    assert list(rows_of(runs)) == [
        [RECEIVE, "halog", "200 (100-300)", "", "", "2.50", "0.10"],
        [RECEIVE, "RocketMQ", "80 (60-100)", "", "", "", "0.10"],
    ]

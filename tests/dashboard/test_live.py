"""One answer for all viewers, a history that is bounded, and nothing while nobody asks."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from ha.admin.dashboard.live import ANSWER_S, GAP_S, SAMPLE_COUNT_MAX, Flow, LiveView
from ha.admin.dashboard.source import Neighbour
from tests.dashboard.source import Source, neighbour, slave


class Rendered:
    """What the page was made of."""

    def __init__(self) -> None:
        self.flows: list[Flow] = []

    def __call__(self, status: Mapping[str, Any], flow: Flow, neighbours: Sequence[Neighbour]) -> str:
        self.flows.append(flow)
        return f"<p>{status['commitlog']['max_offset']}</p>"


def view() -> tuple[Source, Rendered, LiveView]:
    source, rendered = Source(), Rendered()
    return source, rendered, LiveView(source, rendered, wall_clock_ms=lambda: round(trio.current_time() * 1000))


async def test_ten_viewers_cost_what_one_does(autojump_clock: trio.testing.MockClock) -> None:
    source, rendered, live = view()
    answers = [live.answer() for _ in range(10)]
    assert source.status_count == len(rendered.flows) == 1
    assert all(answer is answers[0] for answer in answers)  # not even encoded again
    live.history()
    assert live.html() == "<p>0</p>"
    assert source.status_count == 1
    await trio.sleep(ANSWER_S)
    source.end = 7
    assert msgspec.json.decode(live.answer())["html"] == "<p>7</p>"
    assert source.status_count == 2


async def test_nobody_asks_nothing_is_sampled(autojump_clock: trio.testing.MockClock) -> None:
    source, _, live = view()
    live.answer()
    await trio.sleep(3600)
    assert source.status_count == 1
    history = msgspec.json.decode(live.history())
    assert [sample["at"] % 3_600_000 for sample in history] == [history[0]["at"] % 3_600_000] * 2


async def test_the_history_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    source, _, live = view()
    for number in range(SAMPLE_COUNT_MAX + 20):
        source.end = number
        live.answer()
        await trio.sleep(ANSWER_S)
    ends = [sample["log_end"] for sample in msgspec.json.decode(live.history())]
    assert ends == [*range(21, SAMPLE_COUNT_MAX + 20), source.end]  # the history itself took the last sample


async def test_rates_and_times_to_go(autojump_clock: trio.testing.MockClock) -> None:
    source, rendered, live = view()
    source.slaves = [slave("s", 0, 10_000), slave("behind", 0, 10_000), slave("whole", 10_000, 10_000)]
    source.end = 10_000
    live.answer()
    assert rendered.flows[-1].log_bytes_per_s is None  # one look makes no rate
    await trio.sleep(2)
    source.end, source.stored_count = 10_200, 20
    source.slaves = [slave("s", 1200, 10_200), slave("behind", 100, 10_200), slave("whole", 10_200, 10_200)]
    live.answer()
    flow = rendered.flows[-1]
    assert (flow.log_bytes_per_s, flow.stored_per_s, flow.read_per_s) == (100.0, 10.0, 0.0)
    assert flow.eta_s == {"s": pytest.approx(9000 / (600 - 100)), "behind": None, "whole": None}


async def test_after_a_pause_rates_begin_anew(autojump_clock: trio.testing.MockClock) -> None:
    source, rendered, live = view()
    live.answer()
    await trio.sleep(GAP_S + 1)
    source.end = 1 << 30
    live.answer()
    assert rendered.flows[-1].log_bytes_per_s is None
    await trio.sleep(2)
    live.answer()
    assert rendered.flows[-1].log_bytes_per_s == 0.0


async def test_a_log_that_was_cut_has_no_history(autojump_clock: trio.testing.MockClock) -> None:
    source, rendered, live = view()
    source.end = 100
    live.answer()
    await trio.sleep(2)
    source.end = 50
    live.answer()
    assert rendered.flows[-1].log_bytes_per_s is None
    assert [sample["log_end"] for sample in msgspec.json.decode(live.history())] == [50]


async def test_samples_call_slaves_as_their_connections_and_the_answer_names_them(
    autojump_clock: trio.testing.MockClock,
) -> None:
    source, _, live = view()
    source.slaves = [slave("127.0.0.1:5000", 1, 3)]
    source.other_brokers = [neighbour(2, ha_client_address="127.0.0.1:5000")]
    answer = msgspec.json.decode(live.answer())
    assert answer["sample"]["behind"] == {"127.0.0.1:5000": 2}
    assert answer["names"] == {"127.0.0.1:5000": "b:2"}

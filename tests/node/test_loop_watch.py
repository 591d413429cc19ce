"""What holds the event loop is seen and named, and only while somebody has asked."""

import gc
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from ha.admin import AdminKey, AdminView, open_admin
from ha.admin.loop_watch import HOLD_COUNT_MAX, LONG_S, LoopReport, LoopWatch
from ha.remoting import BoundPort
from tests.metrics import nodes as pages

TOKEN = "a token that is long enough"


@dataclass
class Clock:
    """Goes on when a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def watching(watch: LoopWatch, seconds: float = 60.0) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.serve)
        watch.begin(seconds)
        await begun(watch)
        await trio.lowlevel.checkpoint()  # the step in which the watch began does not count
        yield
        nursery.cancel_scope.cancel()


async def begun(watch: LoopWatch) -> None:
    while not watch.report().is_watching:
        await trio.lowlevel.checkpoint()


async def step(clock: Clock, seconds: float) -> None:
    """A step of a task of its own that takes so long."""

    async def hold_the_loop() -> None:
        await trio.lowlevel.checkpoint()
        clock.now += seconds
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold_the_loop)


async def test_a_long_step_is_kept_with_its_task() -> None:
    clock = Clock()
    watch = LoopWatch(clock=clock, wall_clock=lambda: 7.0)
    async with watching(watch):
        await step(clock, LONG_S - 0.001)
        assert (watch.report().holds, watch.report().long_hold_count) == ((), 0)
        await step(clock, 0.05)
        await step(clock, 0.5)
    report = watch.report()
    assert [round(hold.seconds, 3) for hold in report.holds] == [0.5, 0.05]
    assert report.hold_max_s == pytest.approx(0.5)
    assert report.long_hold_count == 2
    assert {hold.at_s for hold in report.holds} == {7.0}
    assert all(hold.task.endswith("hold_the_loop") for hold in report.holds)


async def test_only_the_longest_are_kept_and_all_are_counted() -> None:
    clock = Clock()
    watch = LoopWatch(clock=clock)
    async with watching(watch):
        for number in range(HOLD_COUNT_MAX + 5):
            await step(clock, 0.1 + number / 1000)
    report = watch.report()
    assert report.long_hold_count == HOLD_COUNT_MAX + 5
    assert len(report.holds) == HOLD_COUNT_MAX
    assert report.holds[-1].seconds == pytest.approx(0.105)


async def test_delays_are_those_of_a_task_that_wants_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beat is 30 ms late, but for one, which is 80 ms late."""
    clock, beats = Clock(), 0
    watch = LoopWatch(clock=clock)

    async def late(seconds: float) -> None:
        nonlocal beats
        beats += 1
        clock.now += seconds + (0.08 if beats == 50 else 0.03)
        if beats == 200:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()

    real_sleep = trio.sleep
    async with trio.open_nursery() as nursery:
        monkeypatch.setattr(trio, "sleep", late)
        nursery.start_soon(watch.serve)
        watch.begin(60)
        while beats < 200:
            await real_sleep(0)
        nursery.cancel_scope.cancel()
    report = watch.report()
    assert (report.beat_count, report.long_delay_count) == (199, 199)
    assert report.delay_p99_s == pytest.approx(0.03, abs=0.0002)
    assert report.delay_max_s == pytest.approx(0.08)
    assert [round(delay.seconds, 3) for delay in report.delays] == [0.08] + 198 * [0.03]
    assert all(delay.cpu_s <= delay.seconds for delay in report.delays)


async def test_what_a_delay_consists_of_is_told() -> None:
    watch = LoopWatch(wall_clock=lambda: 7.0)
    async with watching(watch):
        time.sleep(3 * LONG_S)  # noqa: ASYNC251 - what is to be told
        await trio.sleep(0.01)
        end = time.thread_time() + 5 * LONG_S
        while time.thread_time() < end:
            pass
        await trio.sleep(0.01)
    worked, slept = sorted(watch.report().delays, key=lambda delay: -delay.cpu_s)[:2]
    assert worked.cpu_s >= 4 * LONG_S
    assert slept.cpu_s < LONG_S < slept.seconds - (slept.queued_s or 0.0)
    assert {worked.at_s, slept.at_s} == {7.0}


async def test_where_the_task_waited_after_a_long_step_is_told() -> None:
    watch = LoopWatch()

    async def hold_the_loop() -> None:
        await deep_down()

    async def deep_down() -> None:
        time.sleep(2 * LONG_S)  # noqa: ASYNC251 - what is to be told
        await trio.sleep(0.001)

    async with watching(watch), trio.open_nursery() as nursery:
        nursery.start_soon(hold_the_loop)
    [hold, *_] = watch.report().holds
    assert [place.split()[1] for place in hold.stack] == ["hold_the_loop", "deep_down"]
    assert all(place.startswith("test_loop_watch.py:") for place in hold.stack)
    # It slept: neither worked nor stood in the queue, but for moments.
    assert hold.cpu_s < hold.seconds
    assert hold.queued_s is None or hold.queued_s <= hold.seconds - hold.cpu_s


async def test_a_task_that_ended_waits_nowhere() -> None:
    clock = Clock()
    watch = LoopWatch(clock=clock)

    async def last_step() -> None:
        clock.now += 0.05

    async with watching(watch), trio.open_nursery() as nursery:
        nursery.start_soon(last_step)
    [hold] = watch.report().holds
    assert (hold.task.rpartition(".")[2], hold.stack) == ("last_step", ())


async def test_collections_are_told_apart() -> None:
    clock = Clock()
    watch = LoopWatch(clock=clock)

    def take_long(phase: str, info: dict[str, int]) -> None:
        clock.now += 0.03 if phase == "stop" else 0.0

    async def collect() -> None:
        gc.collect()
        clock.now += 0.02

    gc.disable()  # none but the one that is asked for
    try:
        async with watching(watch), trio.open_nursery() as nursery:
            gc.callbacks.insert(0, take_long)  # before the watch's own
            nursery.start_soon(collect)
    finally:
        gc.enable()
        gc.callbacks.remove(take_long)
    [hold] = [hold for hold in watch.report().holds if hold.task.endswith("collect")]
    assert hold.seconds == pytest.approx(0.05)
    assert hold.collection_s == pytest.approx(0.03)
    assert watch._collected not in gc.callbacks


async def test_a_watch_ends_by_itself_and_can_begin_anew(autojump_clock: trio.testing.MockClock) -> None:
    clock = Clock()
    watch = LoopWatch(clock=clock)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.serve)
        for _ in range(2):
            watch.begin(0.5)
            await begun(watch)
            await step(clock, 0.1)
            await trio.sleep(1)
            assert not watch.report().is_watching
            await step(clock, 0.9)  # nobody looks
            assert watch.report().hold_max_s == pytest.approx(0.1)
        nursery.cancel_scope.cancel()


async def test_without_being_asked_nothing_is_watched() -> None:
    watch = LoopWatch(clock=Clock())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.serve)
        await trio.testing.wait_all_tasks_blocked()
        assert watch.report() == LoopReport(is_watching=False)
        nursery.cancel_scope.cancel()


async def ask(port: BoundPort, path: str, token: str = TOKEN, *, method: str = "GET") -> tuple[int, str]:
    status, _, body = await pages.ask(f"127.0.0.1:{port.port}", path, f"Authorization: Bearer {token}", method=method)
    return status, body


async def test_the_page() -> None:
    view = AdminView(status=dict, not_ready=lambda: "")
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen(), key=AdminKey(TOKEN)):
            assert json.loads((await ask(port, "/loop"))[1])["is_watching"] is False
            for wrong in ("", "?seconds=0", "?seconds=nan", "?seconds=3601", "?seconds=long"):
                assert (await ask(port, f"/loop{wrong}", method="POST"))[0] == 400
            assert (await ask(port, "/loop?seconds=60", "another", method="POST"))[0] == 401
            assert (await ask(port, "/loop?seconds=60", method="POST"))[0] == 200
            report = json.loads((await ask(port, "/loop"))[1])
            assert report["is_watching"] is True


async def test_who_has_no_token_starts_no_watch() -> None:
    view = AdminView(status=dict, not_ready=lambda: "")
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen()):
            assert (await ask(port, "/loop?seconds=60", method="POST"))[0] == 403
            assert (await ask(port, "/loop"))[0] == 200

"""Takes screenshots of all pages of the dashboard for docs/: 1400 and 390 pixels wide, light and dark.

A real browser shows a cluster under load. The overview is open while flights are sent at a varying rate, two groups
consume them, and one slave is paused with SIGSTOP for some time, so that charts and tables show typical data.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from ha.client import Message, Producer, PushConsumer, ReceivedMessage, StartFrom
from scripts.demo import flights
from scripts.nodes import Cluster, cluster, wait_until_attached

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PROGRAM = "chromium"
TOKEN = "the-token-of-this-demonstration"
FLIGHT_COUNT = 60_000
BATCH = 20
"""Flights per batch"""
PERIOD_S = 60.0
RATE_PER_S = (80.0, 400.0)
PAUSE_S = 12.0
SETTLE_MS = 3000
"""Longer than the overview's update interval"""
COLOUR_COUNT = 32
DESK = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}
OTHER_TOPICS = (
    *("airlines", "airports", "baggage-events", "boarding", "check-in", "crew-rosters", "delays", "fuel-orders"),
    *("gate-changes", "maintenance", "payments", "planes", "tickets", "weather-jfk", "weather-lga"),
)


def main() -> int:
    """Takes all screenshots."""
    parser = argparse.ArgumentParser(prog="scripts/screenshots", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="duration of the load in seconds (default: 150)")
    parser.add_argument(
        "--directory", type=Path, default=IMAGES, help="directory for the images (default: docs/images)"
    )
    arguments = parser.parse_args()
    program = shutil.which(PROGRAM)
    if program is None:
        print("scripts/screenshots: chromium is not on the PATH (Debian: apt-get install chromium)", file=sys.stderr)
        return 69
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), adminToken=TOKEN) as nodes:
        for node in nodes.all:
            node.start()
        second = nodes.add_slave()
        second.start()
        wait_until_attached(nodes, slave_count=2)
        with traffic(nodes.name_server_address), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": DESK["width"], "height": DESK["height"]})
            page.goto(f"http://{nodes.master.ready['admin']}/dashboard")
            log_in(page)
            watch(page, second.pid, arguments.seconds)
            take_all(browser, nodes, arguments.directory)
            browser.close()
    return 0


@contextmanager
def traffic(name_server: str) -> Iterator[None]:
    """Runs producers and consumers in a thread during the block."""
    is_over = threading.Event()
    thread = threading.Thread(target=trio.run, args=(_work, name_server, is_over))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


async def _work(name_server: str, is_over: threading.Event) -> None:
    chance = random.Random(7)
    least, most = RATE_PER_S

    async def slowly(message: ReceivedMessage) -> None:
        await trio.sleep(chance.expovariate(1 / 0.05))

    async def at_once(message: ReceivedMessage) -> None:
        pass

    async with Producer(name_server) as producer:
        for topic in OTHER_TOPICS:
            for number in range(chance.randrange(1, 60)):
                await producer.send(Message(topic, f"{topic} {number}".encode(), keys=f"{topic}-{number}"))
        messages = iter(flights(FLIGHT_COUNT))
        await producer.send(next(messages))
        async with (
            PushConsumer(name_server, slowly, group="delay-board", subscriptions={"flights": "UA||B6||DL"},
                         start_from=StartFrom.FIRST),
            PushConsumer(name_server, at_once, group="archive", subscriptions={"flights": "*", "tickets": "*"},
                         start_from=StartFrom.FIRST),
        ):  # fmt: skip
            while not is_over.is_set():
                rate = least + (most - least) * (1 + math.sin(trio.current_time() / PERIOD_S * math.tau)) / 2
                async with trio.open_nursery() as nursery:
                    for _, message in zip(range(BATCH), messages, strict=False):
                        nursery.start_soon(producer.send, message)
                await trio.sleep(chance.expovariate(rate / BATCH))


def watch(page: Page, slave_pid: int, seconds: float) -> None:
    """Waits while the overview collects its charts, and pauses a slave in between."""
    began = time.monotonic()
    page.wait_for_timeout(seconds * 700)
    os.kill(slave_pid, signal.SIGSTOP)
    page.wait_for_timeout(PAUSE_S * 1000)
    os.kill(slave_pid, signal.SIGCONT)
    page.wait_for_timeout(max(SETTLE_MS, (seconds - (time.monotonic() - began)) * 1000))


def take_all(browser: Browser, nodes: Cluster, directory: Path) -> None:
    """Takes every page as NAME.png, NAME-dark.png, NAME-phone.png and NAME-phone-dark.png."""
    master, slave = (f"http://{node.ready['admin']}/dashboard" for node in (nodes.master, nodes.slave))
    for viewport, of_device in ((DESK, ""), (PHONE, "-phone")):
        for of_scheme in ("", "-dark"):
            suffix = f"{of_device}{of_scheme}.png"
            context = browser.new_context(
                viewport={"width": viewport["width"], "height": viewport["height"]},
                color_scheme="dark" if of_scheme else "light",
                reduced_motion="reduce",
            )
            page = context.new_page()
            page.goto(master)
            take(page, directory / f"login{suffix}")
            log_in(page)
            for name, show in pages(page, master, slave).items():
                show()
                take(page, directory / f"{name}{suffix}")
            context.close()


def pages(page: Page, master: str, slave: str) -> dict[str, Callable[[], object]]:
    """Returns by name how to open each page."""

    def overview(address: str) -> None:
        page.goto(address)
        page.wait_for_timeout(SETTLE_MS)

    def message() -> None:
        page.goto(f"{master}/queue?topic=flights&queue=1&offset=40")
        page.locator("tbody a").first.click()
        page.wait_for_load_state()

    def confirmation() -> None:
        page.goto(f"{master}/act/reset?group=delay-board&topic=flights&to=first")
        page.get_by_role("button", name="Continue").click()
        page.wait_for_load_state()

    return {
        "overview": lambda: overview(master),
        "slave": lambda: overview(slave),
        "topics": lambda: page.goto(f"{master}/topics"),
        "topic": lambda: page.goto(f"{master}/topic?name=flights"),
        "queue": lambda: page.goto(f"{master}/queue?topic=flights&queue=1&offset=40"),
        "messages": lambda: page.goto(f"{master}/messages?q=tickets-1"),
        "message": message,
        "groups": lambda: page.goto(f"{master}/groups"),
        "group": lambda: page.goto(f"{master}/group?name=delay-board"),
        "send": lambda: page.goto(f"{master}/act/send?topic=flights"),
        "confirmation": confirmation,
        "missing": lambda: page.goto(f"{master}/nope"),
    }


def log_in(page: Page) -> None:
    """Fills in the login form."""
    page.get_by_label("This node's adminToken").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/dashboard")


def take(page: Page, path: Path) -> None:
    """Saves the visible part of a page, in COLOUR_COUNT colours to keep the file small."""
    page.screenshot(path=path)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOUR_COUNT, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())

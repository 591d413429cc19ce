"""Takes screenshots of the dashboard for docs/ with a real browser and a cluster under load.

The overview is open while flights are sent at a varying rate, two groups consume them, and one slave is paused with
SIGSTOP for some time, so that charts and tables show typical data.
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
from collections.abc import Iterator
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
FLIGHT_COUNT = 60_000
BATCH = 20
"""Flights per batch"""
PERIOD_S = 60.0
RATE_PER_S = (80.0, 400.0)
PAUSE_S = 12.0
SETTLE_MS = 3000
"""Longer than the overview's update interval"""
DESK = {"width": 1280, "height": 860}
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
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as nodes:
        for node in nodes.all:
            node.start()
        second = nodes.add_slave()
        second.start()
        wait_until_attached(nodes, slave_count=2)
        with traffic(nodes.name_server_address), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": DESK["width"], "height": DESK["height"]})
            page.goto(f"http://{nodes.master.ready['admin']}/dashboard")
            watch(page, second.pid, arguments.seconds)
            take_all(browser, page, nodes, arguments.directory)
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


def take_all(browser: Browser, page: Page, nodes: Cluster, directory: Path) -> None:
    """Takes every screenshot."""
    master, slave = (f"http://{node.ready['admin']}/dashboard" for node in (nodes.master, nodes.slave))
    take(page, directory / "overview.png", full=True)
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(SETTLE_MS)  # wait for the colour transition
    take(page, directory / "overview-dark.png")
    page.emulate_media(color_scheme="light")
    page.goto(f"{slave}")
    page.wait_for_timeout(SETTLE_MS * 3)
    take(page, directory / "slave.png")
    for name, address in (
        ("topics", "/topics"),
        ("queue", "/queue?topic=flights&queue=1&offset=40"),
        ("group", "/group?name=delay-board"),
    ):
        page.goto(master + address)
        take(page, directory / f"{name}.png")
    page.goto(f"{master}/queue?topic=flights&queue=1&offset=40")
    page.locator("tbody a").first.click()
    page.wait_for_load_state()
    take(page, directory / "message.png")
    phone = browser.new_page(viewport={"width": PHONE["width"], "height": PHONE["height"]}, device_scale_factor=2)
    phone.goto(master)
    phone.wait_for_timeout(SETTLE_MS)
    take(phone, directory / "phone.png")
    phone.emulate_media(color_scheme="dark")
    phone.goto(page.url)
    take(phone, directory / "phone-dark.png")


def take(page: Page, path: Path, *, full: bool = False) -> None:
    """Saves one screenshot in 256 colours, which is a third of the size and looks the same."""
    page.screenshot(path=path, full_page=full)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())

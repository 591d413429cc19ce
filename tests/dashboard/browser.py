"""Debian's Chromium, driven by Playwright, and somebody who looks at pages in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

PROGRAM = "chromium"
WAIT_MS = 30_000
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1400, "height": 900}


def require_browser() -> str:
    """Where the program is. Without it: a failure where CI=true, a skip elsewhere."""
    program = shutil.which(PROGRAM)
    if program is None:
        reason = "the dashboard's tests need chromium on the PATH (Debian: chromium)"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return program


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser of the thread that calls this."""
    program = require_browser()
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        # As root, Chromium runs only without its sandbox; the pages are those of the tests.
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


class Viewer:
    """Somebody at a browser of his own. `troubles`: what pages complained of; a test ends with none."""

    def __init__(self, browser: Browser, stack: ExitStack) -> None:
        self._browser = browser
        self._stack = stack
        self.troubles: list[str] = []

    def context(
        self, viewport: dict[str, int] = DESK, scheme: Literal["light", "dark"] = "light", scripts: bool = True
    ) -> BrowserContext:
        made = self._browser.new_context(
            viewport={"width": viewport["width"], "height": viewport["height"]},
            color_scheme=scheme,
            java_script_enabled=scripts,
            reduced_motion="reduce",
        )
        made.set_default_timeout(WAIT_MS)
        # Pages wait for an answer as long as it takes: on a busy machine, a slow node is none that does not respond.
        made.add_init_script("AbortSignal.timeout = () => new AbortController().signal;")
        self._stack.callback(made.close)
        return made

    def page(
        self, viewport: dict[str, int] = DESK, scheme: Literal["light", "dark"] = "light", scripts: bool = True
    ) -> Page:
        page = self.context(viewport, scheme, scripts).new_page()
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("console", lambda line: self.troubles.append(line.text) if line.type in ("error", "warning") else None)
        return page


def barriers(page: Page, only: str = "") -> str:
    """What axe-core finds against WCAG A and AA and its own best practices, or one rule alone; "" if nothing."""
    options: dict[str, object] = {"resultTypes": ["violations"]}
    found = Axe().run(page, options={**options, "runOnly": [only]} if only else options)
    return str(found.generate_report()) if found.violations_count else ""


def cuts(page: Page) -> list[str]:
    """Returns the elements whose content is wider than they are. A hex dump may scroll."""
    found: list[str] = page.evaluate(
        """() => [document.documentElement, ...document.querySelectorAll(".scroll, pre:not(.hex), td, th, dd, p, li")]
            .filter((each) => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline"
                && !each.closest(".unseen, .states, .skip, [hidden]") && each.getClientRects().length > 0
                && !each.closest("thead"))
            .map((each) => `${each.tagName} ${each.className} ${each.textContent.trim().slice(0, 80)}`)"""
    )
    return found


def log_in(page: Page, address: str, path: str, token: str) -> None:
    """Through the form that asks for a node's token, to a page of its dashboard."""
    page.goto(f"{address}/dashboard{path}")
    page.get_by_label("This node's adminToken").fill(token)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{address}/dashboard{path}")

"""The overview of a real member of a real failover group, in a browser: what it says is what etcd holds."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
from playwright.sync_api import Locator, Page, expect

from tests.dashboard.browser import PHONE, Viewer, barriers, log_in, open_browser, require_browser
from tests.failover.etcd_servers import require_etcd
from tests.failover.members import ADMIN_TOKEN, Members, open_group

pytestmark = pytest.mark.processes

NO_CHANCE = {"leaseTtl": 30_000}
"""Nobody loses his lease because the machine is busy: what happens is what is asked for."""


async def test_the_members_page_goes_with_its_group(tmp_path: Path) -> None:
    require_etcd()
    require_browser()
    async with open_group(tmp_path, 1, 2, 3, keys=NO_CHANCE) as members:
        await members.wait_set(1, 2, 3)
        await trio.to_thread.run_sync(watch, members)  # Playwright's calls block, and are one thread's


def watch(members: Members) -> None:
    """Look at two of three members while the master hands over to one of them, and that one is stopped."""
    first = members.master_id
    assert first is not None
    next_, other = (id_ for id_ in (1, 2, 3) if id_ != first)
    with open_browser() as browser, ExitStack() as stack:
        viewer = Viewer(browser, stack)
        pages = {next_: viewer.page(), other: viewer.page(PHONE)}
        for id_, page in pages.items():
            log_in(page, f"http://{members.admin(id_)}", "", ADMIN_TOKEN)
            shows(page, id_, members, "following")
        assert barriers(pages[other]) == ""
        assert pages[other].evaluate("document.documentElement.scrollWidth") <= PHONE["width"]

        switch_from(pages[other], next_)
        assert trio.from_thread.run(members.wait_another, first) == next_
        trio.from_thread.run(members.wait_set, 1, 2, 3)
        shows(pages[next_], next_, members, "master")
        expect(fact(pages[next_], "Lease")).to_contain_text("left")
        expect(pages[next_].locator("#slaves h3")).to_have_text(sorted(f"broker-a:{id_}" for id_ in (first, other)))
        shows(pages[other], other, members, "following")

        trio.from_thread.run(members.master.stop)
        heir = trio.from_thread.run(members.wait_another, next_)
        trio.from_thread.run(members.wait_set, first, other)
        shows(pages[other], other, members, "master" if heir == other else "following")
        expect(pages[next_].get_by_role("alert")).to_contain_text("This node has not responded since")
        viewer.troubles[:] = [each for each in viewer.troubles if "ERR_CONNECTION" not in each and "fetch" not in each]
    assert viewer.troubles == []


def switch_from(page: Page, to: int) -> None:
    """Switch the master with the form of a member's overview, and come back to it."""
    page.get_by_role("link", name="Switch the group's master").click()
    page.get_by_label("To the member").fill(f"{to}")
    page.get_by_label("Reason").fill("a test")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text(f"Make member {to} the master of this node's group.")).to_be_visible()
    page.get_by_role("button", name="Switch", exact=True).click()
    expect(page.get_by_text(f"Member {to} is the master now")).to_be_visible()
    page.get_by_role("link", name="Overview").last.click()


def shows(page: Page, id_: int, members: Members, state: str) -> None:
    """Wait until the page shows the state of its member and of the group."""
    group = members.view.group
    assert group is not None
    section = page.get_by_role("region", name="Failover group")
    expect(section.get_by_role("heading", level=3)).to_have_text(f"Member {id_}")
    expect(section.get_by_role("list", name="States of a member").locator("[aria-current=step]")).to_have_text(
        f"{state} (now)"
    )
    expect(fact(page, "Master")).to_have_text(f"member {members.master_id}")
    expect(fact(page, "Term")).to_have_text(f"{group.epoch}")
    expect(fact(page, "Sync-state set")).to_have_text(", ".join(map(str, sorted(group.sync_state_set))))


def fact(page: Page, name: str) -> Locator:
    return page.locator("#member dl div").filter(has=page.get_by_text(name, exact=True)).locator("dd")

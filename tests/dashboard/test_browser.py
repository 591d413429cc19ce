"""The dashboard in a real browser: Debian's Chromium, driven by Playwright, over real nodes.

One browser and four processes for all tests of this file. A page that logs an error, breaks its own
Content-Security-Policy or runs what a stranger wrote fails the test that was looking at it.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.dashboard.browser import DESK, PHONE, Viewer, barriers, cuts, log_in, open_browser
from tests.dashboard.nodes import (
    BINARY,
    HARM,
    HOSTILE,
    HOSTILE_GROUP,
    HOSTILE_TOPIC,
    ORDER_COUNT,
    QUEUE_COUNT,
    TOKEN,
    TOPIC_COUNT,
    Cluster,
    cluster,
    guarded,
)

pytestmark = pytest.mark.processes

PAGES = (
    "",
    "/topics?q=099",
    "/topic?name=orders",
    "/topic?name=orders&at=2025-03-09",
    "/queue?topic=orders&queue=1",
    "/queue?topic=special&queue=0",
    "/messages",
    "/messages?q=all",
    "/messages?topic=orders&q=all",
    "/groups",
    "/group?name=billing",
    "/group?name=nobody",
    "/nobody",
    "/topics?page=x",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def nodes(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def empty(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with guarded(tmp_path_factory.mktemp("guarded")) as address:
        yield address


@pytest.fixture
def viewer(browser: Browser) -> Iterator[Viewer]:
    with ExitStack() as stack:
        made = Viewer(browser, stack)
        yield made
    assert made.troubles == []


def go(page: Page, address: str, code: int = 200) -> None:
    answer = page.goto(address)
    assert answer is not None
    assert answer.status == code, address


def expected_code(path: str) -> int:
    return 404 if "nobody" in path else 400 if "page=x" in path else 200


def ground(page: Page) -> int:
    """How light the page is, from 0 to 3 * 255."""
    return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))))


def forgive_missing(viewer: Viewer) -> None:
    """Chromium logs every answer that is an error."""
    viewer.troubles[:] = [each for each in viewer.troubles if "status of 40" not in each]


# ---- every page


def test_no_page_has_barriers(viewer: Viewer, nodes: Cluster) -> None:
    light, dark = viewer.page(), viewer.page(scheme="dark")
    message = f"/message?offset={offset_of(nodes, 'json')}"
    for path in (*PAGES, message):
        go(light, f"{nodes.master}/dashboard{path}", expected_code(path))
        assert barriers(light) == "", path
        assert light.locator("h1").count() == 1
        assert light.locator("main").count() == 1
    for path in (*PAGES, message):
        go(dark, f"{nodes.master}/dashboard{path}", expected_code(path))
        assert barriers(dark, "color-contrast") == "", path
    assert [ground(page) > 3 * 128 for page in (light, dark)] == [True, False]
    forgive_missing(viewer)


@pytest.mark.parametrize("viewport", [DESK, PHONE])
def test_no_page_is_cut(viewer: Viewer, nodes: Cluster, viewport: dict[str, int]) -> None:
    page = viewer.page(viewport)
    for path in (*PAGES, *(f"/message?offset={offset_of(nodes, kind)}" for kind in nodes.ids)):
        go(page, f"{nodes.master}/dashboard{path}", expected_code(path))
        assert cuts(page) == [], path
    forgive_missing(viewer)


def test_a_phone_shows_every_column(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page(PHONE)
    go(page, f"{nodes.master}/dashboard/queue?topic=orders&queue=1")
    row = page.locator("tbody tr").first
    for cell in row.locator("td").all():
        expect(cell).to_be_in_viewport()
    assert barriers(page) == ""
    go(page, f"{nodes.master}/dashboard")
    expect(page.locator("svg.cluster.narrow")).to_be_visible()
    expect(page.locator("svg.cluster.wide")).to_be_hidden()
    assert barriers(page) == ""


def test_the_switch_for_dark_mode_is_remembered(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    go(page, f"{nodes.master}/dashboard/topics")
    switch = page.get_by_role("button", name="Dark")
    expect(switch).to_have_attribute("aria-pressed", "false")
    switch.click()
    expect(switch).to_have_attribute("aria-pressed", "true")
    go(page, f"{nodes.master}/dashboard/groups")
    expect(switch).to_have_attribute("aria-pressed", "true")
    assert ground(page) < 3 * 128
    assert barriers(page) == ""
    page.emulate_media(color_scheme="dark")
    switch.click()
    page.reload()
    assert ground(page) > 3 * 128  # light, although the system is dark


def test_every_page_refreshes_in_place(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    page.clock.install()
    go(page, f"{nodes.master}/dashboard/topics?q=orders")
    page.get_by_label("Name contains").fill("half a wo")
    page.evaluate("document.querySelector('tbody td').textContent = 'old'; window.isSamePage = true")
    page.get_by_role("link", name="Refresh").click()
    expect(page.locator("tbody td").first).to_have_text(f"{ORDER_COUNT}")
    expect(page.get_by_label("Name contains")).to_have_value("half a wo")
    with page.expect_response("**/topics?q=orders"):
        page.get_by_role("button", name="Every 5 s").click()
    page.evaluate("document.querySelector('tbody td').textContent = 'old'")
    with page.expect_response("**/topics?q=orders"):
        page.clock.run_for(6000)
    expect(page.locator("tbody td").first).to_have_text(f"{ORDER_COUNT}")
    assert page.evaluate("window.isSamePage")


def test_every_page_of_an_empty_node(viewer: Viewer, empty: str) -> None:
    page = viewer.page()
    log_in(page, empty, "", TOKEN)
    expect(page.get_by_text("No slave is connected.")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("not registered")).first).to_be_visible()
    go(page, f"{empty}/dashboard/topics")
    expect(page.get_by_text("There is no topic yet.")).to_be_visible()
    go(page, f"{empty}/dashboard/groups")
    expect(page.get_by_text("No consumer groups yet.")).to_be_visible()
    for path, said in (
        ("/topic?name=x", "Topic x does not exist on this node."),
        ("/group?name=x", "Consumer group x does not exist on this node."),
        ("/queue?topic=x&queue=0", "Queue 0 of x has no messages on this node."),
        ("/message?offset=0", "The log has no message at offset 0"),
    ):
        go(page, f"{empty}/dashboard{path}", 404)
        expect(page.get_by_text(said)).to_be_visible()
        assert barriers(page) == ""
    forgive_missing(viewer)


def test_pages_work_without_scripts(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page(scripts=False)
    go(page, f"{nodes.master}/dashboard")
    expect(page.get_by_text("Ready: this node serves as ASYNC_MASTER.")).to_be_visible()
    page.get_by_role("link", name="Messages").click()
    page.get_by_label("Key, unique id").fill("order-7")
    page.get_by_label("Topic (empty: all)").fill("orders")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("link", name="1", exact=True).click()
    expect(page.locator("pre")).to_contain_text('"order": 7')


# ---- the overview


def test_the_overview_shows_the_cluster_and_goes_on_by_itself(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    go(page, f"{nodes.master}/dashboard")
    slaves = page.locator("#slaves")
    expect(slaves.get_by_text("counts", exact=True)).to_be_visible()
    expect(slaves.locator("[aria-current=step]")).to_have_text("transfer (now)")
    expect(slaves.get_by_text("1 of 1 in sync")).to_be_visible()
    drawing = page.locator("svg.cluster.wide")
    expect(drawing.locator(".here .name")).to_have_text("broker-a:0")
    expect(drawing.locator(".box")).to_have_count(3)  # name server, this node, its slave
    figure = page.locator("[data-chart=messages]")
    expect(figure.locator("div.plot path.s1")).to_have_attribute("d", re.compile("L"))  # two looks made a line
    expect(figure.locator(".said")).to_contain_text("stored: now")
    figure.get_by_text("As a table").click()
    expect(figure.locator("tbody tr, table tr").nth(2)).to_be_visible()
    summary = figure.locator("summary")
    summary.focus()
    up = page.locator("#figures dd").last
    before = up.inner_text()
    expect(up).not_to_have_text(before)
    expect(summary).to_be_focused()  # what changes leaves the focus where it was
    assert barriers(page) == ""


def test_the_charts_go_on_after_the_clock_of_the_node_was_set_back(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()

    def set_back(route: Route) -> None:
        answer = route.fetch().json()
        answer["sample"]["at"] = 1000
        route.fulfill(json=answer)

    page.route("**/live.json", set_back)  # and not the history, which is from before
    go(page, f"{nodes.master}/dashboard")
    figure = page.locator("[data-chart=messages]")
    figure.get_by_text("As a table").click()
    for row in (1, 2):
        expect(figure.locator("tr").nth(row).locator("th")).to_have_text("00:00:01")
    expect(figure.locator("div.plot path.s1")).to_have_attribute("d", re.compile("L"))
    page.unroute_all(behavior="wait")


def test_nobody_asks_while_the_page_is_hidden(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "live.json" in request.url else None)
    page.clock.install()
    with page.expect_response("**/live.json"):
        page.goto(f"{nodes.master}/dashboard")
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    turn = hide + " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(turn, True)
    expect(page.locator("[data-chart=messages] .said")).not_to_be_empty()
    asked.clear()
    page.clock.run_for(600_000)
    assert asked == []
    # Hidden again while an answer is on its way, which is shown and is the last one.
    held: list[Route] = []
    page.route("**/live.json", lambda route: held.append(route))
    with page.expect_request("**/live.json"):
        page.evaluate(turn, False)
    page.evaluate(turn, True)
    answer = held[0].fetch().json()
    held.pop().fulfill(json={**answer, "html": answer["html"].replace("Ready:", "Last heard:")})
    expect(page.get_by_role("status")).to_contain_text("Last heard:")
    asked.clear()
    page.clock.run_for(600_000)
    assert asked == []


@pytest.mark.parametrize(("now_s", "rest_ms"), [(0, 2500), (1.125, 1375), (1.25, 3750)])
def test_all_overviews_ask_at_the_same_moments(viewer: Viewer, nodes: Cluster, now_s: float, rest_ms: int) -> None:
    page = viewer.page()
    page.clock.set_fixed_time(1_700_000_000 + now_s)  # `now_s` after a moment at which all ask
    page.add_init_script(
        "{ const set = window.setTimeout; window.rests = [];"
        " window.setTimeout = (act, ms) => { window.rests.push(ms); return set(act, ms); }; }"
    )
    with page.expect_request("**/live.json"):
        go(page, f"{nodes.master}/dashboard")
    page.wait_for_event("request", lambda request: "live.json" in request.url)
    assert set(page.evaluate("window.rests")) == {rest_ms}


def test_a_killed_master_is_missed(viewer: Viewer, nodes: Cluster) -> None:
    on_slave, on_master = viewer.page(), viewer.page()
    go(on_slave, f"{nodes.slave}/dashboard")
    go(on_master, f"{nodes.master}/dashboard")
    expect(on_master.locator("#slaves dd").first).to_have_text("none")  # it is behind
    link = on_slave.locator("#master")
    expect(link.locator("[aria-current=step]")).to_have_text("transfer (now)")
    expect(on_slave.get_by_role("status")).to_have_text("Ready: this node serves as SLAVE.")
    nodes.kill_master()
    try:
        expect(on_slave.get_by_role("status")).to_contain_text("Not ready: not connected to its master")
        expect(link.locator("[aria-current=step]")).to_have_text("ready (now)")
        drawn = on_slave.get_by_role("img", name=re.compile("master, (connect failed|connection lost)"))
        expect(drawn.first).to_be_visible()
        assert barriers(on_slave) == ""
        expect(on_master.get_by_role("alert")).to_contain_text("This node has not responded since")
        # What it has is there all the same.
        go(on_slave, f"{nodes.slave}/dashboard/queue?topic=orders&queue=1")
        expect(on_slave.locator("tbody tr")).to_have_count(ORDER_COUNT // QUEUE_COUNT)
    finally:
        nodes.start_master()
    expect(on_master.get_by_role("alert")).to_be_hidden()
    go(on_slave, f"{nodes.slave}/dashboard")
    expect(on_slave.get_by_role("status")).to_have_text("Ready: this node serves as SLAVE.")
    # A kill refuses connections, ends them, or cuts the answer that was under way.
    killed = ("ERR_CONNECTION", "ERR_CONTENT_LENGTH_MISMATCH", "fetch")
    viewer.troubles[:] = [each for each in viewer.troubles if not any(word in each for word in killed)]


def test_a_node_that_does_not_answer_in_time_is_missed(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    page.add_init_script(
        "window.limits = []; AbortSignal.timeout = (ms) => { window.limits.push(ms); return AbortSignal.abort(); };"
    )
    go(page, f"{nodes.master}/dashboard")
    expect(page.get_by_role("alert")).to_contain_text("This node has not responded since")
    assert set(page.evaluate("window.limits")) == {10_000}
    go(page, f"{nodes.master}/dashboard/topics")
    page.get_by_role("link", name="Refresh").click()
    expect(page.get_by_role("alert")).to_have_text("This node does not respond. The page is from before.")
    assert page.evaluate("window.limits") == [10_000]
    viewer.troubles[:] = [each for each in viewer.troubles if "AbortError" not in each]


# ---- topics, messages, groups


def test_a_thousand_topics(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    go(page, f"{nodes.master}/dashboard/topics")
    others = 4  # hostile, orders, special, retries of billing
    expect(page.get_by_text(f"1–50 of {TOPIC_COUNT + others:,} topics").first).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(50)
    page.get_by_role("link", name="More →").first.click()
    expect(page.get_by_text("51–100 of").first).to_be_visible()
    page.get_by_label("Name contains").fill("PLAIN-099")
    page.keyboard.press("Enter")
    expect(page.locator("tbody th")).to_have_text([f"plain-099{digit}" for digit in range(10)])
    page.get_by_label("Name contains").fill("orders")
    page.keyboard.press("Enter")
    expect(page.locator("tbody td").first).to_have_text(f"{ORDER_COUNT}")
    page.get_by_role("link", name="orders").click()
    rows = page.get_by_role("table", name="Queues of orders").locator("tbody tr")
    expect(rows).to_have_count(QUEUE_COUNT)
    held = f"{ORDER_COUNT // QUEUE_COUNT}"
    expect(rows.first.locator("td")).to_have_text(["0", held, held, "oldest · newest"])
    page.get_by_label("Stored at").fill("2001-01-01 00:00")
    page.get_by_role("button", name="Show where").click()
    expect(rows.first.locator("td").nth(3)).to_have_text("0")  # all are younger
    page.get_by_label("Stored at").fill("2999-01-01")
    page.get_by_role("button", name="Show where").click()
    expect(rows.first.locator("td").nth(3)).to_have_text(held)  # all are older
    expect(page.locator("dl time")).to_contain_text(re.compile(r"^20\d\d-.* UTC$"))  # of the last message


def test_messages_are_found_by_offset_key_id_and_time(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    go(page, f"{nodes.master}/dashboard/queue?topic=orders&queue=2&offset=3")
    expect(page.locator("tbody th").first).to_have_text("3")
    page.locator("tbody a").first.click()
    expect(page.locator("pre")).to_contain_text('"order": 14')  # the fourth of those with number % 4 == 2
    expect(page.locator("pre")).to_contain_text("Zürich")
    expect(page.get_by_text("2025-03-09 07:05:01.250 UTC")).to_be_visible()  # when it was born
    find = f"{nodes.master}/dashboard/messages?topic=orders&q="
    go(page, f"{find}order-14")
    expect(page.locator("tbody tr")).to_have_count(1)
    go(page, f"{find}all")
    expect(page.locator("tbody tr")).to_have_count(32)
    expect(page.get_by_text("there may be older ones")).to_be_visible()
    go(page, f"{find}{14:032X}")
    page.locator("tbody a").click()
    expect(page.locator("pre")).to_contain_text('"order": 14')
    go(page, f"{find}order-1400")
    expect(page.get_by_text("No message of orders has the key")).to_be_visible()
    go(page, f"{nodes.master}/dashboard/messages?q={nodes.ids['binary']}")
    expect(page.locator("pre.hex")).to_be_visible()
    go(page, f"{nodes.master}/dashboard/messages?q=order-14")
    expect(page.locator("tbody td").first).to_have_text("orders")
    assert page.locator("datalist option").count() == 500
    assert page.locator("datalist option[value=orders]").count() == 1
    go(page, f"{nodes.master}/dashboard/queue?topic=orders&queue=2&offset=3")
    expect(page.locator("tbody td.preview").first).to_have_text('{"order": 14, "city": "Zürich"}')
    go(page, f"{nodes.master}/dashboard/queue?topic=orders&queue=0&at=2999-01-01")
    expect(page.get_by_text("The queue ends here")).to_be_visible()
    go(page, f"{nodes.master}/dashboard/queue?topic=orders&queue=0&at=2001-01-01")
    expect(page.locator("tbody th").first).to_have_text("0")


def test_bodies_of_all_kinds(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()

    def look(kind: str, more: str = "") -> None:
        go(page, f"{nodes.master}/dashboard/message?offset={offset_of(nodes, kind)}{more}")

    look("binary")
    dump = page.locator("pre").inner_text().splitlines()
    assert dump[4].split("  ")[1:3] == [BINARY[64:72].hex(" "), BINARY[72:80].hex(" ")]
    look("large")
    expect(page.get_by_text("showing the first 32.0 KiB")).to_be_visible()
    assert page.locator("pre").inner_text() == "ü" * (32 * 1024 // 2)
    look("json")
    lines = [line.strip() for line in page.locator("pre").inner_text().splitlines()]
    assert lines == ["[", "1,", "{", '"a": 1,', '"a": 1e400', "},", f'"{HARM}"', "]"]
    look("json", "&as=hex")
    expect(page.locator("pre")).to_contain_text("5b 31 2c 7b")


def test_nothing_that_strangers_wrote_is_run(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    go(page, f"{nodes.master}/dashboard/message?offset={offset_of(nodes, 'hostile')}")
    assert page.locator("pre").inner_text() == HOSTILE + "\u2400\u241b[31m⟨U+202E⟩"
    expect(page.locator("dd", has_text=HOSTILE)).to_have_count(5)  # unique id, and four properties
    expect(page.locator("dt", has_text=HOSTILE)).to_have_count(1)
    for path, said in (
        ("/queue?topic=special&queue=0", HOSTILE[:40]),
        ("/topics?q=hostile", HOSTILE_TOPIC),
        ("/group?name=billing", HOSTILE),
        ("/groups", HOSTILE_GROUP),
    ):
        go(page, f"{nodes.master}/dashboard{path}")
        expect(page.get_by_text(said).first).to_be_visible()
        assert page.evaluate("window.harmed") is None, path
    go(page, f"{nodes.master}/dashboard/topics?q=hostile")
    page.get_by_role("link", name=HOSTILE_TOPIC).click()
    expect(page.locator("h1")).to_have_text(HOSTILE_TOPIC)
    go(page, f"{nodes.master}/dashboard/groups?q=onload")
    page.get_by_role("link", name=HOSTILE_GROUP).click()
    expect(page.locator("h1")).to_have_text(HOSTILE_GROUP)
    page.goto(f"{nodes.master}/dashboard/messages?topic=orders&q={HOSTILE}")
    expect(page.get_by_text("No message of orders has")).to_be_visible()
    assert page.evaluate("window.harmed") is None


def test_what_is_written_into_a_page_could_not_run(viewer: Viewer, nodes: Cluster) -> None:
    """The second line of defence: were something not escaped, the browser would refuse it."""
    page = viewer.page()
    go(page, f"{nodes.master}/dashboard/topics")
    page.evaluate("html => document.querySelector('main').insertAdjacentHTML('beforeend', html)", HOSTILE)
    page.evaluate("() => { const made = document.createElement('script'); made.text = 'window.harmed = 1';"
                  " document.body.append(made); }")  # fmt: skip
    expect(page.locator("main img[src=x]")).to_be_attached()
    assert page.evaluate("window.harmed") is None
    assert any("Content Security Policy" in each for each in viewer.troubles)
    viewer.troubles.clear()


def test_groups(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    go(page, f"{nodes.master}/dashboard/groups")
    row = page.locator("tbody tr", has_text="billing")
    behind = ORDER_COUNT - QUEUE_COUNT * 10
    expect(row.locator("td")).to_have_text([f"{behind}", "0", "1", "1"])
    row.get_by_role("link").click()
    expect(page.get_by_text(f"Lag {behind}, 0 messages read per second")).to_be_visible()
    cells = page.get_by_role("table", name="Offsets of the group in orders").locator("tbody tr").first.locator("td")
    expect(cells).to_have_text(["10", "–", "15", "5"])
    expect(page.get_by_role("table", name="Connected members of billing").locator("tbody tr")).to_have_count(1)


# ---- by keyboard


def test_by_keyboard_alone(viewer: Viewer, nodes: Cluster) -> None:
    page = viewer.page()
    go(page, f"{nodes.master}/dashboard")

    def tab_to(text: str) -> None:
        """Press Tab until the element with this name has the focus; the focus must be visible at each stop."""
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "() => { const at = document.activeElement, style = getComputedStyle(at);"
                " return [at.labels?.[0]?.textContent || at.getAttribute('aria-label') || at.textContent.trim(),"
                " at === document.body || (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2)]; }"
            )
            assert focused[1], f"nobody sees that {focused[0][:60]!r} has the focus"
            if focused[0] == text:
                return
        raise AssertionError(f"Tab never comes to {text}")

    def enter() -> None:
        with page.expect_navigation():
            page.keyboard.press("Enter")

    tab_to("Skip to the content")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    go(page, f"{nodes.master}/dashboard")  # from the top again
    tab_to("Topics")
    enter()
    tab_to("Name contains")
    page.keyboard.type("orders")
    enter()
    expect(page.locator("tbody tr")).to_have_count(1)
    tab_to("orders")
    enter()
    tab_to("newest")
    enter()
    expect(page.locator("h1")).to_have_text("orders, queue 0")
    tab_to("7")
    enter()
    tab_to("Body of the message")  # it scrolls, so it has to be reached
    expect(page.locator("pre")).to_contain_text('"order": 28')


# ---- who may look


def test_with_a_token_nothing_is_shown_before_it(viewer: Viewer, empty: str) -> None:
    context = viewer.context()
    page = context.new_page()
    for path in (*PAGES, "/message?offset=0", "/live.json", "/history.json"):
        answer = context.request.get(f"{empty}/dashboard{path}", max_redirects=0)
        assert answer.status == 303, path
        assert answer.body() == b""
    page.goto(f"{empty}/dashboard/topics?q=x")
    assert barriers(page) == ""
    page.get_by_label("This node's adminToken").fill("not-the-token-at-all")
    with page.expect_response("**/login") as refused:
        page.get_by_role("button", name="Log in").click()
    assert refused.value.status == 401
    expect(page.get_by_role("alert")).to_have_text("Wrong adminToken.")
    assert [cookie["name"][-5:] for cookie in context.cookies()] == ["_form"]  # of the form, no session
    assert context.request.get(f"{empty}/dashboard/topics", max_redirects=0).status == 303
    page.get_by_label("This node's adminToken").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{empty}/dashboard/topics?q=x")  # where he wanted to go
    [cookie] = context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]
    assert page.evaluate("document.cookie") == ""
    # What changes something doesn't take it, and other pages only read.
    assert context.request.get(f"{empty}/status").status == 200
    assert context.request.post(f"{empty}/loop?seconds=1").status == 401
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()
    assert context.request.get(f"{empty}/dashboard/topics", max_redirects=0).status == 303
    viewer.troubles.clear()  # Chromium logs the 401


@pytest.mark.parametrize(("viewport", "scheme"), [(DESK, "light"), (PHONE, "dark")])
def test_actions_from_the_form_to_the_outcome(
    viewer: Viewer, empty: str, viewport: dict[str, int], scheme: Literal["light", "dark"]
) -> None:
    page = viewer.page(viewport, scheme)
    topic = f"made-{scheme}"

    def is_whole() -> None:
        assert barriers(page) == ""
        assert cuts(page) == []

    page.goto(f"{empty}/dashboard/topics")
    is_whole()
    log_in(page, empty, "/topics", TOKEN)
    page.get_by_role("link", name="Create a topic").click()
    is_whole()
    page.get_by_label("Topic", exact=True).fill("no name")
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_role("status").last).to_contain_text("illegal characters")  # the broker's own check
    go(page, f"{empty}/dashboard/act/topic")
    page.get_by_label("Topic", exact=True).fill(topic)
    page.get_by_label("Queues on this node").fill("2")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text(f"Create the topic {topic} with 2 queues on this node.")).to_be_visible()
    is_whole()
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text(f"Topic {topic} has 2 queues now.")).to_be_visible()
    is_whole()
    page.get_by_role("link", name=topic).click()
    page.get_by_role("link", name="Send a message").click()
    expect(page.get_by_label("Topic", exact=True)).to_have_value(topic)
    page.get_by_label("Body").fill(f"one\n{HOSTILE}</textarea>")
    page.get_by_label("Keys").fill("k-1")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text("Its consumers process it like any other message.")).to_be_visible()
    page.get_by_role("button", name="Send it").click()
    expect(page.get_by_text(f"Stored in {topic}, queue")).to_be_visible()
    go(page, f"{empty}/dashboard/messages?topic={topic}&q=k-1")
    while page.locator("tbody tr").count() == 0:  # the index is written after the send was answered
        page.reload()
    page.locator("tbody th a").click()
    assert page.locator("pre").inner_text() == f"one\n{HOSTILE}</textarea>"
    assert page.evaluate("window.harmed") is None
    forgive_missing(viewer)


def test_another_site_can_not_act(viewer: Viewer, empty: str) -> None:
    """A page of another origin posts a form to a node whose session the browser has."""
    page = viewer.page()
    log_in(page, empty, "", TOKEN)
    port = empty.rpartition(":")[2]
    attack = (
        f'<form method="post" action="http://127.0.0.1:{port}/dashboard/act/topic">'
        '<input name="topic" value="stolen"><input name="queues" value="1"><input name="permission" value="rw">'
        '<input name="confirmed" value="1"></form>'
    )
    page.route("http://attacker.test/", lambda route: route.fulfill(content_type="text/html", body=attack))
    page.goto("http://attacker.test/")
    with page.expect_navigation():
        page.evaluate("document.forms[0].submit()")
    expect(page.get_by_role("button", name="Log in")).to_be_visible()  # the cookie was not sent along
    go(page, f"{empty}/dashboard/topics?q=stolen")
    expect(page.get_by_text("No topic's name contains")).to_be_visible()


def test_the_overview_of_who_is_logged_out_goes_to_the_form(viewer: Viewer, empty: str) -> None:
    page = viewer.page()
    log_in(page, empty, "", TOKEN)
    page.context.clear_cookies()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()


def offset_of(nodes: Cluster, kind: str) -> int:
    """Where in the log a message is: the last eight bytes of its message id."""
    return int(nodes.ids[kind][-16:], 16)

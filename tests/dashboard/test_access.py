"""Who sees what of the dashboard: sessions, the form, and what messages say. Over real sockets, a source of our own."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from urllib.parse import urlencode

import httpx
import pytest

from ha.admin import AdminKey, AdminView, open_admin
from ha.admin.attempts import FAILURE_COUNT_MAX, HOST_COUNT_MAX, WINDOW_S, Attempts
from ha.admin.dashboard.forms import FIELD_COUNT_MAX
from ha.admin.dashboard.source import Missing, SourceBusyError
from ha.admin.sessions import ENDED_COUNT_MAX, FORM_S, SESSION_S, Sessions
from ha.remoting import BoundPort
from tests.dashboard.login import TOKEN, form_token, post_token
from tests.dashboard.source import BODY, KEY, Source

MESSAGE = "/dashboard/message?offset=0"
SEARCH = "/dashboard/messages?topic=t&q=x"


@asynccontextmanager
async def dashboard_of(source: Source, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody who asks the pages of `source`."""
    view = AdminView(status=source.status, not_ready=lambda: "", dashboard=source)
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with (
            open_admin(view, port.listen(), key=AdminKey(token)),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.port}", trust_env=False, timeout=30) as client,
        ):
            yield client


@asynccontextmanager
async def dashboard(token: str | None = None, *, is_content_open: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    async with dashboard_of(Source(is_content_open=is_content_open), token) as client:
        yield client


# ---- sessions


def test_a_session_counts_until_its_end() -> None:
    sessions = Sessions(sha256(b"x").digest())
    cookie = sessions.issue(now_s=1000)
    assert sessions.is_valid(cookie, now_s=1000 + SESSION_S - 1)
    assert not sessions.is_valid(cookie, now_s=1000 + SESSION_S)


def test_what_is_no_session_of_this_token() -> None:
    sessions, others = Sessions(sha256(b"x").digest()), Sessions(sha256(b"y").digest())
    expiry, nonce, proof = sessions.issue(now_s=0).split(".")
    longer = str(int(expiry) + 1)
    for forged in ("", ".", "..", expiry, f"{longer}.{nonce}.{proof}", f".{nonce}.{proof}", f"{expiry}..{proof}",
                   f"{expiry}.{nonce}.{proof[:-1]}", f" {expiry}.{nonce}.{proof}", f"-1.{nonce}.{proof}",
                   f"{'9' * 5000}.{nonce}.{proof}", f"{expiry}.{nonce}.ü", f"{expiry}.{nonce}x.{proof}",
                   others.issue(now_s=0), sessions.form_token("", now_s=0)):  # fmt: skip
        assert not sessions.is_valid(forged, now_s=0), forged
    assert sessions.cookie_name != others.cookie_name  # browsers send both to every port of a host


def test_each_session_is_its_own_and_can_be_ended() -> None:
    sessions = Sessions(sha256(b"x").digest())
    one, other = sessions.issue(), sessions.issue()
    assert one != other
    sessions.end(one)
    assert [sessions.is_valid(each) for each in (one, other)] == [False, True]
    for _ in range(2 * ENDED_COUNT_MAX):
        sessions.end("nonsense of a stranger")  # takes no room
    assert not sessions.is_valid(one)


def test_a_form_belongs_to_a_session_and_counts_once() -> None:
    sessions = Sessions(sha256(b"x").digest())
    session, other = sessions.issue(), sessions.issue()
    token = sessions.form_token(session, now_s=0)
    assert sessions.is_form_valid(session, token, now_s=FORM_S - 1)
    assert not sessions.is_form_valid(session, token, now_s=FORM_S)
    for wrong in (other, "", session + "x"):
        assert not sessions.is_form_valid(wrong, token, now_s=0)
    assert not sessions.is_form_valid(session, session, now_s=0)
    sessions.use_form(token)
    assert not sessions.is_form_valid(session, token, now_s=0)
    for number in range(ENDED_COUNT_MAX + 1):
        sessions.use_form(str(number))
    assert len(sessions._used_forms._values) == ENDED_COUNT_MAX


async def test_the_form_gives_a_session_that_only_reads() -> None:
    async with dashboard(TOKEN) as client:
        asked = await client.get("/dashboard/topics?q=a%26b")
        assert asked.status_code == 303
        assert asked.headers["location"] == "/dashboard/login?next=%2Fdashboard%2Ftopics%3Fq%3Da%2526b"
        form = await client.get(asked.headers["location"])
        assert 'value="/dashboard/topics?q=a%26b"' in form.text
        for wrong in ("", "x", TOKEN + "x", TOKEN[:-1], "ü" * 200):
            refused = await post_token(client, wrong)
            assert refused.status_code == 401
            assert re.match(r"halog_\w{8}_form=", refused.headers["set-cookie"])  # of the next form
            assert refused.headers["connection"] == "close"
        let_in = await post_token(client, TOKEN)
        assert (let_in.status_code, let_in.headers["location"]) == (303, "/dashboard/topics")
        cookie, of_form = let_in.headers.get_list("set-cookie")
        assert "Max-Age=0" in of_form
        assert re.fullmatch(
            r"halog_\w{8}=\d+\.\w{16}\.[0-9a-f]{64}; HttpOnly; Max-Age=43200; Path=/; SameSite=strict", cookie
        )
        for path in ("/", "/dashboard", "/dashboard/topics", "/dashboard/live.json", "/status", "/live"):
            assert (await client.get(path)).status_code in (200, 303), path
        for path in ("/loop?seconds=1", "/dashboard", "/dashboard/topics", "/status"):
            assert (await client.post(path)).status_code == 401, path
        kept = dict(client.cookies)
        elsewhere = await client.post("/dashboard/logout", headers={"Sec-Fetch-Site": "cross-site"})
        assert "set-cookie" not in elsewhere.headers
        assert (await client.post("/dashboard/logout")).status_code == 303
        assert not client.cookies
        assert (await client.get("/status")).status_code == 401
        client.cookies.update(kept)
        assert (await client.get("/status")).status_code == 401  # who had it before has it no more


@pytest.mark.parametrize("path", ["logout", "nope", "static", "static/", "static/x", "static/x/y/z"])
async def test_an_address_without_a_page_needs_the_token_too(path: str) -> None:
    """The page that says so has the node's name."""
    async with dashboard(TOKEN) as client:
        for method in ("GET", "HEAD"):
            assert (await client.request(method, f"/dashboard/{path}")).status_code == 303
        await post_token(client, TOKEN)
        assert (await client.get(f"/dashboard/{path}")).status_code == 404


@pytest.mark.parametrize(
    "wanted",
    ["https://example.org/", "//example.org", "/\\example.org", "/dashboardx", "/status", "", "/dashboard\\..\\x"],
)
async def test_the_form_leads_nowhere_else(wanted: str) -> None:
    async with dashboard(TOKEN) as client:
        assert (await post_token(client, TOKEN, wanted)).headers["location"] == "/dashboard"


async def test_a_form_of_any_length_or_of_many_fields_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    async with dashboard(TOKEN) as client:
        good = f"token={TOKEN}&form_token={form_token((await client.get('/dashboard/login')).text)}"
        for more in ("x" * 100_000, "&".join(f"x{n}=" for n in range(FIELD_COUNT_MAX))):
            answer = await client.post("/dashboard/login", content=f"{good}&next=/dashboard&{more}".encode())
            assert answer.status_code == 403
            assert "set-cookie" in answer.headers
            assert (await client.get("/status")).status_code == 401
    assert not [record for record in caplog.records if record.exc_info], "no traceback that a stranger asks for"


async def test_no_other_site_can_log_a_browser_in() -> None:
    async with dashboard(TOKEN) as client, dashboard(TOKEN) as stranger:
        theirs = form_token((await stranger.get("/dashboard/login")).text)
        own = form_token((await client.get("/dashboard/login")).text)
        for token, headers in (
            ("", {}),
            (theirs, {}),  # the attacker's form, in a browser with another form's cookie
            (own, {"Sec-Fetch-Site": "cross-site"}),
            (own, {"Sec-Fetch-Site": "same-site"}),  # another port of this host
            (own, {"Origin": "https://example.org"}),
        ):
            content = urlencode({"token": TOKEN, "form_token": token}).encode()
            answer = await client.post("/dashboard/login", content=content, headers=headers)
            assert answer.status_code == 403
            assert "This form has expired" in answer.text
            assert (await client.get("/status")).status_code == 401


async def test_a_session_that_somebody_planted_is_not_taken_over() -> None:
    async with dashboard(TOKEN) as client:
        await post_token(client, TOKEN)
        [(name, planted)] = client.cookies.items()
        await post_token(client, TOKEN)
        assert client.cookies[name] != planted


async def test_guessing_has_to_wait(caplog: pytest.LogCaptureFixture) -> None:
    async with dashboard(TOKEN) as client:
        await post_token(client, TOKEN)
        for number in range(FAILURE_COUNT_MAX):
            wrong = f"wrong-{number}"
            if number % 2:
                assert (await post_token(client, wrong)).status_code == 401
            else:
                answer = await client.get("/live", headers={"Authorization": f"Bearer {wrong}"})
                assert answer.status_code == 200  # the session
        refused = await post_token(client, TOKEN)
        assert refused.status_code == 429
        assert "Too many wrong tokens from your address. Wait " in refused.text
        limited = await client.get("/live", headers={"Authorization": f"Bearer {TOKEN}"})
        assert limited.status_code == 429
        assert 0 < int(limited.headers["retry-after"]) <= WINDOW_S
        assert (await client.get("/live")).status_code == 200  # sessions go on
    assert not [record.getMessage() for record in caplog.records if "wrong-" in record.getMessage()]


def test_an_address_waits_until_its_first_mistake_is_a_minute_old() -> None:
    now = [0.0]
    attempts = Attempts(lambda: now[0])
    for second in range(FAILURE_COUNT_MAX):
        assert attempts.wait_s("10.0.0.1") == 0
        now[0] = float(second)
        attempts.note_failure("10.0.0.1")
    assert attempts.wait_s("10.0.0.1") == WINDOW_S - now[0]
    assert attempts.wait_s("10.0.0.2") == 0
    now[0] = WINDOW_S
    assert attempts.wait_s("10.0.0.1") == 0
    attempts.note_failure("10.0.0.1")
    assert attempts.wait_s("10.0.0.1") == 1.0


def test_addresses_of_one_network_count_together_and_are_limited() -> None:
    attempts = Attempts(lambda: 0.0)
    for number in range(FAILURE_COUNT_MAX):
        attempts.note_failure(f"2001:db8::{number + 1:x}")
        attempts.note_failure("::ffff:10.0.0.1")
    assert attempts.wait_s("2001:db8::ffff") == attempts.wait_s("10.0.0.1") == WINDOW_S
    assert attempts.wait_s("2001:db8:0:1::1") == 0
    for number in range(2 * HOST_COUNT_MAX):
        attempts.note_failure(f"host-{number}")
    assert len(attempts._failures) == HOST_COUNT_MAX


async def test_without_a_token_there_is_no_form() -> None:
    async with dashboard() as client:
        assert (await client.get("/dashboard/login")).headers["location"] == "/dashboard"
        for path in ("/dashboard/login", "/dashboard/act/send"):
            assert (await client.post(path, content=b"x=1")).status_code == 403  # nothing can be posted
        assert "no adminToken is set" in (await client.get("/dashboard/act/send")).text


# ---- every answer


async def test_headers_of_every_answer() -> None:
    async with dashboard() as client:
        page = await client.get("/dashboard")
        style = re.search(r'href="([^"]+\.css)"', page.text)
        assert style is not None
        for path in ("/", "/dashboard", "/dashboard/topics?page=x", MESSAGE, "/dashboard/live.json", style[1],
                     "/dashboard/static/x/y"):  # fmt: skip
            answer = await client.get(path)
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            is_asset = path == style[1]
            assert ("immutable" if is_asset else "no-store") in answer.headers.get("cache-control", "no-store")
        html = page.text + (await client.get(MESSAGE)).text
        assert " style=" not in html
        assert not re.findall(r"<[^>]* on\w+=", html)
        assert not re.findall(r"<script(?![^>]*\ssrc=)", html)
        assert not re.findall(r'(?:src|href)="(?!/dashboard|\?|#)', html)  # nothing from elsewhere


@pytest.mark.parametrize(
    "path",
    [
        "/topics?page=0",
        "/topics?page=-1",
        "/topics?page=" + "9" * 30,
        "/topics?q=" + "x" * 301,
        "/message?offset=1.5",
        "/message?offset=٣",
        "/queue?topic=x&queue=a",
        "/topic?name=x&at=tomorrow",
    ],
)
async def test_an_address_that_shows_nothing_says_what_would(path: str) -> None:
    async with dashboard() as client:
        answer = await client.get(f"/dashboard{path}")
        assert answer.status_code == 400
        assert "Invalid address" in answer.text


async def test_a_page_that_does_not_exist_looks_like_the_others() -> None:
    async with dashboard() as client:
        answer = await client.get("/dashboard/nope/<script>")
        assert answer.status_code == 404
        assert "The dashboard has no page /dashboard/nope/" in answer.text
        assert "<script>" not in answer.text
        assert "<nav" in answer.text
        assert (await client.get("/dashboard/")).headers["location"] == "/dashboard"


# ---- what messages say


async def test_content_is_shown_to_who_asks_from_this_machine() -> None:
    async with dashboard() as client:
        port = client.base_url.port
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "127.0.0.1"):
            shown = (await client.get(MESSAGE, headers={"Host": host})).text
            assert BODY.decode() in shown, host
            assert KEY in shown


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "rebound.example.org"},
        {"Host": "192.0.2.7:10913"},
        {"X-Forwarded-For": "192.0.2.7"},
        {"Forwarded": "for=192.0.2.7"},
        {"Via": "1.1 proxy"},
    ],
)
async def test_and_to_nobody_who_may_ask_for_another(headers: dict[str, str]) -> None:
    """A page of a stranger whose name he has mean 127.0.0.1, and a proxy that others reach."""
    async with dashboard() as client:
        await assert_withheld(client, headers)


async def test_nor_where_clients_need_credentials() -> None:
    async with dashboard(is_content_open=False) as client:
        await assert_withheld(client, {})
    async with dashboard(TOKEN, is_content_open=False) as client:
        shown = await client.get(MESSAGE, headers={"Authorization": f"Bearer {TOKEN}"})
        assert BODY.decode() in shown.text


async def assert_withheld(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    message = await client.get(MESSAGE, headers=headers)
    assert message.status_code == 200
    assert "are visible only after you log in" in message.text
    search = await client.get(SEARCH, headers=headers)
    assert search.status_code == 403  # that a key exists is content, too
    for answer in (message, search):
        assert BODY.decode() not in answer.text
        assert KEY not in answer.text


# ---- a node that can't read its files


async def test_a_search_without_file_descriptors_says_so() -> None:
    class Busy(Source):
        async def offset_at(self, topic: str, queue_id: int, at_ms: int) -> int | Missing:
            raise SourceBusyError("Too many open files")

    async with dashboard_of(Busy()) as client:
        for _ in range(2):
            page = await client.get("/dashboard/queue?topic=t&at=2025-01-01")
            assert page.status_code == 503
            assert "The node can&#39;t read its files at present: Too many open files." in page.text
        assert (await client.get("/dashboard/topics")).status_code == 200

"""The dashboard's actions: permissions, confirmations, effects and log lines, with a source that notes its calls."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from html import unescape
from urllib.parse import urlencode

import httpx
import pytest
import trio

from ha.admin import AdminKey, AdminView, open_admin
from ha.admin.dashboard.forms import ACTION_SIZE_MAX
from ha.admin.dashboard.operations import BODY_SIZE_MAX, QUEUE_COUNT_MAX, SENT_BACK_MAX
from ha.admin.dashboard.source import (
    DeadLetters,
    Missing,
    NewMessage,
    OffsetMove,
    Outcome,
    SourceBusyError,
    Topic,
    TopicDetail,
)
from ha.remoting import BoundPort
from tests.dashboard.login import TOKEN, act, confirm, form_token, post_form, post_token
from tests.dashboard.nodes import HOSTILE
from tests.dashboard.source import Source

SEND = {"topic": "t", "body": "hello", "keys": "k", "tags": "", "queue": ""}


class Actions(Source):
    """A source whose topic "t" exists, and that notes what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[object] = []
        self.is_good = True
        self.gate = self.arrived = trio.Event()
        self.gate.set()

    async def topic(self, name: str, *, begin: int, count: int, at_ms: int | None = None) -> TopicDetail | Missing:
        self.arrived.set()
        await self.gate.wait()
        kinds = {"t": "messages", "system": "system", "%RETRY%g": "retries"}
        if name not in kinds:
            return Missing(f"Topic {name} does not exist on this node.")
        topic = Topic(
            name=name, kind=kinds[name], read_queue_count=8, write_queue_count=8, is_readable=True, is_writable=True,
            message_count=0, per_s=None, last_ms=None,
        )  # fmt: skip
        return TopicDetail(topic=topic, attributes={}, queues=[], queue_count=8, groups=[])

    def _do(self, *what: object) -> Outcome:
        self.done.append(what)
        return Outcome(self.is_good, "It is so." if self.is_good else "It is not so.")

    async def send(self, message: NewMessage) -> Outcome:
        return self._do("send", message)

    async def change_topic(self, name: str, queue_count: int, *, is_readable: bool, is_writable: bool) -> Outcome:
        return self._do("topic", name, queue_count, is_readable, is_writable)

    async def planned_reset(self, group: str, topic: str, to_ms: int | None) -> Sequence[OffsetMove] | Missing:
        if group != "g":
            return Missing(f"Consumer group {group} does not exist on this node.")
        return [OffsetMove(0, 10, 4, 12), OffsetMove(1, None, 0, 5), OffsetMove(2, 3, 5, 5)]

    async def reset(self, group: str, topic: str, to_ms: int | None, offsets: Mapping[int, int]) -> Outcome:
        return self._do("reset", group, topic, to_ms, offsets)

    def dead_letters(self, group: str) -> DeadLetters | Missing:
        return DeadLetters(5, 1005) if group == "g" else Missing(f"{group} has none.")

    async def send_back(self, group: str, begin: int, count: int) -> Outcome:
        return self._do("send back", group, begin, count)

    async def switch(self, to: int | None, reason: str, wait_s: float) -> Mapping[str, object]:
        self.done.append(("switch", to, reason))
        return {"is_done": self.is_good, "master_id": 2, "epoch": 7, "why_not": "it is fenced"}


class PlannedTogether(Actions):
    """Opens the gate when a form and then two confirmations of it are being planned."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_count = 0

    async def topic(self, name: str, *, begin: int, count: int, at_ms: int | None = None) -> TopicDetail | Missing:
        self.asked_count += 1
        if self.asked_count == 3:
            self.gate.set()
        return await super().topic(name, begin=begin, count=count, at_ms=at_ms)


class Busy(Actions):
    """A source that can't read its files while `is_busy`."""

    is_busy = False

    async def planned_reset(self, group: str, topic: str, to_ms: int | None) -> Sequence[OffsetMove] | Missing:
        if self.is_busy:
            raise SourceBusyError("too many open files")
        return await super().planned_reset(group, topic, to_ms)


class Growing(Actions):
    """Queues and dead letters that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.added_count = 0

    async def planned_reset(self, group: str, topic: str, to_ms: int | None) -> Sequence[OffsetMove] | Missing:
        ends = [end + self.added_count for end in (12, 5, 5)]
        return [OffsetMove(number, 3, end, end) for number, end in enumerate(ends)]

    def dead_letters(self, group: str) -> DeadLetters | Missing:
        return DeadLetters(5 - min(5, self.added_count), 8 + self.added_count)


@asynccontextmanager
async def acting(actions: Actions, *, is_logged_in: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    view = AdminView(
        status=actions.status, not_ready=lambda: "", dashboard=actions, actions=actions, switch=actions.switch
    )
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with (
            open_admin(view, port.listen(), key=AdminKey(TOKEN)),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.port}", trust_env=False, timeout=30) as client,
        ):
            if is_logged_in:
                assert (await post_token(client, TOKEN)).status_code == 303
            yield client


@pytest.mark.parametrize(
    ("name", "values", "said", "done"),
    [
        ("send", SEND, "Send a message of 5 bytes to t.", ("send", NewMessage(topic="t", body=b"hello", keys="k"))),
        (
            "send",
            {"topic": " t ", "body": "a\r\nb", "keys": " k  l ", "tags": "x", "queue": "7"},
            "Send a message of 3 bytes to t.",
            ("send", NewMessage(topic="t", body=b"a\nb", keys="k l", tags="x", queue_id=7)),
        ),
        (
            "topic",
            {"topic": "new", "queues": "4", "permission": "rw"},
            "Create the topic new with 4 queues on this node.",
            ("topic", "new", 4, True, True),
        ),
        (
            "topic",
            {"topic": "t", "queues": "4", "permission": "r"},
            "Messages in queues from 4 on are no longer consumed.",
            ("topic", "t", 4, True, False),
        ),
        (
            "reset",
            {"group": "g", "topic": "t", "to": "first"},
            "Move the group g in 3 queues of t to the first message.",
            ("reset", "g", "t", 0, {0: 4, 1: 0, 2: 5}),
        ),
        (
            "reset",
            {"group": "g", "topic": "t", "to": "last"},
            "Its members receive 6 messages again, and skip 2.",
            ("reset", "g", "t", None, {0: 4, 1: 0, 2: 5}),
        ),
        (
            "reset",
            {"group": "g", "topic": "t", "to": "2025-03-09 07:05:01"},
            "of t to 2025-03-09 07:05:01.000 UTC.",
            ("reset", "g", "t", 1_741_503_901_000, {0: 4, 1: 0, 2: 5}),
        ),
        (
            "send-back",
            {"group": "g", "offset": "", "count": "2"},
            "Send 2 dead letters of g back to it, from offset 5 to 6.",
            ("send back", "g", 5, 2),
        ),
        (
            "send-back",
            {"group": "g", "offset": "1003", "count": "500"},
            "Send 2 dead letters of g back to it",
            ("send back", "g", 1003, 2),
        ),
        (
            "switch",
            {"to": "", "reason": "maintenance"},
            "Make another member the master",
            ("switch", None, "maintenance"),
        ),
        ("switch", {"to": "2", "reason": ""}, "Make member 2 the master", ("switch", 2, "")),
    ],
)
async def test_what_is_confirmed_is_done_once(
    name: str, values: dict[str, str], said: str, done: object, caplog: pytest.LogCaptureFixture
) -> None:
    actions = Actions()
    with caplog.at_level(logging.WARNING, "ha"):
        async with acting(actions) as client:
            asked = await act(client, name, **values)
            assert asked.status_code == 200
            assert said in unescape(asked.text)
            assert actions.done == []
            answer = await confirm(client, name, asked.text, **values)
            assert answer.status_code == 200
            again = await confirm(client, name, asked.text, **values)
            assert (again.status_code, "was used already" in again.text) == (403, True)
    assert actions.done == [done]
    [line] = [text for record in caplog.records if "action_performed" in (text := record.getMessage())]
    assert f"action={name} session=" in line
    assert "done=true" in line
    assert "hello" not in line
    assert not [record for record in caplog.records if TOKEN in record.getMessage()]


@pytest.mark.parametrize(
    ("name", "values", "done"),
    [
        ("reset", {"group": "g", "topic": "t", "to": "last"}, ("reset", "g", "t", None, {0: 12, 1: 5, 2: 5})),
        ("send-back", {"group": "g", "offset": "", "count": "500"}, ("send back", "g", 5, 3)),
    ],
)
async def test_what_was_shown_is_done_although_messages_were_added(
    name: str, values: dict[str, str], done: object
) -> None:
    actions = Growing()
    async with acting(actions) as client:
        asked = await act(client, name, **values)
        actions.added_count = 100
        assert (await confirm(client, name, asked.text)).status_code == 200
    assert actions.done == [done]


@pytest.mark.parametrize(
    "offsets", ["0:12,1:5", "0:12,1:5,2:5,3:0", "0:12,1:5,2", "0:12,1:5,2:x", "0:12,1:5,2:-1", ","]
)
async def test_offsets_of_other_queues_are_not_confirmed(offsets: str) -> None:
    actions = Actions()
    async with acting(actions) as client:
        asked = await act(client, "reset", group="g", topic="t", to="last")
        answer = await confirm(client, "reset", asked.text, offsets=offsets)
        assert (answer.status_code, "have changed" in answer.text) == (400, True)
    assert actions.done == []


async def test_what_is_confirmed_twice_at_once_is_done_once() -> None:
    actions = PlannedTogether()
    codes: list[int] = []
    async with acting(actions) as client:
        asked = await act(client, "send", **SEND)
        actions.gate = trio.Event()

        async def do() -> None:
            codes.append((await confirm(client, "send", asked.text, **SEND)).status_code)

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(do)
                nursery.start_soon(do)
    assert (sorted(codes), len(actions.done)) == ([200, 403], 1)


async def test_what_could_not_be_planned_can_be_confirmed_again() -> None:
    actions = Busy()
    values = {"group": "g", "topic": "t", "to": "last"}
    async with acting(actions) as client:
        asked = await act(client, "reset", **values)
        actions.is_busy = True
        assert (await confirm(client, "reset", asked.text, **values)).status_code == 503
        assert actions.done == []
        actions.is_busy = False
        assert (await confirm(client, "reset", asked.text, **values)).status_code == 200
        assert (await confirm(client, "reset", asked.text, **values)).status_code == 403
    assert len(actions.done) == 1


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("send", {**SEND, "topic": ""}, "Topic is empty."),
        ("send", {**SEND, "topic": "nothing"}, "Topic nothing does not exist on this node. Create it first."),
        ("send", {**SEND, "topic": "system"}, "system is a topic of the system"),
        ("send", {**SEND, "topic": "%RETRY%g"}, "of retries or of dead letters"),
        ("send", {**SEND, "topic": "x" * 301}, "Topic can have 300 printable characters."),
        ("send", {**SEND, "queue": "8"}, "t has 8 queues, numbered from 0."),
        ("send", {**SEND, "queue": "x"}, "Queue must be a number."),
        ("send", {**SEND, "keys": "a\x02b"}, "Keys and tag can have 300 printable characters."),
        ("send", {**SEND, "body": "x" * (BODY_SIZE_MAX + 1)}, "The body has 65,537 bytes; the maximum here is 65,536."),
        ("topic", {"topic": "t", "queues": "0", "permission": "rw"}, "Queues must be a number from 1"),
        (
            "topic",
            {"topic": "t", "queues": f"{QUEUE_COUNT_MAX + 1}", "permission": "rw"},
            "Queues must be a number from 1",
        ),
        ("topic", {"topic": "t", "queues": "4", "permission": "x"}, "Permission must be rw, r or w."),
        ("topic", {"topic": "system", "queues": "4", "permission": "r"}, "system is a topic of the system."),
        ("reset", {"group": "g", "topic": "t", "to": "yesterday"}, "To must be first, last, or a time"),
        ("reset", {"group": "h", "topic": "t", "to": "first"}, "Consumer group h does not exist"),
        ("send-back", {"group": "h", "count": "1"}, "h has none."),
        ("send-back", {"group": "g", "count": f"{SENT_BACK_MAX + 1}"}, "The number of messages must be from 1 to 500."),
        ("send-back", {"group": "g", "offset": "1005", "count": "1"}, "Its dead letters are at offsets 5 to 1,004."),
        ("switch", {"to": "x"}, "The member's ID must be a number."),
    ],
)
async def test_what_can_not_be_done_is_said_before_it_is_confirmed(name: str, values: dict[str, str], why: str) -> None:
    actions = Actions()
    async with acting(actions) as client:
        answer = await act(client, name, **values)
        assert answer.status_code == 400
        assert why in unescape(answer.text)
        # Nor is it done by who confirms it without having been asked.
        skipped = await confirm(client, name, answer.text, **values)
        assert skipped.status_code == 400
    assert actions.done == []


async def test_what_failed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    actions = Actions()
    actions.is_good = False
    async with acting(actions) as client:
        for name, values, said in (
            ("send", SEND, "It is not so."),
            ("switch", {"to": "", "reason": ""}, "it is fenced"),
        ):
            asked = await act(client, name, **values)
            answer = await confirm(client, name, asked.text, **values)
            assert answer.status_code == 409
            assert said in answer.text
    assert [record for record in caplog.records if "done=false" in record.getMessage()]


async def test_what_was_done_is_said_if_the_session_ends_meanwhile() -> None:
    actions = Actions()
    answers: list[httpx.Response] = []
    async with acting(actions) as client:
        asked = await act(client, "send", **SEND)
        actions.gate, actions.arrived = trio.Event(), trio.Event()

        async def do() -> None:
            answers.append(await confirm(client, "send", asked.text, **SEND))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(do)
            await actions.arrived.wait()
            assert (await client.post("/dashboard/logout")).status_code == 303
            actions.gate.set()
    [answer] = answers
    assert (answer.status_code, "It is so." in answer.text, len(actions.done)) == (200, True, 1)


async def test_nothing_is_done_without_the_form_of_the_session() -> None:
    actions = Actions()
    async with acting(actions) as client, acting(Actions()) as other_session:
        asked = await act(client, "send", **SEND)
        good = form_token(asked.text)
        stolen = form_token((await other_session.get("/dashboard/act/send")).text)
        values = {**SEND, "confirmed": "1"}
        path = "/dashboard/act/send"
        for token in ("", stolen, good[:-1], client.cookies["".join(client.cookies.keys())]):
            answer = await post_form(client, "send", {**values, "form_token": token})
            assert answer.status_code == 403, token
        assert (await client.post(f"{path}?{urlencode({**values, 'form_token': good})}")).status_code == 403
        for headers in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "http://x:1"},
            {"Origin": "http://["},
        ):
            content = urlencode({**values, "form_token": good}).encode()
            for each in (path, "/dashboard/login"):
                assert (await client.post(each, content=content, headers=headers)).status_code == 403, headers
        large = urlencode({**values, "form_token": good, "body": "x" * ACTION_SIZE_MAX}).encode()
        answer = await client.post(path, content=large)
        assert (answer.status_code, "is larger than 256 KiB" in answer.text) == (403, True)
        assert actions.done == []
        # A GET shows a form, whatever the query says.
        assert (await client.get(f"{path}?{urlencode({**values, 'form_token': good})}")).status_code == 200
        assert actions.done == []
        assert (await confirm(client, "send", asked.text, **SEND)).status_code == 200
    assert len(actions.done) == 1


async def test_nothing_is_done_or_offered_without_a_session() -> None:
    actions = Actions()
    async with acting(actions, is_logged_in=False) as client:
        path = "/dashboard/act/topic"
        for answer in (await client.get(path), await client.post(path, content=b"confirmed=1")):
            assert answer.status_code == 303
            assert answer.headers["location"] == "/dashboard/login?next=%2Fdashboard%2Fact%2Ftopic"
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        for answer in (
            await client.get(path, headers=bearer),
            await client.post(path, content=b"confirmed=1", headers=bearer),
        ):
            assert answer.status_code == 404
            assert "log in with the form" in answer.text
        assert "/dashboard/act/" not in (await client.get("/dashboard/topics", headers=bearer)).text
        await post_token(client, TOKEN)
        assert "/dashboard/act/topic" in (await client.get("/dashboard/topics")).text
        assert (await client.get("/dashboard/act/nothing")).status_code == 404
        form = await client.get(path)
        await client.post("/dashboard/logout")
        answer = await post_form(client, "topic", {"topic": "t", "confirmed": "1", "form_token": form_token(form.text)})
        assert answer.status_code == 303
    assert actions.done == []


async def test_what_is_filled_in_is_only_text() -> None:
    async with acting(Actions()) as client:
        for page in (
            await client.get(f"/dashboard/act/send?{urlencode({'topic': HOSTILE, 'body': f'</textarea>{HOSTILE}'})}"),
            await act(client, "send", topic=HOSTILE, body=f"</textarea>{HOSTILE}", keys=HOSTILE),
            await act(client, "topic", topic=HOSTILE, queues="1", permission="rw"),
        ):
            assert "<script>window" not in page.text
            assert "<img" not in page.text.partition("<main")[2]
            assert page.text.count("</textarea>") <= 1
            assert page.headers["x-frame-options"] == "DENY"
            assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
            assert page.headers["cache-control"] == "no-store"

"""The overview of states that a healthy cluster doesn't have, from given data of /status."""

import re
from collections.abc import Mapping
from html import unescape
from itertools import pairwise
from typing import Any

import pytest

from ha.admin.dashboard.drawing import BOX_HEIGHT, NAME_SERVERS_MAX, SLAVES_MAX, Surroundings, draw, surroundings
from ha.admin.dashboard.peers import name_peers
from tests.dashboard.source import Source, slave
from tests.dashboard.test_access import dashboard_of


class Told(Source):
    """A source whose status differs in some keys."""

    def __init__(self, **differs: object) -> None:
        super().__init__()
        self.differs = differs

    def status(self) -> Mapping[str, object]:
        return {**super().status(), **self.differs}


def master_side(**differs: object) -> dict[str, object]:
    ha: Any = Source().status()["ha"]
    return {**ha, **differs}


def link(**differs: object) -> dict[str, object]:
    """A slave's link to its master in the form of /status."""
    return {
        "state": "ready", "condition": "connect_failed", "detail": "connection refused", "master_address": "m:10912",
        "max_offset": 10, "reported_offset": -1, "received_bytes": 0, "received_bytes_per_s": 0, "connection_count": 0,
        "resync_count": 0, "last_read_age_s": None, **differs,
    }  # fmt: skip


def name_server(address: str, error: str | None) -> dict[str, object]:
    return {"address": address, "is_registered": error is None, "error": error}


async def text_of(source: Source) -> str:
    """The overview without its tags."""
    async with dashboard_of(source) as client:
        answer = await client.get("/dashboard")
        assert answer.status_code == 200
        return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", answer.text)))


def around_of(source: Source) -> Surroundings:
    status = dict(source.status())
    name_peers(status, source.neighbours())
    return surroundings(status)


MEMBER = {
    "state": "candidate", "epoch": 7, "master_id": None, "reason": "it waits for its turn", "state_age_s": 3.0,
    "lease_remaining_s": None, "agreement_fault": "no server answers", "sync_state_set": [0, 2], "members": [0, 1, 2],
}  # fmt: skip
DAMAGE = {
    "log": {
        "open_count": 2, "open_bytes": 4096, "healed_count": 1,
        "open": [{"file": "0000", "begin": 0, "end": 4096, "found_by": "scrub", "reason": "checksum",
                  "heal_trouble": "no peer has it"}],
    },
    "verified_bytes": 1,
}  # fmt: skip
OUT_OF_RANGE = {
    **slave("far:1", 5, 100), "state": "out_of_range", "is_in_sync": False, "why_not_in_sync": "it requests offset 5",
}  # fmt: skip
SILENT = {**slave("new:1", -1, 100), "state": "connected", "is_in_sync": False, "broker_id": 2}


TIMERS = {
    "pending_count": 1234, "next_due_ms": 1741503901250, "due_counts": {"1h": 1000, "24h": 200, "7d": 30, "later": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"is_ready": False, "not_ready_reason": "the disk is full"}, ["Not ready: the disk is full."]),
        ({"role": "SYNC_MASTER", "degraded_reason": "messages are stored on one node only: no slave is connected",
          "single_copy_reason": "no slave is connected"},
         ["Messages are stored on one node only: no slave is connected. Details"]),
        ({"single_copy_reason": "no slave is connected"},
         ["Ready: this node serves as ASYNC_MASTER without slaves, so messages are stored on one node only."]),
        ({"single_copy_reason": "no slave is connected", "ha": master_side(closed_counts={"slave_closed": 1})},
         ["Ready: this node serves as ASYNC_MASTER without slaves, so messages are stored on one node only."]),
        ({"single_copy_reason": "slave s is 9 bytes behind", "ha": master_side(had_slave=True)},
         ["Messages are stored on one node only: slave s is 9 bytes behind. Sends succeed all the same."]),
        ({"member": MEMBER}, ["candidate (now)", "it waits for its turn", "no server answers", "0, 2", "not held"]),
        ({"member": {**MEMBER, "state": "master", "master_id": 0, "lease_remaining_s": 4.2, "sync_state_set": None}},
         ["master (now)", "4.2 s left", "member 0"]),
        ({"timers": TIMERS},
         ["Pending 1,234", "Next due 2025-03-09", "Within 1 hour 1,000", "1 to 24 hours 200", "Later 4"]),
        ({"damage": DAMAGE}, ["Damaged: 2 ranges of the log, 4.0 KiB.", "no peer has it"]),
        ({"ha": master_side(slaves=[OUT_OF_RANGE], explanation="slave far:1 asks for offset 5")},
         ["out of range (now)", "doesn't count", "It doesn't count: it requests offset 5.", "95 B"]),
        ({"ha": master_side(slaves=[SILENT], closed_counts={"not_authenticated": 3})},
         ["connected (now)", "unknown", "no report yet", "b:2", "not authenticated 3"]),
        ({"role": "SLAVE", "ha_client": link()},
         ["ready (now)", "connect failed", "connection refused", "nothing yet", "Last data never"]),
        ({"role": "SLAVE", "ha_client": link(state="transfer", condition="out_of_range", last_read_age_s=1.0)},
         ["transfer (now)", "out of range"]),
        ({"role": "SLAVE", "ha_client": link(master_address=None)}, ["unknown master"]),
        ({"name_servers": [name_server("n:9876", "refused"), name_server("o:9876", None)]},
         ["not registered", "refused"]),
        ({"events": [{"time_s": 1741503901.25, "level": "WARNING", "logger": "x", "text": "<b>a\x1b</b>"}]},
         ["03-09 07:05:01", "warning", "<b>a␛</b>"]),
    ],
)  # fmt: skip
async def test_what_it_says(differs: dict[str, object], said: list[str]) -> None:
    shown = await text_of(Told(**differs))
    for words in said:
        assert words in shown


@pytest.mark.parametrize(
    ("differs", "tone"),
    [
        ({}, "good"),
        ({"degraded_reason": "x"}, "warn"),
        ({"single_copy_reason": "x"}, "good"),
        ({"single_copy_reason": "x", "ha": master_side(slaves=[SILENT])}, "warn"),
        ({"is_ready": False, "not_ready_reason": "x", "degraded_reason": "the node is not ready: x"}, "bad"),
    ],
)
async def test_every_page_warns_of_what_the_overview_warns_of(differs: dict[str, object], tone: str) -> None:
    async with dashboard_of(Told(**differs)) as client:
        for path in ("", "/topics", "/message?offset=0", "/nope"):
            banners = re.findall(r'id="readiness" class="banner (\w+)"', (await client.get(f"/dashboard{path}")).text)
            assert banners == ([] if path and tone == "good" else [tone]), path


@pytest.mark.parametrize(("width", "columns"), [(880, 3), (330, 1)])
@pytest.mark.parametrize("slave_count", [0, 1, 3, 4, 40])
@pytest.mark.parametrize("name_server_count", [0, 2, 9])
def test_everybody_has_a_place_of_his_own(width: int, columns: int, slave_count: int, name_server_count: int) -> None:
    slaves = [slave(f"s{number}", 0, 10) for number in range(slave_count)]
    names = [name_server(f"n{number}", None) for number in range(name_server_count)]
    around = around_of(Told(ha=master_side(slaves=slaves), name_servers=names))
    drawing = draw(around, width=width, columns=columns)
    below = 1 if slave_count == 0 else min(slave_count, SLAVES_MAX) + (slave_count > SLAVES_MAX)
    assert len(drawing.boxes) == 1 + below + min(name_server_count, NAME_SERVERS_MAX)
    assert len(drawing.links) == len(drawing.boxes) - 1
    for number, one in enumerate(drawing.boxes):
        assert one.x >= 0
        assert one.x + one.width <= width
        assert 0 <= one.y <= drawing.height - BOX_HEIGHT
        for other in drawing.boxes[number + 1 :]:
            is_apart = abs(one.y - other.y) >= BOX_HEIGHT or abs(one.x - other.x) >= one.width
            assert is_apart, (one.title, other.title)


def test_lines_go_through_no_box() -> None:
    slaves = [slave(f"s{number}", 0, 10) for number in range(7)]
    names = [name_server(f"n{number}", None) for number in range(5)]
    around = around_of(Told(ha=master_side(slaves=slaves), name_servers=names))
    for width, columns in ((880, 3), (330, 1)):
        drawing = draw(around, width=width, columns=columns)
        for link_drawn in drawing.links:
            corners = [tuple(map(float, corner.split(","))) for corner in link_drawn.path[1:].split("L")]
            for (x1, y1), (x2, y2) in pairwise(corners):
                for box in drawing.boxes:
                    is_beside = max(x1, x2) <= box.x or min(x1, x2) >= box.x + box.width
                    is_above = max(y1, y2) <= box.y or min(y1, y2) >= box.y + BOX_HEIGHT
                    assert is_beside or is_above, (link_drawn.path, box)

"""Lays out the cluster around this node as boxes and lines, which a template draws as SVG.

There are two drawings: a wide one with several boxes per row, and a narrow one for phones.

            its master, name servers         one or more rows
            this node
            its slaves                       one or more rows

Lines leave a box vertically. A line to a row that is not adjacent runs along the left edge. Coordinates are pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from .formats import size

BOX_HEIGHT = 62
BOX_WIDTH_MAX = 264
GAP = 16
ROW_GAP = 52
EDGE = 12
"""Margin for lines on the left"""
NAME_SERVERS_MAX = 6
SLAVES_MAX = 12
"""Maximum number of slaves drawn; the drawing states only the number of the others, and the table below it lists
all."""


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A node as a box in the drawing; (x, y) is its upper left corner. `tone`: good, warn, bad or quiet."""

    x: float
    y: float
    width: float
    title: str
    lines: Sequence[str]
    tone: str
    is_here: bool = False


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A connection: the path of its line, and its label at (x, y)."""

    path: str
    tone: str
    label: str
    x: float
    y: float


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """Boxes and links of a drawing."""

    width: float
    height: float
    boxes: Sequence[Box]
    links: Sequence[Link]


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A node or name server that this node is, or should be, connected to."""

    title: str
    lines: Sequence[str]
    tone: str
    label: str = ""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """This node and its peers: those drawn above it (its master, name servers) and below it (its slaves)."""

    above: Sequence[Peer]
    here: Peer
    below: Sequence[Peer]

    def described(self) -> str:
        """Returns a text alternative for the drawing."""
        return "; ".join(
            ", ".join([peer.title, *peer.lines, *([peer.label] if peer.label else [])])
            for peer in (self.here, *self.above, *self.below)
        )


def surroundings(status: Mapping[str, Any]) -> Surroundings:
    """Returns this node and its peers from the data of /status, to which `name_peers` has added their names."""
    role, link = status["role"], status["ha_client"]
    follows = link is not None and role == "SLAVE"
    here = Peer(
        title=f"{status['broker_name']}:{status['broker_id']}",
        lines=(role, f"log {size(status['commitlog']['max_offset'] - max(0, status['commitlog']['min_offset']))}"),
        tone="good" if status["is_ready"] else "bad",
    )
    name_servers = [
        Peer(
            title=each["address"],
            lines=("name server", "registered" if each["is_registered"] else "not registered"),
            tone="good" if each["is_registered"] else "bad",
        )
        for each in status["name_servers"]
    ]
    slaves = sorted(status["ha"]["slaves"], key=lambda each: str(each["name"]))
    below = [_slave(each) for each in islice(slaves, SLAVES_MAX)]
    if len(slaves) > SLAVES_MAX:
        below.append(Peer(title=f"{len(slaves) - SLAVES_MAX} more", lines=("slaves",), tone="quiet"))
    if not below and not follows:
        below = [Peer(title="no slaves", lines=("connected",), tone="quiet")]
    above = [*([_master(link)] if follows else []), *name_servers[:NAME_SERVERS_MAX]]
    return Surroundings(above=above, here=here, below=below)


def _slave(slave: Mapping[str, Any]) -> Peer:
    state = slave["state"].replace("_", " ")
    tone = "bad" if slave["state"] in ("out_of_range", "shutdown") else "warn"
    behind = "caught up" if slave["lag_bytes"] <= 0 else f"{size(slave['lag_bytes'])} behind"
    return Peer(
        title=slave["name"],
        lines=("slave", state),
        tone="good" if slave["is_in_sync"] else tone,
        label=behind if slave["ack_offset"] >= 0 else "no report yet",
    )


def _master(link: Mapping[str, Any]) -> Peer:
    is_there = link["state"] == "transfer"
    condition = link["condition"].replace("_", " ")
    return Peer(
        title=link["name"] or link["master_address"] or "no master known",
        lines=(link["master_address"], "master") if link["name"] else ("master",),
        tone="good" if is_there and link["condition"] == "connected" else "bad",
        label=f"{size(link['received_bytes_per_s'])}/s" if is_there else condition,
    )


def draw(around: Surroundings, *, width: float, columns: int) -> Drawing:
    """Lays out all peers with at most `columns` per row."""
    box_width = min(BOX_WIDTH_MAX, (width - 2 * EDGE - GAP * (columns - 1)) / columns)

    def row(peers: Sequence[Peer], y: float, *, is_here: bool = False) -> list[Box]:
        left = (width - len(peers) * box_width - (len(peers) - 1) * GAP) / 2
        return [
            Box(
                x=left + number * (box_width + GAP),
                y=y,
                width=box_width,
                title=peer.title,
                lines=peer.lines,
                tone=peer.tone,
                is_here=is_here,
            )
            for number, peer in enumerate(peers)
        ]

    step = BOX_HEIGHT + ROW_GAP
    above = [around.above[start : start + columns] for start in range(0, len(around.above), columns)]
    below = [around.below[start : start + columns] for start in range(0, len(around.below), columns)]
    y = 2.0
    [here] = row([around.here], y + len(above) * step, is_here=True)
    boxes, links = [here], []
    for number, peers in enumerate(above):
        placed = row(peers, y + number * step)
        boxes += placed
        is_next = number == len(above) - 1
        links += [_link(here, box, peer, -1, is_next=is_next) for box, peer in zip(placed, peers, strict=True)]
    for number, peers in enumerate(below):
        placed = row(peers, here.y + (number + 1) * step)
        boxes += placed
        links += [_link(here, box, peer, 1, is_next=number == 0) for box, peer in zip(placed, peers, strict=True)]
    return Drawing(width=width, height=here.y + len(below) * step + BOX_HEIGHT + 2, boxes=boxes, links=links)


def _link(here: Box, box: Box, peer: Peer, direction: int, *, is_next: bool) -> Link:
    """Returns the line to a box above (`direction` -1) or below (1) this node."""
    from_x, to_x = here.x + here.width / 2, box.x + box.width / 2
    from_y, to_y = (here.y + BOX_HEIGHT, box.y) if direction > 0 else (here.y, box.y + BOX_HEIGHT)
    leaves_y, arrives_y = from_y + direction * ROW_GAP * 0.3, to_y - direction * ROW_GAP * 0.7
    if is_next:
        corners = [(from_x, from_y), (from_x, leaves_y), (to_x, leaves_y), (to_x, to_y)]
    else:
        corners = [
            (from_x, from_y),
            (from_x, leaves_y),
            (EDGE / 2, leaves_y),
            (EDGE / 2, arrives_y),
            (to_x, arrives_y),
            (to_x, to_y),
        ]
    path = "M" + "L".join(f"{x:g},{y:g}" for x, y in corners)
    label_y = to_y - direction * ROW_GAP * 0.35 + 4
    return Link(path=path, tone=peer.tone, label=peer.label, x=to_x, y=label_y)

"""`ha offsets …`: shows and resets the offsets of consumer groups."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from ha.cli.asking import Json, Yes, ask, print_dry_run_notice, report_unasked
from ha.cli.exits import UsageError
from ha.cli.flags import LOCAL_CLIENT, ClientFlags
from ha.cli.names import All, find_group, without_master
from ha.cli.showing import output, print_json, safe
from ha.cli.times import local_time, time_ms
from ha.client import Admin, Client, MessageQueue, PullConsumer
from ha.protocol.topic_names import is_system_topic

app = cyclopts.App(name="offsets", help="Show and reset the offsets of consumer groups.", help_format="markdown")


class QueueAt(msgspec.Struct, frozen=True):
    """A group's progress in one queue: it has consumed the queue offsets below `offset`, of those below `end`.

    `lag` is in messages.
    """

    topic: str
    broker: str
    queue: int
    offset: int
    end: int
    lag: int
    in_flight: int
    """Number of messages that members have received but not committed or acknowledged"""
    last_consumed_ms: int
    """Store time of the last consumed message; 0: unknown"""


class Progress(msgspec.Struct, frozen=True):
    """A group's progress in its queues."""

    group: str
    lag: int
    """Number of messages in all queues that the group has not consumed, including `hidden_lag`"""
    messages_per_s: float
    queues: list[QueueAt]
    hidden_lag: int = 0
    """Number of unconsumed messages in retry, dead-letter and system topics, whose queues are shown only with --all"""


class Move(msgspec.Struct, frozen=True):
    """A group's offset in one queue before and after a reset. `before` is None if the group has committed none."""

    broker: str
    queue: int
    before: int | None
    after: int
    end: int


async def progress_of(admin: Admin, group: str, topic: str | None, *, all_: bool = False) -> Progress:
    """Returns the progress of `group` in `topic`, or in all its topics if `topic` is None.

    Has no queues if no broker has offsets of the group. Without `topic` and `all_`, the queues of system topics are
    omitted, and their lag is in `hidden_lag`.
    """
    found = await admin.consumer_progress(group, topic)
    queues = [
        QueueAt(
            each.queue.topic,
            each.queue.broker_name,
            each.queue.queue_id,
            each.consumer_offset,
            each.broker_offset,
            each.lag,
            each.in_flight,
            max(0, each.last_timestamp_ms),
        )
        for each in found.queues
    ]
    shown = [queue for queue in queues if all_ or topic is not None or not is_system_topic(queue.topic)]
    hidden_lag = sum(queue.lag for queue in queues) - sum(queue.lag for queue in shown)
    return Progress(group, found.lag, found.messages_per_s, shown, hidden_lag)


def show_progress(console: Console, progress: Progress) -> None:
    """Prints a table with one row per queue, and the totals."""
    table = Table("topic", "broker", "queue", "offset", "end", "lag", "in flight", "last consumed stored at", box=None)
    for queue in progress.queues:
        stored = "–"
        if queue.last_consumed_ms:
            stored = local_time(queue.last_consumed_ms)
        counts = (f"{queue.offset:,}", f"{queue.end:,}", f"{queue.lag:,}", f"{queue.in_flight:,}")
        table.add_row(safe(queue.topic), safe(queue.broker), str(queue.queue), *counts, stored)
    console.print(table)
    hidden = f" ({progress.hidden_lag:,} to be retried; see --all)" if progress.hidden_lag else ""
    console.print(f"lag {progress.lag:,} messages{hidden}, {progress.messages_per_s:,.1f} messages/s")


@app.command
def show(
    group: str,
    /,
    *,
    topic: Annotated[str | None, Parameter(help="Only this topic.")] = None,
    all_: All = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> int:
    """Show a group's offset and lag in each of its queues.

    If a broker set has no master, the command exits with 69 after the result, which lacks its queues.
    """

    async def question(admin: Admin, _: Client) -> tuple[Progress, list[str]]:
        if topic is not None:
            await admin.route(topic)
        await _check_exists(admin, group)
        return await progress_of(admin, group, topic, all_=all_), await without_master(admin)

    progress, unasked = ask(question, client)
    if json:
        print_json(progress)
    else:
        show_progress(output(), progress)
    return report_unasked(unasked)


@app.command
def reset(
    group: str,
    topic: str,
    /,
    *,
    to: Annotated[str, Parameter(help="New position: first, last, or a time (2026-11-22T09:30, or ms since 1970).")],
    yes: Yes = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """Reset a group's offsets in a topic to the first message, the end, or a store time.

    Without --yes, only show the current and new offset of each queue. Connected members continue at the new offsets at
    once and may receive messages again.
    """
    try:
        moment_ms = None if to == "last" else 0 if to == "first" else time_ms(to)
        moment = None if moment_ms is None else datetime.fromtimestamp(moment_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--to {to!r}: accepted are first, last, a time such as 2026-11-22T09:30, or ms since 1970"
        ) from None

    async def question(admin: Admin, sdk: Client) -> list[Move]:
        await admin.route(topic)
        await _check_exists(admin, group)
        moves = await _planned(sdk, group, topic, moment_ms)
        if not yes:
            return moves
        done = await admin.reset_offsets(group, topic, moment)
        return [
            msgspec.structs.replace(move, after=done.get(MessageQueue(topic, move.broker, move.queue), move.after))
            for move in moves
        ]

    moves = ask(question, client)
    if json:
        print_json({"group": group, "topic": topic, "to": to, "is_done": yes, "queues": moves})
    else:
        table = Table(
            "broker", "queue", "old offset" if yes else "offset", "new offset", "end", "redelivered", box=None
        )
        for move in moves:
            before = "–" if move.before is None else f"{move.before:,}"
            again = "–" if move.before is None else f"{max(0, move.before - move.after):,}"
            table.add_row(safe(move.broker), str(move.queue), before, f"{move.after:,}", f"{move.end:,}", again)
        output().print(table)
    if not yes:
        print_dry_run_notice()


async def _check_exists(admin: Admin, group: str) -> None:
    """Raises UsageError if a group has neither offsets nor settings. A pull consumer's group has only offsets."""
    if not (await progress_of(admin, group, None, all_=True)).queues:
        await find_group(admin, group)


async def _planned(client: Client, group: str, topic: str, moment_ms: int | None) -> list[Move]:
    moves = []
    async with PullConsumer(client, group=group) as consumer:
        for queue in sorted(await consumer.queues(topic)):
            end = await consumer.max_offset(queue)
            if moment_ms is None:
                after = end
            elif moment_ms == 0:
                after = await consumer.min_offset(queue)
            else:
                after = await consumer.offset_for_time(queue, moment_ms)
            before = await consumer.committed_offset(queue)
            moves.append(Move(queue.broker_name, queue.queue_id, before, after, end))
    return moves

"""`ha topic …`: lists, describes, creates and deletes topics."""

from __future__ import annotations

from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.table import Table

from ha.cli.asking import Json, Yes, ask, print_dry_run_notice
from ha.cli.exits import UsageError
from ha.cli.flags import LOCAL_CLIENT, ClientFlags
from ha.cli.names import All, change_brokers, user_topics
from ha.cli.showing import output, print_json, safe
from ha.cli.times import local_time
from ha.client import Admin, Client
from ha.protocol.bodies import TopicConfig
from ha.protocol.codes import Permission

app = cyclopts.App(name="topic", help="List, describe, create and delete topics.", help_format="markdown")

QUEUE_COUNT = 8
"""Number of queues of a new topic on each broker (RocketMQ: mqadmin updateTopic)"""
_PERMISSIONS = {"rw": Permission.READ | Permission.WRITE, "r": Permission.READ, "w": Permission.WRITE}


class Queue(msgspec.Struct, frozen=True):
    """A queue with its range of queue offsets [min_offset, max_offset)."""

    broker: str
    queue: int
    min_offset: int
    max_offset: int
    last_stored_ms: int
    """Store time of the last message; 0 if the queue is empty"""


class Described(msgspec.Struct, frozen=True):
    """A topic."""

    topic: str
    message_count: int
    groups: list[str]
    queues: list[Queue]


@app.command(name="list")
def list_topics(
    *,
    all_: All = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """List the topics that the name servers know."""

    async def question(admin: Admin, _: Client) -> list[str]:
        found = await admin.topics()
        return found if all_ else user_topics(found, await admin.brokers())

    topics = ask(question, client)
    if json:
        print_json(topics)
    else:
        for topic in topics:
            print(safe(topic))


@app.command
def describe(
    topic: str,
    /,
    *,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """Show the queues of a topic, their offsets, and the groups that consume it."""
    found = ask(lambda admin, _: _described(admin, topic), client)
    if json:
        print_json(found)
        return
    console = output()
    table = Table("broker", "queue", "from", "to", "messages", "last stored", box=None)
    for queue in found.queues:
        stored = "–"
        if queue.last_stored_ms > 0:
            stored = local_time(queue.last_stored_ms)
        count = queue.max_offset - queue.min_offset
        offsets = (f"{queue.min_offset:,}", f"{queue.max_offset:,}", f"{count:,}")
        table.add_row(safe(queue.broker), str(queue.queue), *offsets, stored)
    console.print(table)
    groups = ", ".join(safe(group) for group in found.groups) or "no group"
    console.print(f"{found.message_count:,} messages; consumed by {groups}", soft_wrap=True)


async def _described(admin: Admin, topic: str) -> Described:
    stats = await admin.topic_stats(topic)
    queues = [
        Queue(queue.broker_name, queue.queue_id, each.min_offset, each.max_offset, max(0, each.last_update_timestamp))
        for queue, each in stats.items()
    ]
    count = sum(queue.max_offset - queue.min_offset for queue in queues)
    return Described(topic, count, await admin.groups_of(topic), queues)


@app.command
def create(
    topic: str,
    /,
    *,
    queues: Annotated[int | None, Parameter(help="Number of queues per broker (new topic: 8).")] = None,
    permission: Annotated[str | None, Parameter(help="Permission: rw, r or w (new topic: rw).")] = None,
    broker: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Only on the broker set with this name. Can be repeated.")
    ] = (),
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """Create a topic on every master, or change an existing one.

    An existing topic keeps the settings that are not given. If --queues is lower than before, producers use fewer
    queues, and consumers go on reading all of them. If a broker set has no master, the command exits with 69
    after the change on the others.
    """
    if permission is not None and permission not in _PERMISSIONS:
        raise UsageError(f"--permission {permission!r}: accepted are rw, r and w")
    if queues is not None and not 1 <= queues <= 65535:
        raise UsageError("--queues must be from 1 to 65535")

    async def question(admin: Admin, _: Client) -> list[Created]:
        return await change_brokers(admin, broker, lambda name: _create(admin, topic, name, queues, permission))

    created = ask(question, client)
    if json:
        print_json({"topic": topic, "brokers": created})
    else:
        for each in created:
            more = f" (consumers read {each.read_queues})" if each.read_queues != each.queues else ""
            print(f"{safe(topic)}: {each.queues} queues{more} on {safe(each.broker)}, permission {each.permission}")


class Created(msgspec.Struct, frozen=True):
    """A topic on one broker. `queues`: number of write queues. `permission`: rw, r, w or none."""

    broker: str
    queues: int
    read_queues: int
    permission: str


async def _create(admin: Admin, topic: str, broker: str, queues: int | None, permission: str | None) -> Created:
    """Creates a topic on a broker, or changes the given settings of an existing one."""
    count = QUEUE_COUNT if queues is None else queues
    new = TopicConfig(topic_name=topic, read_queue_nums=count, write_queue_nums=count)
    config = (await admin.topic_configs(broker)).get(topic, new)
    if queues is not None:
        read_queues = max(queues, config.read_queue_nums)  # the others may hold unread messages
        config = msgspec.structs.replace(config, read_queue_nums=read_queues, write_queue_nums=queues)
    if permission is not None:
        config = msgspec.structs.replace(config, perm=_PERMISSIONS[permission])
    await admin.change_topic(config, broker_names=[broker])
    held = config.perm & (Permission.READ | Permission.WRITE)
    text = next((text for text, bits in _PERMISSIONS.items() if bits == held), "none")
    return Created(broker, config.write_queue_nums, config.read_queue_nums, text)


@app.command
def delete(
    topic: str,
    /,
    *,
    yes: Yes = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """Delete a topic and its messages on all brokers. Without --yes, show what would be lost.

    Afterwards, clients can't read the messages. Their bytes stay in the log files until retention deletes these files.
    """

    async def question(admin: Admin, _: Client) -> Described:
        found = await _described(admin, topic)
        if yes:
            await admin.delete_topic(topic)
        return found

    found = ask(question, client)
    if json:
        print_json({"topic": topic, "is_done": yes, "message_count": found.message_count, "groups": found.groups})
    else:
        groups = ", ".join(safe(group) for group in found.groups) or "no group"
        print(
            f"{safe(topic)}: {'deleted' if yes else 'would be deleted'}: {found.message_count:,} messages in "
            f"{len(found.queues)} queues, consumed by {groups}"
        )
        print(
            "The messages' bytes stay in the brokers' log files, where clients can't read them, until retention "
            "deletes these files (fileReservedTime)."
        )
    if not yes:
        print_dry_run_notice()

"""`ha group …`: lists, describes, creates and deletes consumer groups."""

from __future__ import annotations

from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter

from ha.cli.asking import Json, Yes, ask, print_dry_run_notice, report_unasked
from ha.cli.exits import UsageError
from ha.cli.flags import LOCAL_CLIENT, ClientFlags
from ha.cli.names import All, change_brokers, find_group, user_groups, without_master
from ha.cli.offsets import Progress, progress_of, show_progress
from ha.cli.showing import output, print_json, safe
from ha.client import Admin, Client
from ha.protocol.bodies import GroupConfig
from ha.protocol.topic_names import is_system_topic

app = cyclopts.App(name="group", help="List, describe, create and delete consumer groups.", help_format="markdown")


class Member(msgspec.Struct, frozen=True):
    """A connected client of a group."""

    client_id: str
    address: str
    language: str


class Described(msgspec.Struct, frozen=True):
    """A consumer group."""

    group: str
    consume_enabled: bool
    broadcast_enabled: bool
    retry_max_times: int
    message_model: str | None
    """CLUSTERING or BROADCASTING, as the members report it; None if none is connected"""
    subscriptions: dict[str, str]
    members: list[Member]
    progress: Progress


@app.command(name="list")
def list_groups(*, all_: All = False, json: Json = False, client: ClientFlags = LOCAL_CLIENT) -> int:
    """List the consumer groups of the masters.

    If a broker set has no master, the command exits with 69 after the list, which lacks its groups.
    """

    async def question(admin: Admin, _: Client) -> tuple[list[str], list[str]]:
        return list(await admin.groups()), await without_master(admin)

    found, unasked = ask(question, client)
    groups = found if all_ else user_groups(found)
    if json:
        print_json(groups)
    else:
        for group in groups:
            print(safe(group))
    return report_unasked(unasked)


@app.command
def describe(
    group: str,
    /,
    *,
    all_: All = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> int:
    """Show a group's settings, members, subscriptions and offsets.

    If a broker set has no master, the command exits with 69 after the result, which lacks its part.
    """

    async def question(admin: Admin, _: Client) -> tuple[Described, list[str]]:
        config = await find_group(admin, group)
        online = await admin.consumer_connections(group)
        described = Described(
            group,
            config.consume_enable,
            config.consume_broadcast_enable,
            config.retry_max_times,
            online.message_model,
            {
                topic: each.sub_string or "*"
                for topic, each in online.subscription_table.items()
                if all_ or not is_system_topic(topic)
            },
            [Member(each.client_id, each.client_addr, each.language) for each in online.connection_set],
            await progress_of(admin, group, None, all_=all_),
        )
        return described, await without_master(admin)

    found, unasked = ask(question, client)
    if json:
        print_json(found)
    else:
        _show(found)
    return report_unasked(unasked)


def _show(found: Described) -> None:
    console = output()
    state = "enabled" if found.consume_enabled else "disabled"
    model = (found.message_model or "no members").lower()
    console.print(f"{safe(found.group)}: {state}, {found.retry_max_times} retries, {model}")
    for member in found.members:
        console.print(f"  {safe(member.client_id)} at {safe(member.address)}, {safe(member.language)}")
    for topic, tags in found.subscriptions.items():
        console.print(f"  subscribes to {safe(topic)}: {safe(tags)}")
    show_progress(console, found.progress)


@app.command
def create(
    group: str,
    /,
    *,
    retries: Annotated[
        int | None, Parameter(help="Maximum redeliveries before a message is dead-lettered (new group: 16).")
    ] = None,
    consume: Annotated[bool | None, Parameter(help="Allow the group to consume (new group: yes).")] = None,
    broadcast: Annotated[
        bool | None,
        Parameter(help="Allow broadcast mode, in which each member gets every message (new group: yes)."),
    ] = None,
    broker: Annotated[
        tuple[str, ...], Parameter(negative=(), help="Only on the broker set with this name. Can be repeated.")
    ] = (),
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> None:
    """Create a consumer group on every master, or change an existing one.

    An existing group keeps the settings that are not given. If a broker set has no master, the command exits with 69
    after the change on the others.
    """
    if retries is not None and not -1 <= retries <= 1000:
        raise UsageError("--retries must be from -1 to 1000")

    given = {"retry_max_times": retries, "consume_enable": consume, "consume_broadcast_enable": broadcast}
    changes = {name: value for name, value in given.items() if value is not None}

    async def question(admin: Admin, _: Client) -> list[Created]:
        return await change_brokers(admin, broker, lambda name: _create(admin, group, name, changes))

    created = ask(question, client)
    if json:
        print_json({"group": group, "brokers": created})
    else:
        for each in created:
            state = "" if each.consume else ", disabled"
            print(f"{safe(group)}: {each.retries} retries on {safe(each.broker)}{state}")


class Created(msgspec.Struct, frozen=True):
    """A group on one broker."""

    broker: str
    retries: int
    consume: bool
    broadcast: bool


async def _create(admin: Admin, group: str, broker: str, changes: dict[str, int]) -> Created:
    """Creates a group on a broker, or changes the given settings of an existing one."""
    known = (await admin.groups(broker_names=[broker])).get(group, GroupConfig(group_name=group))
    config = msgspec.structs.replace(known, **changes)
    await admin.create_group(config, broker_names=[broker])
    return Created(broker, config.retry_max_times, config.consume_enable, config.consume_broadcast_enable)


@app.command
def delete(
    group: str,
    /,
    *,
    keep_offsets: Annotated[bool, Parameter(negative=(), help="Keep the committed offsets.")] = False,
    yes: Yes = False,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> int:
    """Delete a consumer group on all brokers. Without --yes, show its members and lag.

    If a broker set has no master, the command exits with 69 after it has done this for the others.
    """

    async def question(admin: Admin, _: Client) -> tuple[int, int, list[str]]:
        await find_group(admin, group)
        members = len((await admin.consumer_connections(group)).connection_set)
        lag = (await progress_of(admin, group, None)).lag
        if yes:
            await admin.delete_group(group, forget_offsets=not keep_offsets)
        return members, lag, await without_master(admin)

    members, lag, unasked = ask(question, client)
    if json:
        print_json({"group": group, "is_done": yes, "member_count": members, "lag": lag})
    else:
        print(
            f"{safe(group)}: {'deleted' if yes else 'would be deleted'}: {members} members, {lag:,} unconsumed messages"
        )
    if not yes:
        print_dry_run_notice()
    return report_unasked(unasked)

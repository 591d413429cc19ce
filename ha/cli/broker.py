"""`ha broker …`: adds a broker to a running cluster, and takes one out of it, without a failed send.

`drain` makes producers send to other brokers. Once all messages of the broker are consumed, it is drained and can be
stopped. The commands use requests WIPE_WRITE_PERM_OF_BROKER (205) and ADD_WRITE_PERM_OF_BROKER (327) of the name
servers (mqadmin: wipeWritePerm, addWritePerm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import anyio
import cyclopts
import msgspec
from cyclopts import Parameter

from ha.cli.asking import Json, ask
from ha.cli.exits import EXIT_DONE, EXIT_REFUSED, UsageError
from ha.cli.flags import LOCAL_CLIENT, ClientFlags
from ha.cli.names import check_brokers, user_groups, user_topics
from ha.cli.nodes import whole_number
from ha.cli.showing import notices, print_json, safe
from ha.client import Admin, Client, MessageModel
from ha.client.admin import Broker
from ha.errors import BrokerError, ConnectionFailed
from ha.protocol.bodies import TopicRouteData
from ha.protocol.codes import MASTER_ID, Permission, RequestCode, ResponseCode
from ha.protocol.headers import GetRouteInfoRequest
from ha.protocol.java_json import read_as
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import HALF_TOPIC, RETRY_PREFIX

app = cyclopts.App(name="broker", help="Add a broker to a running cluster, or drain one.", help_format="markdown")

SETTLE_S = 35.0
"""Default of --settle, in seconds. Clients look up routes every 30 s by default (pollNameServerInterval), and may send
to the broker until then."""
_LOOK_INTERVAL_S = 5.0
_TRANSACTIONS_GROUP = "CID_RMQ_SYS_TRANS"
"""Consumer group of the transaction service. Its lag in the half topic counts the half messages from the first open one
on."""
_WITHOUT_USERS = ("this broker has no users", "is not configured")
"""Parts of the remarks with which brokers without users answer: halog's, and RocketMQ 5's with authentication disabled
(AuthenticationMetadataManagerImpl)"""


class Left(msgspec.Struct, frozen=True):
    """How many messages must still be consumed before a broker is drained, by kind."""

    groups: dict[str, int] = {}
    """Consumer group -> number of messages that it has not consumed and acknowledged; for a POP group a lower bound"""
    delayed_count: int = 0
    """Number of messages with a delay level that are not delivered yet"""
    timer_count: int = 0
    """Number of timer messages that are not due yet"""
    half_count: int = 0
    """Number of half messages from the first open one on, whether open or ended; 0 if none is open"""

    @property
    def is_empty(self) -> bool:
        """Whether everything is consumed."""
        return self == Left()

    def __str__(self) -> str:
        parts = [f"group {safe(group)}: {count:,} messages" for group, count in self.groups.items()]
        for count, what in (
            (self.delayed_count, "delayed messages"),
            (self.timer_count, "timer messages"),
            (self.half_count, "half messages of transactions"),
        ):
            if count:
                parts.append(f"{count:,} {what}")
        return "; ".join(parts) or "nothing"


class Drained(msgspec.Struct, frozen=True):
    """Result of draining a broker."""

    broker: str
    is_drained: bool
    left: Left


@app.command
def drain(
    broker: str,
    /,
    *,
    wait: Annotated[
        float,
        Parameter(help="Maximum time to wait, in seconds; must be at least --settle to succeed."),
    ] = 600.0,
    settle: Annotated[
        float, Parameter(help="Minimum time until all producers have new routes, in seconds.")
    ] = SETTLE_S,
    json: Json = False,
    client: ClientFlags = LOCAL_CLIENT,
) -> int:
    """Make producers send to other brokers, and wait until everything on this one is consumed.

    Repeat the command until it succeeds, then stop the broker. The command removes the broker's write permission at the
    name servers; consumers can still read from the broker. The name servers restore the permission when a topic of the
    broker changes, and when the broker restarts; while this command waits, it removes the permission again.

    Exit codes: 0 drained; 1 not drained within --wait; 2 usage, or no other broker takes messages of one of its topics;
    69 a name server or the broker can't be reached.
    """
    if not 0 <= wait <= 7 * 86400:
        raise UsageError("--wait must be from 0 to 604800 s")
    if not 0 <= settle <= 3600:
        raise UsageError("--settle must be from 0 to 3600 s")

    def report(left: Left) -> None:
        if not json:
            notices().print(f"ha: {safe(broker)} still holds: {left}")

    done = ask(lambda admin, sdk: drain_broker(admin, sdk, broker, wait, settle, report), client)
    if json:
        print_json(done)
    elif done.is_drained:
        print(f"{safe(broker)}: drained; it can be stopped")
    else:
        notices().print(f"ha: {safe(broker)} is not drained after {wait:g} s; left: {done.left}")
    return EXIT_DONE if done.is_drained else EXIT_REFUSED


async def drain_broker(
    admin: Admin, client: Client, name: str, wait_s: float, settle_s: float, report: Callable[[Left], None]
) -> Drained:
    """Removes a broker's write permission repeatedly, until everything on it is consumed and producers have found no
    route to it for `settle_s` seconds.

    If that takes longer than `wait_s`, returns with `is_drained` false. Calls `report` whenever the remaining messages
    have changed, unless none remain. Raises UsageError if no broker has this name, or if no other broker takes messages
    of one of its topics; ConnectionFailed if it has no master; and the errors of Admin.
    """
    await _check_others(admin, client, name)
    began = removed_at = anyio.current_time()
    reported: Left | None = None
    while True:
        brokers = await _brokers(admin, name)  # another member may be master by now
        topics = await _writable_topics(admin, name, brokers)
        has_routes = any([name in await _takers(client, topic) for topic in topics])
        await admin.wipe_write_permission(name)
        now = anyio.current_time()  # messages may arrive while it looks
        if has_routes:
            removed_at = now
        waited_s, settled_s = now - began, now - removed_at
        left = await _look(admin, client, name, brokers[name].addresses[MASTER_ID])
        is_drained = left.is_empty and settled_s >= settle_s
        if is_drained or waited_s >= wait_s:
            return Drained(name, is_drained, left)
        if left not in (reported, Left()):
            report(left)
            reported = left
        unsettled_s = settle_s - settled_s if settled_s < settle_s else _LOOK_INTERVAL_S
        await anyio.sleep(min(_LOOK_INTERVAL_S, wait_s - waited_s, unsettled_s))


async def _brokers(admin: Admin, name: str) -> dict[str, Broker]:
    """Returns the brokers of the cluster of `name` that have a master, by name.

    Raises UsageError if there is no broker of this name, ConnectionFailed if it has no master.
    """
    await check_brokers(admin, [name])
    brokers = {each.name: each for each in await admin.brokers() if MASTER_ID in each.addresses}
    if name not in brokers:
        raise ConnectionFailed(name, "no master is registered for this name")
    return {each.name: each for each in brokers.values() if each.cluster == brokers[name].cluster}


async def _writable_topics(admin: Admin, name: str, brokers: dict[str, Broker]) -> list[str]:
    """Returns the topics of users that are writable on this broker itself, whether or not it is drained."""
    configs = await admin.topic_configs(name)
    writable = sorted(topic for topic, config in configs.items() if config.perm & Permission.WRITE)
    return user_topics(writable, brokers.values())


async def _check_others(admin: Admin, client: Client, name: str) -> None:
    """Checks that producers can send to another broker, too, for each topic that is writable on this broker.

    Raises UsageError if they can't. Compares the routes at the name servers, because a drained broker still has its
    topics, but gets no messages.
    """
    brokers = await _brokers(admin, name)
    others = brokers.keys() - {name}
    topics = await _writable_topics(admin, name, brokers)
    missing = [topic for topic in topics if not others & await _takers(client, topic)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        cure = "start another broker, and run ha broker join BROKER"
        if others:
            other = min(others)
            cure = f"ha broker join {other}, or, if {other} is drained, ha broker undrain {other}"
        raise UsageError(
            f"sends would fail: no other broker takes messages of {safe(', '.join(missing[:3]))}{more}; {safe(cure)}"
        )


async def _takers(client: Client, topic: str) -> set[str]:
    """Returns the names of the brokers to which producers send messages of a topic, according to any name server.

    Does not use the client's cached routes, which may be 30 s old.
    """
    fields = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True).to_ext_fields()
    takers: set[str] = set()
    for server in client.name_servers:
        command = RemotingCommand(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields=dict(fields))
        try:
            answer = await client.connections.request(server, command)
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            continue
        queues = read_as(TopicRouteData, answer.body).queue_datas
        takers |= {each.broker_name for each in queues if each.perm & Permission.WRITE and each.write_queue_nums}
    return takers


async def _look(admin: Admin, client: Client, name: str, address: str) -> Left:
    """Returns what the broker at `address` still holds.

    Messages move meanwhile: half, timer and delayed messages become messages of a queue, and a message that a consumer
    sends back becomes a delayed one. So queues are counted after the first three, and then delayed messages again.
    """
    half_count = await _left_of(admin, _TRANSACTIONS_GROUP, name, HALF_TOPIC)
    timer_count = await _timer_count(client, address)
    delayed_count = await _delayed_count(admin, address)
    return Left(
        groups=await _groups_left(admin, name),
        delayed_count=max(delayed_count, await _delayed_count(admin, address)),
        timer_count=timer_count,
        half_count=half_count,
    )


async def _delayed_count(admin: Admin, address: str) -> int:
    """Returns the number of messages with a delay level that are not delivered yet."""
    count = 0
    for key, value in (await admin.broker_figures(address)).items():
        if key.startswith("scheduleMessageOffset_"):
            delivered, end = map(whole_number, value.partition(",")[::2])
            if delivered is not None and end is not None:
                count += max(0, end - delivered)
    return count


async def _groups_left(admin: Admin, name: str) -> dict[str, int]:
    """Returns the number of messages on a broker that each group has not consumed and acknowledged, if there are any.

    Groups that are only known to other brokers count, too: their members find the broker's queues later.
    """
    known = await admin.topic_configs(name)
    left: dict[str, int] = {}
    for group in user_groups(await admin.groups()):
        topics = await _topics_of(admin, group)
        count = sum([await _left_of(admin, group, name, topic) for topic in sorted(topics & known.keys())])
        if count:
            left[group] = count
    return left


async def _topics_of(admin: Admin, group: str) -> set[str]:
    """Returns the topics in which a group has offsets on any broker, its retry topic, and the topics to which its
    members subscribe.

    Members in broadcast mode keep their offsets themselves, so nobody else knows what they have consumed: their
    subscriptions are left out.
    """
    progress = await admin.consumer_progress(group)  # RocketMQ 4.9 does not support Admin.topics_of
    topics = {each.queue.topic for each in progress.queues} | {RETRY_PREFIX + group}
    online = await admin.consumer_connections(group)
    is_broadcast = online.message_model == MessageModel.BROADCASTING.value
    return topics if is_broadcast else topics | online.subscription_table.keys()


async def _left_of(admin: Admin, group: str, name: str, topic: str) -> int:
    """Returns the number of messages of a topic on a broker that a group has not consumed and acknowledged.

    For a POP group it is a lower bound: the group's offset passes messages as soon as members receive them, so its lag
    does not contain messages in flight.
    """
    progress = await admin.consumer_progress(group, topic, broker_names=[name])
    return sum(max(queue.lag, queue.in_flight) for queue in progress.queues)


class _TimerMetric(msgspec.Struct):
    count: int = 0


class _TimerMetrics(msgspec.Struct, rename="camel"):
    timing_count: dict[str, _TimerMetric] = {}


async def _timer_count(client: Client, address: str) -> int:
    """Returns the number of pending timer messages (GET_TIMER_METRICS, 61); 0 if the broker has no timers."""
    try:
        answer = await client.connections.request(address, RemotingCommand(RequestCode.GET_TIMER_METRICS))
    except BrokerError as error:
        if error.code not in (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.SYSTEM_ERROR):
            raise
        return 0
    return sum(each.count for each in read_as(_TimerMetrics, answer.body or b"{}").timing_count.values())


@app.command
def undrain(broker: str, /, *, json: Json = False, client: ClientFlags = LOCAL_CLIENT) -> None:
    """Let producers send to a drained broker again. They do so within 30 s."""

    async def question(admin: Admin, _: Client) -> int:
        await _brokers(admin, broker)
        return await admin.add_write_permission(broker)

    count = ask(question, client)
    if json:
        print_json({"broker": broker, "topic_count": count})
    else:
        print(f"{safe(broker)}: producers may send to its {count:,} topics")


class Joined(msgspec.Struct, frozen=True):
    """The topics, groups and users that were created on a broker."""

    broker: str
    topics: list[str]
    groups: list[str]
    users: list[str] = []


@app.command
def join(broker: str, /, *, json: Json = False, client: ClientFlags = LOCAL_CLIENT) -> None:
    """Create the topics, consumer groups and users of the other brokers on a broker that was added to the cluster.

    Settings, policies and numbers of queues are copied from the other brokers. Existing topics, groups and users don't
    change, except that users without policies get those of the other brokers. Only a super user can copy users, because
    nobody else can read their passwords.
    """
    joined = ask(lambda admin, _: join_broker(admin, broker), client)
    if json:
        print_json(joined)
    else:
        users = f"{len(joined.users):,} users, " if joined.users else ""
        print(f"{safe(broker)}: {users}{len(joined.topics):,} topics and {len(joined.groups):,} groups created")


async def join_broker(admin: Admin, name: str) -> Joined:
    """Creates the users, groups and topics that the broker lacks, and returns what was created.

    Topics come last, because clients use the broker once it has topics. Raises UsageError if no broker has this name,
    or if the account of this command may not read users or their passwords; ConnectionFailed if the broker has no
    master; and the errors of Admin.
    """
    brokers = await _brokers(admin, name)
    own_groups, own_topics = await admin.groups(broker_names=[name]), await admin.topic_configs(name)
    others = [each for each in brokers if each != name]
    users = await _create_users(admin, name, others)
    groups = {
        group: config for group, config in (await admin.groups(broker_names=others)).items() if group not in own_groups
    }
    groups = {group: groups[group] for group in user_groups(groups)}
    for config in groups.values():
        await admin.create_group(config, broker_names=[name])
    known = {topic: config for each in others for topic, config in (await admin.topic_configs(each)).items()}
    topics = [topic for topic in user_topics(sorted(known), brokers.values()) if topic not in own_topics]
    for topic in topics:
        there = known[topic]
        here = msgspec.structs.replace(
            there, read_queue_nums=there.write_queue_nums, perm=there.perm & ~Permission.INHERIT
        )
        await admin.change_topic(here, attributes=there.attributes, broker_names=[name])
    return Joined(name, topics, list(groups), users)


async def _create_users(admin: Admin, name: str, others: list[str]) -> list[str]:
    """Creates the users that a broker lacks, with their policies, and returns their names.

    Returns an empty list if the other brokers have no users. Raises UsageError if the account of this command may not
    read users or their passwords.
    """
    try:
        known = await admin.users(broker_names=others)
    except BrokerError as error:
        if error.code == ResponseCode.NO_PERMISSION:
            raise UsageError(f"{error.address} does not list its users: repeat it as a super user") from None
        is_told = any(text in error.remark for text in _WITHOUT_USERS)
        if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED and not is_told:
            raise
        return []
    if not known:  # also if there are no other brokers; this one is not asked, because it may not support users
        return []
    own = {user.username for user in await admin.users(broker_names=[name])}
    missing = [user for user in known if user.username not in own]
    if any(user.password is None for user in missing):
        raise UsageError(f"{safe(name)} has no user {safe(missing[0].username or '')}: repeat it as a super user")
    for user in missing:
        await admin.create_user(user, broker_names=[name])
    own_policies = await admin.policies(broker_names=[name])
    for username, policies in (await admin.policies(broker_names=others)).items():
        if policies and not own_policies.get(username):  # an earlier attempt may have created the user alone
            await admin.update_policies(username, policies, broker_names=[name])
    return [user.username or "" for user in missing]

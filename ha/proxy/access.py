"""Access control of gRPC calls, by the guard that also checks remoting requests (ha/acl), and signing of the requests
that a front sends to serve the calls.

    call                                            rights
    QueryRoute                                      PUB, SUB or GET on the topic
    SendMessage, RecallMessage, EndTransaction      PUB on the topic; SUB if it is a retry topic
    QueryAssignment, ReceiveMessage, AckMessage,
    ChangeInvisibleDuration,
    ForwardMessageToDeadLetterQueue                 SUB on the topic and on the group
    Heartbeat, NotifyClientTermination              SUB on the group, if the request names one
    Telemetry                                       with settings: PUB on each topic of a producer, because it receives
                                                    their half messages; SUB on group and topics of a consumer

Source: DefaultAuthorizationContextBuilder. Unlike in RocketMQ, all topics of a call and of settings are checked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from ha.acl import AclGuard, AclRefusal, Right
from ha.acl.grpc_signature import read_signature
from ha.errors import RemoteProtocolError
from ha.grpc import Call
from ha.protocol.acl import AclCredentials, sign
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import RETRY_PREFIX

from .messages import PACKAGE, Code
from .names import resource_name
from .refusal import CallRefused
from .session import Session

METADATA = ("authorization", "x-mq-date-time")
SETTINGS = "TelemetryCommand"

Needs = Iterator[tuple[str, int]]


LoadUser = Callable[[str], Awaitable[None]]
"""Loads the account of an access key, if there is one, so that the guard knows it. Raises BrokerUnreachable."""


class GuardedCalls:
    """Checks calls with a guard. Sets `Session.access_key`, under which brokers check the client's requests."""

    def __init__(self, guard: AclGuard, load_user: LoadUser | None = None) -> None:
        self._guard = guard
        self._load_user = load_user

    async def check(self, session: Session, call: Call, request: Any) -> None:
        """Authenticates a call, and checks that its account has the rights that `request` needs (none if it is None).
        Raises CallRefused (UNAUTHORIZED or FORBIDDEN) if the guard refuses the call, and BrokerUnreachable if the
        account can't be loaded."""
        name = SETTINGS if call.method == "Telemetry" else f"{call.method}Request"
        metadata = _metadata(call)
        if self._load_user is not None:
            claimed = _claimed_access_key(metadata)
            if self._guard.policy.account(claimed) is None:  # accounts of the policy files need no broker
                await self._load_user(claimed)
        try:
            session.access_key = self._admit(session, metadata, name, _needs(name, request))
        except AclRefusal as refusal:
            code = Code.UNAUTHORIZED if refusal.is_authentication else Code.FORBIDDEN
            raise CallRefused(code, refusal.text) from None

    def may_be_asked(self, session: Session, call: Call, topic: str) -> bool:
        """Returns whether the account that opened the Telemetry stream `call` still has the rights of a producer of
        `topic`. It may have lost them, because a stream stays open when its account is changed or deleted."""
        try:
            self._admit(session, _metadata(call), SETTINGS, iter([_topic(topic, Right.PUB)]))
        except AclRefusal:
            return False
        return True

    def may_receive(self, session: Session, group: str, topic: str) -> bool:
        """Returns whether the account of the client's last call has the rights that ReceiveMessage needs."""
        needs = iter([(topic, Right.SUB), (RETRY_PREFIX + group, Right.SUB)])
        try:
            self._guard.authorize(
                session.access_key, session.connection.peer, f"{PACKAGE}.ReceiveMessageRequest", needs
            )
        except AclRefusal:
            return False
        return True

    def _admit(self, session: Session, metadata: dict[str, str], name: str, needs: Needs) -> str:
        """Returns the access key that signed a call, "" if the call needs none. Raises AclRefusal if the signature is
        wrong or the account lacks a right."""
        peer, is_encrypted = session.connection.peer, session.connection.is_encrypted
        full_name = f"{PACKAGE}.{name}"
        access_key = self._guard.authenticate(metadata, peer, full_name, is_encrypted=is_encrypted)
        self._guard.authorize(access_key, peer, full_name, needs)
        return access_key


class Signatures:
    """Signs requests to brokers and name servers, so that brokers check the rights of the client that made the call.

    A client's requests are signed with the client's key, which `guard` knows. The signature of the gRPC call can't be
    used, because it covers only the call's time. The front's own requests are signed with `own`, or not at all if that
    is None.
    """

    def __init__(self, guard: AclGuard, own: AclCredentials | None) -> None:
        self._guard = guard
        self._own = own

    def sign(self, session: Session | None, command: RemotingCommand) -> None:
        """Signs a request for a client, or for the front itself if `session` is None. The request of a client without
        an account stays unsigned."""
        if session is None:
            if self._own is not None:
                self._own.sign(command)
        elif (account := self._guard.account(session.access_key)) is not None:
            sign(command, account.access_key, account.key)


def _metadata(call: Call) -> dict[str, str]:
    """Returns the headers that authenticate a call."""
    return {key: value for key in METADATA if (value := call.metadata(key.encode()))}


def _claimed_access_key(metadata: dict[str, str]) -> str:
    """Returns the access key in a call's metadata; "" if there is none, or the metadata is malformed."""
    try:
        return read_signature(metadata).access_key
    except RemoteProtocolError:
        return ""


def _needs(name: str, request: Any) -> Needs:
    """Yields each topic or group (by the name of its retry topic) of a request, with a set of rights of which the
    account needs at least one."""
    if request is None:
        return
    if name == "QueryRouteRequest":
        yield resource_name(request.topic), Right.PUB | Right.SUB | Right.GET
    elif name == "SendMessageRequest":
        for topic in {resource_name(message.topic) for message in request.messages}:
            yield _topic(topic, Right.PUB)
    elif name in ("RecallMessageRequest", "EndTransactionRequest"):
        yield _topic(resource_name(request.topic), Right.PUB)
    elif name == SETTINGS:
        yield from _needs_of_settings(request.settings)
    elif name in ("HeartbeatRequest", "NotifyClientTerminationRequest"):
        if request.HasField("group") and request.group.name:
            yield _group(request.group)
    else:
        topic = request.message_queue.topic if name == "ReceiveMessageRequest" else request.topic
        yield resource_name(topic), Right.SUB
        yield _group(request.group)


def _needs_of_settings(settings: Any) -> Needs:
    for topic in settings.publishing.topics:
        yield _topic(resource_name(topic), Right.PUB)
    if settings.HasField("subscription"):
        yield _group(settings.subscription.group)
        for entry in settings.subscription.subscriptions:
            yield resource_name(entry.topic), Right.SUB


def _topic(name: str, right: int) -> tuple[str, int]:
    """Returns a topic and the right that it needs: SUB instead of `right` for a retry topic, to which consumers
    send.
    """
    return (name, Right.SUB) if name.startswith(RETRY_PREFIX) else (name, right)


def _group(group: Any) -> tuple[str, int]:
    return RETRY_PREFIX + resource_name(group), Right.SUB

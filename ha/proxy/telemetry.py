"""Telemetry: each client sends its settings; the front completes them and sends them back. Sources: ClientActivity,
ClientSettingsManager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import trio

from ha.errors import RemoteProtocolError
from ha.grpc import Call, Status
from ha.protocol.bodies import GroupConfig

from .brokers import Brokers, BrokerUnreachable
from .messages import ClientType, Code, make, parse, set_milliseconds
from .names import group_name, topic_name
from .options import FrontOptions
from .refusal import CallRefused
from .status import ok_status

if TYPE_CHECKING:
    from .session import Producers, Session

SUBSCRIPTION_COUNT_MAX = 1_024
"""Maximum number of subscriptions of one consumer; each of its heartbeats contains all of them"""
PRODUCER_ATTEMPTS_MAX = 3
"""Maximum number of attempts of a client to send a message."""
CONSUMER_BACKOFF_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's delay levels in seconds: how long a message that a consumer failed to handle stays invisible."""
INT32_MAX = 0x7FFFFFFF
"""Maximum of an int32 field; a group's configuration may contain a larger number."""


class Access(Protocol):
    """Access control of calls."""

    async def check(self, session: Session, call: Call, request: Any) -> None:
        """Authenticates a call by its metadata, and checks that the client has the rights that `request` needs. Raises
        CallRefused, BrokerUnreachable.

        For a Telemetry stream, called with None when it is opened, and then with each TelemetryCommand that has
        settings.
        """
        ...

    def may_be_asked(self, session: Session, call: Call, topic: str) -> bool:
        """Returns whether the client with the Telemetry stream `call` may currently be shown half messages of
        `topic`."""
        ...

    def may_receive(self, session: Session, group: str, topic: str) -> bool:
        """Returns whether a client may currently receive messages of `topic` as a member of `group`."""
        ...


class Telemetry:
    """Serves the Telemetry streams of all clients."""

    def __init__(
        self, brokers: Brokers, options: FrontOptions, producers: Producers, access: Access | None = None
    ) -> None:
        self._access = access
        self._brokers = brokers
        self._options = options
        self._producers = producers

    async def serve(self, session: Session, call: Call) -> None:
        """Answers the messages of a stream until it ends. A later stream of the same client replaces it as
        `Session.telemetry`.

        Once the session has ended, the next message ends the stream. A client that has announced its end but continues
        then opens another stream, with a new session.
        """
        assert call.messages_out is not None
        session.telemetry = call
        try:
            async with call.messages_out:
                async for message in call.messages_out:
                    try:
                        await self._answer(session, call, parse("TelemetryCommand", message))
                    except (CallRefused, RemoteProtocolError) as error:
                        call.finish(Status.INVALID_ARGUMENT, str(error))
                        return
                    except BrokerUnreachable as error:
                        call.finish(Status.INTERNAL, str(error))
                        return
                    if session.is_ended:
                        break
            call.finish()
        finally:
            if session.telemetry is call:
                session.telemetry = None

    async def _answer(self, session: Session, call: Call, command: Any) -> None:
        if not command.HasField("settings"):
            return  # other messages are results of commands; this front sends no command that has a result
        if self._access is not None:
            await self._access.check(session, call, command)
        settings = command.settings
        if len(settings.subscription.subscriptions) > SUBSCRIPTION_COUNT_MAX:
            raise CallRefused(Code.BAD_REQUEST, f"more than {SUBSCRIPTION_COUNT_MAX} subscriptions")
        group = None
        if is_consumer := settings.HasField("subscription"):
            group = await self._brokers.group(group_name(settings.subscription.group))
        if session.is_ended:
            return
        if settings.HasField("publishing"):
            topics = [topic_name(topic) for topic in settings.publishing.topics]
            session.settings = settings
            self._producers.add(session, topics)
            self._complete_producer(settings)
        elif is_consumer:
            session.settings = settings
            self._complete_consumer(settings, group)
            await self.register(session)
        else:
            raise CallRefused(Code.BAD_REQUEST, "settings without publishing and subscription")
        await call.send(make("TelemetryCommand", status=ok_status(), settings=settings).SerializeToString())

    async def register(self, session: Session) -> None:
        """Registers a consumer at brokers. Raises BrokerUnreachable."""
        session.registered_at = trio.current_time()
        await self._brokers.heartbeat(session)

    def _complete_producer(self, settings: Any) -> None:
        """Sets the fields of a producer's settings that the server decides: limits, checks and retries."""
        settings.publishing.max_body_size = self._options.message_size_max
        settings.publishing.validate_message_type = self._options.is_message_type_checked
        policy = settings.backoff_policy
        policy.max_attempts = PRODUCER_ATTEMPTS_MAX
        set_milliseconds(policy.exponential_backoff.initial, 10)
        set_milliseconds(policy.exponential_backoff.max, 1000)
        policy.exponential_backoff.multiplier = 2
        settings.metric.on = False

    def _complete_consumer(self, settings: Any, group: GroupConfig | None) -> None:
        """Sets the fields of a consumer's settings that the server decides: order, polling and redelivery."""
        group = GroupConfig(group_name="") if group is None else group
        subscription = settings.subscription
        subscription.fifo = group.consume_message_orderly
        if settings.client_type in (ClientType.PUSH_CONSUMER, ClientType.LITE_PUSH_CONSUMER):
            subscription.receive_batch_size = self._options.receive_count_max
            set_milliseconds(subscription.long_polling_timeout, self._options.polling_ms_max)
        policy = settings.backoff_policy
        policy.max_attempts = max(0, min(group.retry_max_times + 1, INT32_MAX))
        retry = group.group_retry_policy
        exponential = retry.get("exponentialRetryPolicy")
        if retry.get("type") == "EXPONENTIAL" and isinstance(exponential, dict):
            backoff = policy.exponential_backoff
            set_milliseconds(backoff.initial, _integer(exponential.get("initial"), 5_000))
            set_milliseconds(backoff.max, _integer(exponential.get("max"), 7_200_000))
            backoff.multiplier = _integer(exponential.get("multiplier"), 2)
        else:
            customized = retry.get("customizedRetryPolicy")
            steps = customized.get("next") if isinstance(customized, dict) else None
            if not isinstance(steps, list) or not steps:
                steps = [1000 * seconds for seconds in CONSUMER_BACKOFF_S]
            policy.customized_backoff.Clear()  # removes steps that the client sent
            for step in steps[:64]:
                set_milliseconds(policy.customized_backoff.next.add(), _integer(step, 1000))
        settings.metric.on = False


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else default

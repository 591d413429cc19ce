"""The service apache.rocketmq.v2.MessagingService: finds the client of a call, and passes the call to the class that
serves its method."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import trio

from ha.errors import RemoteProtocolError
from ha.grpc import Call, GrpcConnection, Status
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol import java_json
from ha.protocol.bodies import HeartbeatData, ProducerData
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import UnregisterClientRequest
from ha.protocol.remoting import RemotingCommand

from .acknowledging import Acknowledging
from .brokers import Brokers, BrokerUnreachable
from .in_flight import InFlight
from .messages import Code, parse
from .options import FrontOptions
from .receiving import Receiving
from .refusal import CallRefused, check
from .routes import Routes
from .sending import Sending
from .session import Producers, Session
from .status import ok, with_status
from .telemetry import Access, Telemetry
from .transactions import Transactions

logger = logging.getLogger(__name__)

_UNARY_TIMEOUT_S_MAX = 60.0
"""Timeout in seconds of calls other than ReceiveMessage and Telemetry, if the client does not set a shorter one."""
_CLIENT_ID_LENGTH_MAX = 255
_GROUPS_PER_HEARTBEAT = 64
_ROUTES_AT_ONCE = 64
"""Maximum number of concurrent requests for routes. One at a time would delay the heartbeats to brokers for too long
while name servers do not answer."""
_REGISTER_INTERVAL_S = 5.0
"""Minimum time in seconds between two heartbeats of a consumer that are passed to brokers. Without it, many short calls
would each cause a request with all subscriptions. Clients send a heartbeat every 10 s."""
SILENT_S = 120.0
"""Time in seconds without a call and without a Telemetry stream after which a client counts as gone. Clients send a
heartbeat every 10 s."""
_SILENCE_CHECK_INTERVAL_S = 10.0

Method = Callable[[Session, Any], Awaitable[Any]]


class Front:
    """Serves the calls of one gRPC server, while `serve_clients` runs."""

    def __init__(
        self,
        brokers: Brokers,
        options: FrontOptions,
        *,
        client_id: str,
        wall_clock_ms: Callable[[], int],
        access: Access | None = None,
    ) -> None:
        """`client_id`: client id with which the front registers at brokers. `access`: None without access control."""
        self._brokers = brokers
        self._options = options
        self._client_id = client_id
        self._access = access
        self._log_limiter = LogRateLimiter()
        self._producers = Producers(options.topics_per_producer_max)
        self._sending = Sending(brokers, options, wall_clock_ms, self._producers)
        self._telemetry = Telemetry(brokers, options, self._producers, access)
        self._routes = Routes(brokers)
        self.transactions = Transactions(brokers, options, self._producers, access)
        self._in_flight = InFlight()
        self._sessions: dict[Session, None] = {}
        """The sessions of all connections"""
        self._acknowledging = Acknowledging(brokers, options, wall_clock_ms, self._in_flight)
        self._receiving = Receiving(brokers, options, wall_clock_ms, self._acknowledging, self._in_flight)
        self._takers = {"SendMessage": self._sending.take, "AckMessage": self._acknowledging.take}
        self._methods: dict[str, Method] = {
            "QueryRoute": lambda session, request: self._routes.query(request),
            "QueryAssignment": lambda session, request: self._routes.assignments(request),
            "Heartbeat": self._heartbeat,
            "SendMessage": self._sending.send,
            "RecallMessage": self._sending.recall,
            "AckMessage": self._acknowledging.ack,
            "ChangeInvisibleDuration": self._acknowledging.change,
            "ForwardMessageToDeadLetterQueue": self._acknowledging.forward,
            "EndTransaction": self.transactions.end,
            "NotifyClientTermination": self._terminate,
        }

    # ---- the gRPC server

    def is_streaming(self, path: bytes) -> bool:
        """Returns whether the method with this path takes a stream of messages. Only the method's name is compared."""
        return path.rpartition(b"/")[2] == b"Telemetry"

    def take(self, call: Call) -> bool:
        """Serves a SendMessage or AckMessage, if it can do so without waiting; returns whether it did. With access
        control, always returns False, because the checks may wait."""
        take = self._takers.get(call.method)
        if take is None or self._access is not None:
            return False
        session = self._session(call)
        return session is not None and take(session, call)

    async def serve(self, call: Call) -> None:
        """Serves a call that `take` did not serve."""
        method = self._methods.get(call.method)
        if call.method == "Telemetry":
            await self._serve_telemetry(call)
        elif call.method == "ReceiveMessage":
            await self._serve_receive(call)
        elif method is None:
            call.finish(Status.UNIMPLEMENTED, f"method {call.method} is not implemented")
        else:
            await self._serve_unary(call, method)

    async def _serve_telemetry(self, call: Call) -> None:
        session = self._session(call)
        if session is None:
            call.finish(Status.INVALID_ARGUMENT, "x-mq-client-id is missing, or too long")
            return
        try:
            if self._access is not None:
                await self._access.check(session, call, None)
        except CallRefused as refused:
            call.finish(Status.INVALID_ARGUMENT, refused.message)
        except BrokerUnreachable as error:
            call.finish(Status.UNAVAILABLE, str(error))
        else:
            self._in_flight.returned(session)
            await self._telemetry.serve(session, call)

    async def _serve_receive(self, call: Call) -> None:
        try:
            session, request = await self._admit(call)
            await self._receiving.receive(session, call, request)
        except (CallRefused, RemoteProtocolError, BrokerUnreachable) as error:
            await self._receiving.finish(call, *self._status_of(error))

    async def _serve_unary(self, call: Call, method: Method) -> None:
        with trio.move_on_after(min(call.timeout_s, _UNARY_TIMEOUT_S_MAX)) as deadline:
            try:
                session, request = await self._admit(call)
                response = await method(session, request)
            except (CallRefused, RemoteProtocolError, BrokerUnreachable) as error:
                response = with_status(call.method + "Response", *self._status_of(error))
                if call.method == "ChangeInvisibleDuration":
                    _keep_handle(call, response)
            call.respond(response.SerializeToString())
        if deadline.cancelled_caught:
            call.finish(Status.DEADLINE_EXCEEDED, "the call took too long")

    async def _admit(self, call: Call) -> tuple[Session, Any]:
        """Returns the client of a call and its request, after access control. Raises CallRefused, RemoteProtocolError,
        BrokerUnreachable."""
        session = self._session(call)
        if session is None:
            raise CallRefused(Code.CLIENT_ID_REQUIRED, "x-mq-client-id is missing, too long, or one too many")
        request = parse(call.method + "Request", call.message)
        if self._access is not None:
            await self._access.check(session, call, request)
            self._in_flight.returned(session)
        return session, request

    def _status_of(self, error: CallRefused | RemoteProtocolError | BrokerUnreachable) -> tuple[Code, str]:
        if isinstance(error, CallRefused):
            return error.code, error.message
        if isinstance(error, RemoteProtocolError):
            return Code.BAD_REQUEST, str(error)
        if times := self._log_limiter.admit(("unreachable", ""), trio.current_time()):
            logger.warning("proxy.broker_unreachable reason=%r times=%d", str(error), times)
        return Code.PROXY_TIMEOUT if error.is_timeout else Code.INTERNAL_SERVER_ERROR, str(error)

    def _session(self, call: Call) -> Session | None:
        """Returns the session of a call's client, which its first call creates. None if the client id is missing or too
        long, or the connection has `sessions_per_connection_max` clients."""
        client_id = call.metadata(b"x-mq-client-id")
        connection = call.connection
        session = connection.sessions.get(client_id)
        if isinstance(session, Session):
            session.called_at = call.received_at
            return session
        if not 0 < len(client_id) <= _CLIENT_ID_LENGTH_MAX:
            return None
        if len(connection.sessions) >= self._options.sessions_per_connection_max:
            return None
        connection.on_close(self._end_all)
        session = Session(connection, client_id)
        session.called_at = call.received_at
        connection.sessions[client_id] = session
        self._sessions[session] = None
        if self._access is None:  # otherwise after authentication, because client ids are no secret
            self._in_flight.returned(session)
        return session

    # ---- clients

    async def _heartbeat(self, session: Session, request: Any) -> Any:
        if session.settings is None:
            raise CallRefused(Code.UNRECOGNIZED_CLIENT_TYPE, "no settings of this client yet")
        if session.is_consumer and trio.current_time() - session.registered_at >= _REGISTER_INTERVAL_S:
            await self._telemetry.register(session)
        return ok("HeartbeatResponse")

    async def _terminate(self, session: Session, request: Any) -> Any:
        if session.settings is None:
            raise CallRefused(Code.UNRECOGNIZED_CLIENT_TYPE, "no settings of this client")
        self._end(session, may_return=False)
        return ok("NotifyClientTerminationResponse")

    def _end_all(self, connection: GrpcConnection) -> None:
        for session in list(connection.sessions.values()):
            assert isinstance(session, Session)
            self._end(session, may_return=True)

    def _end(self, session: Session, *, may_return: bool) -> None:
        """Ends a client's session. `may_return`: the client may come back over another connection, so its messages in
        flight are kept for a while (`in_flight.RETURN_S`)."""
        session.is_ended = True
        session.settings = None
        del session.connection.sessions[session.client_id], self._sessions[session]
        self._in_flight.gone(session, may_return=may_return)
        self._producers.remove(session)
        self._brokers.forget(session)

    async def _end_silent(self) -> NoReturn:
        """Ends the sessions of clients that are silent for SILENT_S. Such a client may be gone although its connection
        is open, because all clients of a Node.js process share one, as do those behind an HTTP/2 proxy."""
        while True:
            await trio.sleep(_SILENCE_CHECK_INTERVAL_S)
            silent_since = trio.current_time() - SILENT_S
            for session in list(self._sessions):
                if session.telemetry is None and session.called_at <= silent_since:
                    self._end(session, may_return=True)

    # ---- the front as a client of brokers

    async def serve_clients(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Runs the front's background tasks until cancelled: renewal of messages in flight, pops, registration for
        transaction checks, and the end of silent clients' sessions."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._in_flight.serve, partial(self._acknowledging.delay, None), self._may_receive)
            nursery.start_soon(self._receiving.serve)
            nursery.start_soon(self._keep_registered)
            nursery.start_soon(self._end_silent)
            task_status.started()
            await trio.sleep_forever()
        raise AssertionError("ends by cancellation only")

    def _may_receive(self, session: Session, group: str, topic: str) -> bool:
        return self._access is None or self._access.may_receive(session, group, topic)

    async def _keep_registered(self) -> NoReturn:
        """Keeps the front registered at brokers as a producer of its clients' topics, so that they send it transaction
        checks."""
        registered: set[tuple[str, str]] = set()
        while True:
            wanted = await self._registrations(registered)
            for broker_name in {broker_name for broker_name, _ in wanted | registered}:
                topics = [topic for name, topic in wanted if name == broker_name]
                gone = [topic for name, topic in registered - wanted if name == broker_name]
                await self._register(broker_name, topics, gone)
            registered = wanted
            with trio.move_on_after(self._options.heartbeat_interval_s):
                await self._producers.wait_changed()

    async def _registrations(self, registered: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """Returns the pairs of broker name and topic to register for. For a topic whose route can't be read, these are
        its pairs in `registered`.

        Includes brokers that accept no more messages of a topic, such as drained ones: they may still have half
        messages.
        """
        wanted: set[tuple[str, str]] = set()

        async def add(topic: str) -> None:
            try:
                route = await self._brokers.route(topic)
            except BrokerUnreachable:
                wanted.update(pair for pair in registered if pair[1] == topic)  # tried again at the next heartbeat
                return
            if route is not None:
                wanted.update((broker.broker_name, topic) for broker in route.brokers)

        topics = self._producers.topics
        for start in range(0, len(topics), _ROUTES_AT_ONCE):
            async with trio.open_nursery() as nursery:
                for topic in topics[start : start + _ROUTES_AT_ONCE]:
                    nursery.start_soon(add, topic)
        return wanted

    async def _register(self, broker_name: str, topics: list[str], gone: list[str]) -> None:
        commands = []
        for start in range(0, len(topics), _GROUPS_PER_HEARTBEAT):
            groups = [ProducerData(group_name=topic) for topic in topics[start : start + _GROUPS_PER_HEARTBEAT]]
            heartbeat = HeartbeatData(client_id=self._client_id, producer_data_set=groups)
            commands.append(RemotingCommand(RequestCode.HEART_BEAT, body=java_json.dumps(heartbeat)))
        for topic in gone:
            header = UnregisterClientRequest(client_id=self._client_id, producer_group=topic)
            commands.append(RemotingCommand(RequestCode.UNREGISTER_CLIENT, ext_fields=header.to_ext_fields()))
        for command in commands:
            try:
                check(await self._brokers.invoke(None, broker_name, command))
            except (BrokerUnreachable, CallRefused) as error:
                if times := self._log_limiter.admit(("heartbeat", broker_name), trio.current_time()):
                    text = "proxy.heartbeat_failed broker=%r reason=%r times=%d"
                    logger.warning(text, broker_name, str(error), times)
                if isinstance(error, BrokerUnreachable):
                    return


def _keep_handle(call: Call, response: Any) -> None:
    """Copies the handle of a failed ChangeInvisibleDuration into the response. The Python client continues with the
    handle of any response, even of a failure, and could not settle the message without one."""
    with suppress(RemoteProtocolError):
        response.receipt_handle = parse("ChangeInvisibleDurationRequest", call.message).receipt_handle

"""Calls to etcd's JSON gateway: endpoint selection, timeouts, retries and authentication.

Knows HTTP, endpoints and tokens; a request is a path and a JSON object. The only module that imports httpx.

A call is tried at one endpoint after another until one answers, so it may be executed more than once: every call that
changes something must be safe to repeat. Each attempt has its own timeout, so that a frozen server costs little; the
timeout doubles with each round of all endpoints, so that a slow service can still answer.

Each request has the metadata `hasleader`: a server that has no leader, for example because it is cut off, refuses the
request, which is then sent to the next endpoint.
"""

from __future__ import annotations

import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import msgspec
import trio

from ha.errors import RemoteProtocolError
from ha.log_rate_limiter import LogRateLimiter

from .agreement import AgreementUnavailable
from .etcd_values import AuthenticateAnswer, ErrorAnswer, Json, decode, encode

if TYPE_CHECKING:
    import httpcore

logger = logging.getLogger(__name__)
# At INFO, httpx logs every request.
logging.getLogger("httpx").setLevel(logging.WARNING)

ANSWER_SIZE_MAX = 4 << 20
"""Maximum size of an answer in bytes; larger ones are discarded. A group's keys take some kilobytes, and etcd accepts
requests up to 1.5 MiB."""
PAUSE_S = 0.05
"""Mean pause in seconds after the first round in which no endpoint answered; doubled after each further round, up to
PAUSE_MAX_S."""
PAUSE_MAX_S = 0.5

NOT_FOUND = 5
"""gRPC status code of the answer to a request for a lease that does not exist."""
_UNAUTHENTICATED = 16
#: gRPC status codes of requests that were refused without effect. After other errors the outcome is unknown.
_REFUSED = frozenset({3, NOT_FOUND, 6, 7, 8, 9, 11, 12, _UNAUTHENTICATED})
_TOKEN_WANTED = ("invalid auth token", "user name is empty", "revision of auth store is old")
#: Errors of a request that got no answer. The last two mean that the endpoint's host name or address is invalid.
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
#: Beginnings of error messages after which another server may still execute the request: this one did not.
_TRY_ELSEWHERE = ("etcdserver: no leader", "etcdserver: too many requests", "etcdserver: not capable")


class EtcdOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoints and credentials. Its repr shows no secret. Raises ValueError for invalid values."""

    endpoints: tuple[str, ...]
    """http://host:port or https://host:port of each server; the first is tried first."""
    user: str = ""
    """User name for etcd; "" for no authentication."""
    password: Callable[[], str] | None = None
    """Returns the password; called for each new token."""
    tls: Callable[[], ssl.SSLContext] | None = None
    """Returns the context for https endpoints, a new one once its files have changed; None: the system's default."""
    attempt_timeout_s: float = 0.5
    """Timeout of an attempt at one endpoint in the first round."""
    watch_check_s: float = 1.0
    """Time without a message on a watch after which it is checked for missed changes."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("no endpoint")
        for endpoint in self.endpoints:
            parts = urlsplit(endpoint)
            # The error does not show the endpoint, which may contain a password.
            if parts.username is not None or parts.password is not None:
                raise ValueError("an endpoint has a user in it; give user and password")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
                raise ValueError(f"{endpoint!r} is not http://host:port or https://host:port")
        if self.attempt_timeout_s <= 0 or self.watch_check_s <= 0:
            raise ValueError("a timeout is not positive")


class EtcdStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one client."""

    endpoint: str
    """The endpoint that is tried first now."""
    call_count: int
    failed_attempt_count: int
    watch_restart_count: int
    """Number of times that a watch started over because it could not continue at its revision."""
    last_error: str


class Refused(Exception):
    """etcd refused the request. This attempt changed nothing."""

    def __init__(self, code: int, message: str, *, in_doubt: bool) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.in_doubt = in_doubt
        """Whether an earlier attempt may have been executed."""


class _AttemptFailed(Exception):
    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


class _Trace:
    """httpcore's trace extension for one request: records whether sending it has begun.

    Also closes a connection whose TLS handshake is cancelled, which httpcore leaves open.
    """

    def __init__(self) -> None:
        self.is_sent = False
        self._connection: httpcore.AsyncNetworkStream | None = None

    async def __call__(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._connection = info["return_value"]
        elif event == "connection.start_tls.failed" and self._connection is not None:
            await self._connection.aclose()  # closes it even if cancelled
        elif event.endswith("send_request_headers.started"):
            self.is_sent = True


class EtcdClient:
    """HTTP client for all calls of one process to etcd, with counters. Opened by `open_etcd_client`."""

    def __init__(self, options: EtcdOptions, chance: random.Random | None = None) -> None:
        self.options = options
        self.watch_restart_count = 0
        self._endpoints = tuple(endpoint.rstrip("/") for endpoint in options.endpoints)
        self._first = 0
        self._chance = chance or random.Random()
        self._token = ""
        self._token_lock = trio.Lock()
        self._context: ssl.SSLContext | None = None
        self._http: httpx.AsyncClient | None = None
        self._is_closed = False
        self._log_limiter = LogRateLimiter()
        self._call_count = self._failed_attempt_count = 0
        self._last_error = ""

    def statistics(self) -> EtcdStatistics:
        """Returns a snapshot of the counters."""
        return EtcdStatistics(
            endpoint=self._endpoints[self._first],
            call_count=self._call_count,
            failed_attempt_count=self._failed_attempt_count,
            watch_restart_count=self.watch_restart_count,
            last_error=self._last_error,
        )

    async def call(self, what: str, path: str, request: Json, *, timeout_s: float, changes: bool) -> tuple[bytes, bool]:
        """Sends a request until an endpoint answers. Returns the answer, and whether an earlier attempt may have been
        executed.

        `what` names the call in errors. `changes`: whether the request changes something. Raises AgreementUnavailable
        if there is no answer within `timeout_s`; Refused if etcd refuses the request.
        """
        self._call_count += 1
        body, in_doubt, reason = encode(request), False, ""
        count, tries = len(self._endpoints), 0
        deadline = trio.current_time() + timeout_s
        while True:
            left_s = deadline - trio.current_time()
            if left_s <= 0:
                raise AgreementUnavailable(what, reason or "no time was given", outcome_unknown=in_doubt)
            # The endpoints that this round has not tried yet share the remaining time.
            limit_s = min(self.options.attempt_timeout_s * 2 ** (tries // count), left_s / (count - tries % count))
            endpoint, trace = self._first, _Trace()
            latest = f"no answer within {limit_s:.2g} s"
            # The error of an attempt that had little time left says less than the one before it.
            was_cut_short = bool(reason) and limit_s < self.options.attempt_timeout_s
            try:
                with trio.move_on_after(limit_s):
                    return await self._with_token(endpoint, path, body, trace), in_doubt
            except _AttemptFailed as failed:
                latest, was_cut_short = str(failed), False
                trace.is_sent = failed.was_sent
            except Refused as refused:
                raise Refused(refused.code, refused.message, in_doubt=in_doubt) from None
            in_doubt = in_doubt or (trace.is_sent and changes)
            tries += 1
            if not was_cut_short:
                reason = latest
            self.failed(endpoint, latest)
            if tries % count == 0:
                with trio.move_on_at(deadline):
                    await self.pause(tries // count)

    async def pause(self, round_number: int) -> None:
        """Waits after `round_number` rounds (from 1) in which no endpoint answered: longer each time."""
        mean_s = min(PAUSE_S * 2 ** min(round_number - 1, 10), PAUSE_MAX_S)
        await trio.sleep(mean_s * self._chance.uniform(0.5, 1.5))

    def failed(self, endpoint: int, reason: str) -> None:
        """Counts and logs a failed attempt. If `endpoint` is the one tried first, the next endpoint takes its place."""
        self._failed_attempt_count += 1
        name = self._endpoints[endpoint]
        self._last_error = f"{name}: {reason}"
        if self._first == endpoint:
            self._first = (endpoint + 1) % len(self._endpoints)
        if count := self._log_limiter.admit((name, reason), trio.current_time()):
            logger.warning("etcd.attempt_failed endpoint=%s reason=%r times=%d", name, reason, count)

    @property
    def first_endpoint(self) -> int:
        """Index in `EtcdOptions.endpoints` of the endpoint that is tried first now."""
        return self._first

    def forget_token(self) -> None:
        """Drops the token, so that the next request gets a new one."""
        self._token = ""

    async def follow(
        self, endpoint: int, path: str, request: Json, take: Callable[[bytes], bool], *, timeout_s: float
    ) -> str:
        """Streams an endless answer from one endpoint: passes its pieces, of any size, to `take` until that returns
        False.

        Returns why the stream ended; "" if `take` ended it. `take` must not raise. `timeout_s`: maximum time until
        the answer begins.
        """
        try:
            with trio.fail_after(timeout_s):
                token = await self._get_token(endpoint)
                http = await self._client()
                asked = _request(self._endpoints[endpoint] + path, encode(request), token, _Trace())
                response = await http.send(asked, stream=True)
        except trio.TooSlowError:
            return "no answer in time"
        except (*_FAILURES, _AttemptFailed, Refused) as error:
            return _reason(error)
        try:
            if response.status_code != 200:
                return f"HTTP status {response.status_code}"
            return "" if await _read(response, take) else "the answer has ended"
        except httpx.HTTPError as error:
            return _reason(error)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self.options.attempt_timeout_s):
                await response.aclose()

    async def _with_token(self, endpoint: int, path: str, body: bytes, trace: _Trace) -> bytes:
        for is_last in (False, True):
            token = await self._get_token(endpoint)
            try:
                return await self._attempt(endpoint, path, body, token, trace)
            except Refused as refused:
                trace.is_sent = False
                if is_last or not self.options.user or not wants_token(refused.message):
                    raise
                if self._token == token:
                    self.forget_token()
        raise AssertionError("unreachable")

    async def _get_token(self, endpoint: int) -> str:
        if not self.options.user or self._token:
            return self._token
        async with self._token_lock:  # checking a password costs etcd a tenth of a second
            if not self._token:
                self._token = await self._authenticate(endpoint)
            return self._token

    async def _authenticate(self, endpoint: int) -> str:
        """Returns a token; "" if authentication is not enabled in etcd."""
        password = self.options.password() if self.options.password is not None else ""
        body = encode({"name": self.options.user, "password": password})
        try:
            answer = await self._attempt(endpoint, "/v3/auth/authenticate", body, "", _Trace())
            return decode(answer, AuthenticateAnswer).token
        except Refused as refused:
            if "authentication is not enabled" not in refused.message:
                raise
            return ""
        except (_AttemptFailed, RemoteProtocolError) as error:
            raise _AttemptFailed(str(error), was_sent=False) from None

    async def _attempt(self, endpoint: int, path: str, body: bytes, token: str, trace: _Trace) -> bytes:
        http = await self._client()
        answer = bytearray()

        def take(piece: bytes) -> bool:
            answer.extend(piece)
            return len(answer) <= ANSWER_SIZE_MAX

        try:
            asked = _request(self._endpoints[endpoint] + path, body, token, trace)
            response = await http.send(asked, stream=True)
            try:
                if await _read(response, take):
                    raise _AttemptFailed(f"an answer of more than {ANSWER_SIZE_MAX} bytes", was_sent=trace.is_sent)
            finally:
                await response.aclose()
        except _FAILURES as error:
            raise _AttemptFailed(_reason(error), was_sent=trace.is_sent) from None
        if response.status_code == 200:
            return bytes(answer)
        try:
            error_answer = decode(bytes(answer), ErrorAnswer)
        except RemoteProtocolError:
            raise _AttemptFailed(f"HTTP status {response.status_code}", was_sent=trace.is_sent) from None
        message = error_answer.message or f"HTTP status {response.status_code}"
        if message.startswith(_TRY_ELSEWHERE):
            raise _AttemptFailed(message, was_sent=False)
        if error_answer.code in _REFUSED:
            raise Refused(error_answer.code, message, in_doubt=False)
        raise _AttemptFailed(message, was_sent=trace.is_sent)

    async def _client(self) -> httpx.AsyncClient:
        """Returns the HTTP client for the present TLS context."""
        if self._is_closed:
            raise _AttemptFailed("closed", was_sent=False)
        context = self.options.tls() if self.options.tls is not None else self._context
        if self._http is None or context is not self._context:
            if context is None:
                context = ssl.create_default_context()
            old, self._context = self._http, context
            self._http = httpx.AsyncClient(
                verify=context,
                timeout=None,  # every use has its own cancel scope
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=2 * len(self._endpoints)),
                trust_env=False,  # no proxy, no password from .netrc
            )
            if old is not None:
                await old.aclose()
        return self._http

    async def aclose(self) -> None:
        """Closes all connections; later calls fail."""
        self._is_closed = True
        if self._http is not None:
            await self._http.aclose()


@asynccontextmanager
async def open_etcd_client(options: EtcdOptions, chance: random.Random | None = None) -> AsyncIterator[EtcdClient]:
    """Opens a client, which connects when it is first used. `chance` randomizes pauses between retries."""
    client = EtcdClient(options, chance)
    try:
        yield client
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + options.attempt_timeout_s):
            await client.aclose()


def wants_token(message: str) -> bool:
    """Returns whether etcd refused a request because its token is missing or has expired, or users have changed
    since."""
    return any(part in message for part in _TOKEN_WANTED)


class _Body(httpx.AsyncByteStream):
    """A request's body. httpx's own is a generator, about which Trio warns if sending it is cancelled."""

    def __init__(self, body: bytes) -> None:
        self._pieces = [body]

    def __aiter__(self) -> _Body:
        return self

    async def __anext__(self) -> bytes:
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop()


def _request(url: str, body: bytes, token: str, trace: _Trace) -> httpx.Request:
    headers = {
        "Host": urlsplit(url).netloc,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Accept-Encoding": "identity",
        "Grpc-Metadata-hasleader": "true",
    }
    if token:
        headers["Authorization"] = token
    return httpx.Request("POST", url, headers=headers, stream=_Body(body), extensions={"trace": trace})


def _reason(error: BaseException) -> str:
    """Returns the message of an error. If it is empty, as httpx's is for a failed handshake, returns that of its cause;
    if all are empty, the name of the error's type."""
    said: BaseException | None = error
    while said is not None:
        if str(said):
            return str(said)
        said = said.__cause__ or said.__context__
    return type(error).__name__


async def _read(response: httpx.Response, take: Callable[[bytes], bool]) -> bool:
    """Passes each piece of the response body to `take`, until `take` returns False or the body ends. Returns True if
    `take` returned False."""
    with trio.CancelScope() as scope:
        async for piece in response.aiter_raw():
            # Ended by cancellation: Trio would warn if httpx's generators were abandoned where they yield.
            if not scope.cancel_called and not take(piece):
                scope.cancel()
    return scope.cancel_called

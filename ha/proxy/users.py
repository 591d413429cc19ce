"""A cache of the users of ACL 2.0, read from brokers as by RocketMQ's proxy: AUTH_GET_USER (3004), AUTH_GET_ACL (3009).

A user is read at its first call, and then every REFRESH_S until it has made no call for UNUSED_S. While no broker
answers, a cached user is valid for AGE_S_MAX after it was last read, and its calls are refused after that. Sources:
ClusterMetadataService, ProxyAuthenticationMetadataProvider.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

import msgspec
import trio

from ha.errors import RemoteProtocolError
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol import java_json
from ha.protocol.access_bodies import (
    ENABLE,
    NORMAL,
    AclInfo,
    SubjectRequest,
    UserConfig,
    UserInfo,
    UserRequest,
    subject_of,
)
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand

from .brokers import BrokerUnreachable

logger = logging.getLogger(__name__)

REFRESH_S = 10.0
"""Interval in seconds at which users are read again; also the time for which a name without a user is remembered."""
AGE_S_MAX = 60.0
"""Time in seconds for which a user may be used after it was last read."""
UNUSED_S = 600.0
"""Time without a call, in seconds, after which a user is forgotten."""
KNOWN_COUNT_MAX = 4_096
"""Maximum number of users; for a further one, the user that was unused for the longest time is forgotten."""
UNKNOWN_COUNT_MAX = 4_096
"""Maximum number of names without a user that are remembered; for a further one, all are forgotten."""
FIRST_READS_MAX = 16
"""Maximum number of concurrent reads that calls wait for; further calls wait for their turn."""
NAME_LENGTH_MAX = 256
"""Maximum number of characters of a user name; longer ones are not looked up."""

Ask = Callable[[RemotingCommand], Awaitable[RemotingCommand]]
"""Sends a request of the front itself to any broker, and returns the response. Raises BrokerUnreachable."""


class _Known(msgspec.Struct):
    user: UserConfig
    read_at: float
    used_at: float
    is_doubted: bool = False


class BrokerUsers:
    """A cache of users. `serve` keeps it fresh."""

    def __init__(self, ask: Ask, *, has_policies: bool) -> None:
        """`has_policies`: whether to read the users' policies as well."""
        self._ask = ask
        self._has_policies = has_policies
        self._known: dict[str, _Known] = {}
        """Known users by name, in the order of their last use"""
        self._unknown: dict[str, float] = {}
        """Name -> time until which it counts as unknown (Trio's clock)"""
        self._first_reads = trio.CapacityLimiter(FIRST_READS_MAX)
        self._log_limiter = LogRateLimiter()

    @property
    def count(self) -> int:
        """Number of users in the cache."""
        return len(self._known)

    def find(self, name: str) -> UserConfig | None:
        """Returns a user that was read within AGE_S_MAX; None if it is unknown or older."""
        known = self._known.get(name)
        if known is None or trio.current_time() - known.read_at > AGE_S_MAX:
            return None
        return known.user

    def doubt(self, name: str) -> None:
        """Marks a user that a broker has refused, so that its next call reads it from a broker again.

        The user may have been changed or deleted. After a few more refused requests, the broker would close the
        connection, which all clients share.
        """
        if (known := self._known.get(name)) is not None:
            known.is_doubted = True

    async def load(self, name: str) -> None:
        """Reads a user from a broker into the cache, unless the cached one is up to date, the user is known not to
        exist, or the name is empty or too long. Raises BrokerUnreachable."""
        if self._is_settled(name):
            return
        async with self._first_reads:
            if self._is_settled(name):  # another call has read it meanwhile
                return
            try:
                await self._read(name)
            except (BrokerUnreachable, RemoteProtocolError):
                raise BrokerUnreachable("no broker could be asked about the user") from None

    def _is_settled(self, name: str) -> bool:
        if not name or len(name) > NAME_LENGTH_MAX:
            return True
        now = trio.current_time()
        if self._unknown.get(name, now) > now:
            return True
        if self.find(name) is None or self._known[name].is_doubted:
            return False
        known = self._known[name] = self._known.pop(name)
        known.used_at = now
        return True

    async def serve(self) -> NoReturn:
        """Every REFRESH_S, reads all users again and forgets those unused for UNUSED_S, until cancelled."""
        while True:
            await trio.sleep(REFRESH_S)
            for name, known in list(self._known.items()):
                if trio.current_time() - known.used_at > UNUSED_S:
                    self._known.pop(name, None)
                    continue
                try:
                    await self._read(name)
                except RemoteProtocolError:
                    continue  # the other users may be readable
                except BrokerUnreachable:
                    break  # the next ones would take as long

    async def _read(self, name: str) -> None:
        """Reads a user from a broker into the cache; removes it if it does not exist. Raises BrokerUnreachable, and
        RemoteProtocolError if the answer can't be used."""
        try:
            user = await self._user(name)
        except (BrokerUnreachable, RemoteProtocolError) as error:
            if times := self._log_limiter.admit(("user", ""), trio.current_time()):
                logger.warning("proxy.user_unreadable user=%r reason=%r times=%d", name, str(error), times)
            raise
        now, known = trio.current_time(), self._known.get(name)
        if user is None:
            self._known.pop(name, None)
            if len(self._unknown) >= UNKNOWN_COUNT_MAX:
                self._unknown.clear()
            self._unknown[name] = now + REFRESH_S
        elif known is None:
            if len(self._known) >= KNOWN_COUNT_MAX:
                del self._known[next(iter(self._known))]
            self._known[name] = _Known(user, read_at=now, used_at=now)
        else:
            known.read_at, known.is_doubted = now, False
            if known.user != user:  # keep an equal object: the account made from it stays valid
                known.user = user

    async def _user(self, name: str) -> UserConfig | None:
        """Asks a broker for a user, with its policies if `has_policies`; returns None if it does not exist. Raises
        BrokerUnreachable, RemoteProtocolError."""
        body = await self._answer(RequestCode.AUTH_GET_USER, UserRequest(username=name).to_ext_fields())
        if not body:
            return None
        info = java_json.read_as(UserInfo, body)
        if not info.password:
            raise RemoteProtocolError("a broker answers without the password: brokerAccessKey must be a super user")
        user = UserConfig(
            username=name,
            password=info.password,
            user_type=info.user_type or NORMAL,
            user_status=info.user_status or ENABLE,
        )
        if self._has_policies and not user.is_super:
            fields = SubjectRequest(subject=subject_of(name)).to_ext_fields()
            if body := await self._answer(RequestCode.AUTH_GET_ACL, fields):
                user.policies = java_json.read_as(AclInfo, body).policies or []
        return user

    async def _answer(self, code: RequestCode, fields: dict[str, str]) -> bytes | memoryview:
        """Returns the body of a successful answer. Raises BrokerUnreachable, and RemoteProtocolError for another
        code."""
        answer = await self._ask(RemotingCommand(code, ext_fields=fields))
        if answer.code != ResponseCode.SUCCESS:
            raise RemoteProtocolError(f"a broker answers code {answer.code} to {code.name}: {answer.remark}")
        return answer.body

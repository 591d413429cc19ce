"""The users of ACL 2.0 as the front knows them: read from brokers (3004, 3009), as RocketMQ's proxy does.

A user is read when it makes its first call, and again every REFRESH_S while it makes calls. While no broker can be
asked, it is used until AGE_S_MAX after it was read last, and refused then. Sources: ClusterMetadataService,
ProxyAuthenticationMetadataProvider.
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
AGE_S_MAX = 60.0
UNUSED_S = 600.0
"""A user that makes no call for this long is forgotten."""
KNOWN_COUNT_MAX = 4_096
"""Users that are kept; then the one that has made no call for the longest time is forgotten."""
UNKNOWN_COUNT_MAX = 4_096
"""Names without a user that are kept."""
FIRST_READS_MAX = 16
"""Users that are read for the first time at once; further calls wait."""
NAME_LENGTH_MAX = 256

Ask = Callable[[RemotingCommand], Awaitable[RemotingCommand]]
"""Sends a request of the front itself to any broker, and returns the response. BrokerUnreachable."""


class _Known(msgspec.Struct):
    user: UserConfig
    read_at: float
    used_at: float
    is_doubted: bool = False


class BrokerUsers:
    """A cache of users. `serve` has to run meanwhile."""

    def __init__(self, ask: Ask, *, has_policies: bool) -> None:
        """`has_policies`: whether users' policies are read as well."""
        self._ask = ask
        self._has_policies = has_policies
        self._known: dict[str, _Known] = {}
        """Known users by name, in the order of their last use"""
        self._unknown: dict[str, float] = {}
        """Name -> time until which it counts as unknown"""
        self._first_reads = trio.CapacityLimiter(FIRST_READS_MAX)
        self._log_limiter = LogRateLimiter()

    @property
    def count(self) -> int:
        """Users in the cache."""
        return len(self._known)

    def find(self, name: str) -> UserConfig | None:
        """Returns a user that was read recently enough; None if it must not be used."""
        known = self._known.get(name)
        if known is None or trio.current_time() - known.read_at > AGE_S_MAX:
            return None
        return known.user

    def doubt(self, name: str) -> None:
        """Makes the next call of a user read it again, because a broker has refused it.

        The user may have been changed or deleted, and brokers close the connection, which all clients share, after a
        few such requests.
        """
        if (known := self._known.get(name)) is not None:
            known.is_doubted = True

    async def load(self, name: str) -> None:
        """Reads a user unless it is known, or known not to exist. BrokerUnreachable."""
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
        """Reads users that make calls again, and forgets others, until cancelled."""
        while True:
            await trio.sleep(REFRESH_S)
            for name, known in list(self._known.items()):
                if trio.current_time() - known.used_at > UNUSED_S:
                    self._known.pop(name, None)
                    continue
                try:
                    await self._read(name)
                except RemoteProtocolError:
                    continue  # brokers may answer about others
                except BrokerUnreachable:
                    break  # the next ones would take as long

    async def _read(self, name: str) -> None:
        """Reads a user from a broker. BrokerUnreachable; RemoteProtocolError if the answer can't be used."""
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
            if known.user != user:  # the account that was made from an equal one stays valid
                known.user = user

    async def _user(self, name: str) -> UserConfig | None:
        """Asks a broker for a user with its policies. BrokerUnreachable, RemoteProtocolError."""
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
        """Returns the body of a successful answer. BrokerUnreachable, RemoteProtocolError."""
        answer = await self._ask(RemotingCommand(code, ext_fields=fields))
        if answer.code != ResponseCode.SUCCESS:
            raise RemoteProtocolError(f"a broker answers code {answer.code} to {code.name}: {answer.remark}")
        return answer.body

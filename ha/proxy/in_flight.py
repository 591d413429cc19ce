"""Keeps the messages of push consumers invisible while they are handled.

A push consumer receives with auto_renew and without an invisible time. Its messages are invisible for the group's
consume timeout (consumeTimeoutMinute, by default 15 min). RENEWED_BEFORE_S before they become visible, the front renews
them: it makes them invisible for the same time again. About RENEWED_S_MAX after their receipt, it stops. The client
continues to use its first handle, so the latest one is kept here.

Messages are released, which makes them visible RELEASED_MS later, if their client has disconnected and not come back
over another connection within RETURN_S, if it has announced its end, or if it did not receive them because it cancelled
the call. If a message was not even sent to the client, this does not count as a delivery. If a client has lost the
right to receive, its messages are not renewed: it can't acknowledge them either.

RocketMQ's proxy pops for one minute and renews every few seconds, and its clients' handles are void when it restarts.
Here, a handle is valid without this table for the whole consume timeout. If a front fails together with all of its
clients, their messages stay invisible for up to that time.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec
import trio

from ha.log_rate_limiter import LogRateLimiter
from ha.poller import TIME_SLICE_S
from ha.protocol.popped import ReceiptHandle

from .brokers import BrokerUnreachable
from .messages import Code
from .refusal import CallRefused

if TYPE_CHECKING:
    from .session import Session

logger = logging.getLogger(__name__)

COUNT_MAX = 262_144
"""Maximum number of messages of all clients; further ones are neither renewed nor released early."""
CHECK_INTERVAL_S = 1.0
CHANGES_AT_ONCE = 32
"""Maximum number of concurrent requests to one broker. One at a time would not renew thousands of messages in time."""
RENEWED_BEFORE_S = 45.0
"""Time before a message becomes visible at which it is renewed, in seconds."""
RETRY_INTERVAL_S = 5.0
"""Pause after a failed attempt to renew or release a message, in seconds."""
RENEWED_S_MAX = 3 * 3600.0
"""Time after its receipt, in seconds, from which a message is no longer renewed."""
RETURN_S = 10.0
"""Time for which the messages of a disconnected client are kept for it, in seconds."""
RELEASED_MS = 1_000
"""Invisible time, in ms, that a message gets when it is released."""
SETTLED_WITHIN_S = 10.0
"""Upper bound, in seconds, of the time that it takes to acknowledge a message or to change its invisible time: two
requests to its broker."""
_FINAL = (Code.FORBIDDEN, Code.TOPIC_NOT_FOUND)
"""Codes with which any further attempt would also be refused"""


class Delay(Protocol):
    """Changes the invisible time of a message, and returns its new handle. `suspends`: the next delivery does not count
    as a retry. Raises CallRefused, BrokerUnreachable."""

    def __call__(
        self, group: str, topic: str, receipt: ReceiptHandle, invisible_ms: int, /, *, suspends: bool
    ) -> Awaitable[ReceiptHandle]: ...


MayRenew = Callable[["Session", str, str], bool]
"""Returns whether a client may currently receive from a group and topic (session, group, topic)."""


class _Message(msgspec.Struct):
    """A message in flight. Times without a unit are those of Trio's clock, in seconds."""

    group: str
    topic: str
    receipt: ReceiptHandle
    received_at: float
    visible_at: float
    """Time at which it becomes visible unless it is renewed"""
    invisible_ms: int
    """Invisible time that each renewal requests, in ms. Not taken from the latest handle: in an ordered group, the
    handle's time counts from the pop and grows with each renewal"""
    renew_at: float
    """Time of the next renewal"""
    is_undelivered: bool = False
    """Whether to release it, because it did not reach the client"""
    is_unsent: bool = False
    """Whether it was not even sent to the client, so that its next delivery does not count as a retry"""
    settled_until: float = 0.0
    """Time before which it is neither renewed nor released, because its client may have just acknowledged it or changed
    its invisible time, or because the last attempt has just failed"""
    changed: trio.Event | None = None
    """Set when the request in progress that renews or releases it has ended; None if there is none"""


class _Client(msgspec.Struct):
    """A client: its latest session, and its messages by their first handle, which is the one that the client sends."""

    session: Session
    messages: dict[str, _Message] = {}
    gone_at: float | None = None
    """Time at which its latest session ended (RETURN_S earlier if it won't come back); None while it is connected"""

    def is_gone(self, now: float) -> bool:
        """Returns whether to release the client's messages: it has been gone for RETURN_S, or won't come back."""
        if self.gone_at is None:
            return self.session.is_ended  # its last account was another one, so `gone` did not find this entry
        return now - self.gone_at >= RETURN_S


_Key = tuple[str, str]
"""Access key and client id: another account may use the same client id."""
_Due = tuple[_Key, _Client, str, _Message]
"""Key, client, first handle, and message"""


def _key(session: Session) -> _Key:
    return session.access_key, session.client_id


class InFlight:
    """The messages in flight of all clients of a front. `serve` renews and releases them."""

    def __init__(self) -> None:
        self._clients: dict[_Key, _Client] = {}
        self._count = 0
        self._busy: set[str] = set()
        """Names of brokers whose messages are being renewed or released"""
        self._log_limiter = LogRateLimiter()

    @property
    def count(self) -> int:
        """Number of messages in the table."""
        return self._count

    def add(self, session: Session, group: str, topic: str, receipt: ReceiptHandle) -> None:
        """Adds a message that is about to be sent to the client, unless there are COUNT_MAX. If the session has ended
        in the meantime, the message is released."""
        if (message := self._add(session, group, topic, receipt)) is not None:
            message.is_undelivered = session.is_ended
        self.returned(session)

    def _add(self, session: Session, group: str, topic: str, receipt: ReceiptHandle) -> _Message | None:
        if self._count >= COUNT_MAX:
            return None
        client = self._clients.setdefault(_key(session), _Client(session))
        now = trio.current_time()
        invisible_ms = receipt.handle.invisible_ms
        visible_at = now + invisible_ms / 1000
        handle = receipt.encode()
        self._count += handle not in client.messages
        renew_at = visible_at - RENEWED_BEFORE_S
        message = _Message(group, topic, receipt, now, visible_at, invisible_ms, renew_at)
        client.messages[handle] = message
        return message

    def find(self, session: Session, handle: str) -> ReceiptHandle | None:
        """Returns the latest handle of the message with the first handle `handle`; None if it is not in the table.

        Called for a request that acknowledges the message or changes its invisible time: the message is then not
        renewed or released for SETTLED_WITHIN_S, because some brokers deliver a message again if its invisible time is
        changed after its acknowledgement."""
        message = self._message(session, handle)
        if message is None:
            return None
        message.settled_until = trio.current_time() + SETTLED_WITHIN_S
        return message.receipt

    def is_changing(self, session: Session, handle: str) -> bool:
        """Returns whether a message is being renewed or released, so that its latest handle is not known yet."""
        message = self._message(session, handle)
        return message is not None and message.changed is not None

    async def wait_unchanged(self, session: Session, handle: str) -> None:
        """Waits until the message is neither being renewed nor released; returns at once if it is not in the table."""
        while (message := self._message(session, handle)) is not None and message.changed is not None:
            await message.changed.wait()

    def _message(self, session: Session, handle: str) -> _Message | None:
        client = self._clients.get(_key(session))
        return None if client is None else client.messages.get(handle)

    def remove(self, session: Session, handle: str) -> None:
        """Removes a message that was acknowledged or forwarded to the dead letters, or whose invisible time the client
        has changed. Does nothing if it is not in the table."""
        client = self._clients.get(_key(session))
        if client is not None and client.messages.pop(handle, None) is not None:
            self._count -= 1
            if not client.messages:
                del self._clients[_key(session)]

    def returned(self, session: Session) -> None:
        """Keeps the messages of a client that has connected again, unless `session` has ended in the meantime."""
        client = self._clients.get(_key(session))
        if client is not None and not session.is_ended:
            client.session, client.gone_at = session, None

    def gone(self, session: Session, *, may_return: bool) -> None:
        """Releases the messages of a client whose latest session, `session`, has ended: at the next check or, with
        `may_return`, after RETURN_S. Does nothing if the client has a later session."""
        client = self._clients.get(_key(session))
        if client is not None and client.session is session:
            client.gone_at = trio.current_time() - (0 if may_return else RETURN_S)

    def release(self, session: Session, receipts: Iterable[ReceiptHandle]) -> None:
        """Releases messages that were added but did not reach their client, or only in part. Ignores those not in the
        table."""
        client = self._clients.get(_key(session))
        for receipt in receipts:
            if client is not None and (message := client.messages.get(receipt.encode())) is not None:
                message.is_undelivered = True

    def abandon(self, session: Session, group: str, topic: str, receipts: Iterable[ReceiptHandle]) -> None:
        """Adds messages whose call ended before they were sent, marked so that they are soon released."""
        for receipt in receipts:
            if (message := self._add(session, group, topic, receipt)) is not None:
                message.is_undelivered = message.is_unsent = True

    async def serve(self, delay: Delay, may_renew: MayRenew) -> NoReturn:
        """Renews and releases messages until cancelled. A broker that does not answer delays only its own messages."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(CHECK_INTERVAL_S)
                for broker_name, due in (await self._due()).items():
                    self._busy.add(broker_name)
                    nursery.start_soon(self._change_all, broker_name, due, delay, may_renew)
        raise AssertionError("ends by cancellation only")

    async def _due(self) -> dict[str, list[_Due]]:
        """Returns the messages to renew, release or drop, by broker, except those of busy brokers. Lets other tasks run
        after each time slice, because 100,000 messages take 40 ms."""
        found: dict[str, list[_Due]] = {}
        now, slice_ends = trio.current_time(), perf_counter() + TIME_SLICE_S
        for key, client in list(self._clients.items()):
            for handle, message in list(client.messages.items()):
                if perf_counter() >= slice_ends:
                    await trio.lowlevel.checkpoint()
                    slice_ends = perf_counter() + TIME_SLICE_S
                if message.is_undelivered or client.is_gone(now) or now >= message.renew_at:
                    broker_name = message.receipt.handle.broker_name
                    if broker_name not in self._busy and now >= message.settled_until:
                        found.setdefault(broker_name, []).append((key, client, handle, message))
        return found

    async def _change_all(self, broker_name: str, due: list[_Due], delay: Delay, may_renew: MayRenew) -> None:
        """Renews, releases or drops messages of one broker, CHANGES_AT_ONCE at a time."""
        left = iter(due)
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(min(CHANGES_AT_ONCE, len(due))):
                    nursery.start_soon(self._change_each, left, delay, may_renew)
        finally:
            self._busy.remove(broker_name)

    async def _change_each(self, left: Iterator[_Due], delay: Delay, may_renew: MayRenew) -> None:
        """Renews, releases or drops messages, one after the other. A failed renewal or release is tried again until the
        message is visible."""
        for key, client, handle, message in left:
            await trio.lowlevel.checkpoint()  # many may have to be dropped, without a request
            now = trio.current_time()
            if client.messages.get(handle) is not message or now < message.settled_until:
                continue  # settled meanwhile, or about to be
            if message.is_undelivered or client.is_gone(now):
                is_released = await self._change(delay, message, RELEASED_MS, suspends=message.is_unsent)
                if is_released or now >= message.visible_at:
                    self._drop(key, client, handle, message)
            elif now >= message.renew_at:
                is_over = now - message.received_at >= RENEWED_S_MAX or now >= message.visible_at
                if is_over or not may_renew(client.session, message.group, message.topic):
                    self._drop(key, client, handle, message)
                else:
                    await self._change(delay, message, message.invisible_ms, suspends=False)

    async def _change(self, delay: Delay, message: _Message, invisible_ms: int, *, suspends: bool) -> bool:
        """Changes the invisible time of a message; returns whether the broker has done so, or never will.

        A broker that has not answered may have done so, too. In this case a RocketMQ broker may deliver the message
        again for each further attempt.
        """
        began, group, topic = trio.current_time(), message.group, message.topic
        message.changed = trio.Event()
        try:
            message.receipt = await delay(group, topic, message.receipt, invisible_ms, suspends=suspends)
        except (BrokerUnreachable, CallRefused) as error:
            now = trio.current_time()
            if times := self._log_limiter.admit((group, topic), now):
                text = "proxy.renewal_failed group=%r topic=%r reason=%r times=%d"
                logger.info(text, group, topic, str(error), times)
            message.settled_until = now + RETRY_INTERVAL_S
            return isinstance(error, CallRefused) and error.code in _FINAL
        else:
            message.visible_at = began + invisible_ms / 1000
            message.renew_at = message.visible_at - RENEWED_BEFORE_S
            return True
        finally:
            message.changed.set()
            message.changed = None

    def _drop(self, key: _Key, client: _Client, handle: str, message: _Message) -> None:
        if client.messages.get(handle) is message:  # not a later one with the same handle
            del client.messages[handle]
            self._count -= 1
        if not client.messages and self._clients.get(key) is client:
            del self._clients[key]

"""A message that a SimpleConsumer received. No other member of the group receives it until it is given back or its
invisible time ends."""

from __future__ import annotations

from enum import Enum

import anyio

from ha.client.messages import MessageQueue, ReceivedMessage
from ha.client.pop_requests import PopRequests
from ha.errors import BrokerError, ConnectionFailed, ReceiptExpired
from ha.protocol.popped import ReceiptHandle

INVISIBLE_S_MAX = 1e9
"""Longest invisible time in seconds: about 30 years. Longer times would not fit into brokers' timestamps."""


class LeaseState(Enum):
    """State of a popped message."""

    HELD = "held"
    ACKNOWLEDGED = "acknowledged"
    RETURNED = "returned"
    """The consumer has given it back to be delivered again."""


class Lease:
    """A consumer's exclusive right to handle one message, until `expires_at` on the event loop's clock.

    The async methods raise ReceiptExpired, BrokerError, RequestTimedOut, ConnectionFailed, RouteNotFound,
    RemoteProtocolError."""

    def __init__(self, requests: PopRequests, source: MessageQueue, receipt: ReceiptHandle, message_id: str) -> None:
        """Starts the lease now, which is a little later than on the broker: a lease that has expired here has expired
        there, too."""
        self._requests = requests
        self._source = source
        self._receipt = receipt
        self._message_id = message_id
        self._state = LeaseState.HELD
        self._settling = anyio.Lock(fast_acquire=True)
        """Serializes the requests about the message: brokers ignore an acknowledgement whose handle another request has
        replaced."""
        now, invisible_s = anyio.current_time(), receipt.handle.invisible_ms / 1000
        self.expires_at = now + invisible_s
        self.half_over_at = now + invisible_s / 2
        """Time at which half of the first invisible time has passed, on the event loop's clock."""

    @property
    def is_expired(self) -> bool:
        """Whether the invisible time has ended: unless the message was acknowledged, other members can receive it."""
        return anyio.current_time() >= self.expires_at

    async def ack(self) -> None:
        """Acknowledges the message. No effect if it is acknowledged already."""
        async with self._settling:
            if self._state is LeaseState.ACKNOWLEDGED:
                return
            self._check()
            await self._requests.ack(self._source, self._receipt)
            self._state = LeaseState.ACKNOWLEDGED

    async def extend(self, invisible_s: float) -> None:
        """Keeps the message for `invisible_s` from now. Raises ValueError for an invalid time.

        If this is cancelled, or the response is lost, the broker may have replaced the handle by one that this lease
        doesn't know: later requests then have no effect."""
        async with self._settling:
            self._check_change(invisible_s)
            self._receipt = await self._change(invisible_s)
            self.expires_at = anyio.current_time() + invisible_s

    async def give_back(self, delay_s: float, *, counts: bool = True) -> None:
        """Makes the message visible after `delay_s`. `counts`: its next delivery counts as a retry. Raises ValueError
        for an invalid time.

        If this is cancelled, or fails although the broker may have executed the request, the message counts as given
        back: it is delivered again in any case, either after `delay_s` or when its invisible time ends."""
        async with self._settling:
            self._check_change(delay_s)
            self._state = LeaseState.RETURNED
            try:
                await self._change(delay_s, suspends=not counts)
            except (BrokerError, ConnectionFailed) as error:
                if not error.was_sent:
                    self._state = LeaseState.HELD
                raise

    def _check_change(self, invisible_s: float) -> None:
        if not 0 <= invisible_s <= INVISIBLE_S_MAX:
            raise ValueError(f"{invisible_s} s; accepted: 0 … {INVISIBLE_S_MAX:g}")
        self._check()

    async def _change(self, invisible_s: float, *, suspends: bool = False) -> ReceiptHandle:
        return await self._requests.change(self._source, self._receipt, int(invisible_s * 1000), suspends=suspends)

    def _check(self) -> None:
        if self._state is LeaseState.ACKNOWLEDGED:
            raise ReceiptExpired(self._message_id, "it is acknowledged")
        if self._state is LeaseState.RETURNED:
            raise ReceiptExpired(self._message_id, "it was given back and is delivered again")
        late_s = anyio.current_time() - self.expires_at
        if late_s >= 0:
            raise ReceiptExpired(
                self._message_id,
                f"its invisible time ended {late_s:.1f} s ago, so it is delivered again; "
                "receive with a longer invisible_s, or call change_invisible_time in time",
            )


class PoppedMessage(ReceivedMessage):
    """A message received by a SimpleConsumer. Call `ack` or `nack` before its invisible time is over; otherwise it is
    delivered again.

    A copy made by pickle or `copy.replace` is a plain ReceivedMessage."""

    __slots__ = ("lease",)

    lease: Lease
    """The consumer's lease on the message; not for programs."""

    async def ack(self) -> None:
        """Acknowledges the message: it is not delivered again.

        No effect if it is acknowledged already. Raises ReceiptExpired if it will be delivered again because its
        invisible time is over or `nack` was called, and BrokerError, RequestTimedOut, ConnectionFailed,
        RemoteProtocolError."""
        await self.lease.ack()

    async def nack(self, delay_s: float = 0.0) -> None:
        """Gives the message back: it is delivered again after `delay_s`, with `reconsume_times` one higher.

        Raises the errors of `ack`, ReceiptExpired if the message is already acknowledged, and ValueError for a delay
        that is negative or above 1e9 s. After RequestTimedOut, RemoteProtocolError, ConnectionFailed with `was_sent`,
        or a cancellation, the broker may or may not have executed the request. The message then counts as given back:
        it is delivered again after `delay_s` or when its invisible time ends, and further calls raise
        ReceiptExpired."""
        await self.lease.give_back(delay_s)


def popped_message(message: ReceivedMessage, lease: Lease) -> PoppedMessage:
    """Returns a copy of `message` that can be acknowledged, through `lease`."""
    values = (getattr(message, "stored_body" if name == "body" else name) for name in message.__match_args__)
    popped = PoppedMessage(*values)
    _set_lease(popped, lease)
    return popped


_set_lease = vars(PoppedMessage)["lease"].__set__  # bypasses the immutable `__setattr__`

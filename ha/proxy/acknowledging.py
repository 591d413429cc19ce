"""Settles received messages: AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue.

Sources: AckMessageActivity, ChangeInvisibleDurationActivity, ForwardMessageToDLQActivity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from ha.errors import RemoteProtocolError
from ha.grpc import Call
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import SendBackRequest
from ha.protocol.pop import Handle
from ha.protocol.popped import ReceiptHandle, parse_receipt
from ha.protocol.remoting import RemotingCommand

from .brokers import Brokers, BrokerUnreachable, reading_answer
from .in_flight import InFlight
from .messages import CLASSES, Code, make, milliseconds
from .names import group_name, topic_name
from .options import FrontOptions
from .refusal import CallRefused, check, code_of, reason_of
from .status import ok, ok_status, set_status_by_entries

if TYPE_CHECKING:
    from .session import Session

TO_DEAD_LETTERS = -1
"""delayLevel of CONSUMER_SEND_MSG_BACK (36) that makes the message a dead letter."""
ENTRY_COUNT_MAX = 1024
"""Maximum number of entries of one AckMessage."""


class Acknowledging:
    """Acknowledges messages, and changes when they become visible again."""

    def __init__(
        self, brokers: Brokers, options: FrontOptions, wall_clock_ms: Callable[[], int], in_flight: InFlight
    ) -> None:
        self._brokers = brokers
        self._options = options
        self._wall_clock_ms = wall_clock_ms
        self._in_flight = in_flight
        self._clocks_ahead_ms: dict[str, int] = {}
        """Broker name -> time by which its clock is ahead of the front's, in ms"""

    def set_broker_clock(self, broker_name: str, now_ms: int) -> None:
        """Sets a broker's current time, in ms since the epoch. Its handles expire by its own clock, or by the front's
        until this is called. If `now_ms` is too low, they are accepted for longer, and the broker ignores those whose
        message is no longer in flight."""
        self._clocks_ahead_ms[broker_name] = now_ms - self._wall_clock_ms()

    def take(self, session: Session, call: Call) -> bool:
        """Serves an AckMessage with one entry if that needs no waiting; returns whether it did.

        The call is answered when the broker responds, or when it is known that there will be no response.
        """
        try:
            request = CLASSES["AckMessageRequest"].FromString(call.message)
            if len(request.entries) != 1:
                return False
            [entry] = request.entries
            group, topic = group_name(request.group), topic_name(request.topic)
            if self._in_flight.is_changing(session, entry.receipt_handle):
                return False
            receipt = self._valid(session, entry.receipt_handle)
        except (DecodeError, CallRefused):  # answered by `ack`
            return False

        def answer(response: RemotingCommand | None) -> None:
            result = CLASSES["AckMessageResponse"]()
            if response is None:
                _add_entry(result, entry, Code.INTERNAL_SERVER_ERROR, "the broker is stopping")
            elif response.code != ResponseCode.SUCCESS:
                _add_entry(result, entry, code_of(response), reason_of(response))
            else:
                self._in_flight.remove(session, entry.receipt_handle)
                _add_entry(result, entry, Code.OK, "OK")
            set_status_by_entries(result)
            call.respond(result.SerializeToString())

        command = _ack_command(group, topic, receipt)
        return self._brokers.invoke_nowait(session, receipt.handle.broker_name, command, answer)

    async def ack(self, session: Session, request: Any) -> Any:
        """AckMessage: each entry of the response has its own status. Raises CallRefused if the whole call is
        invalid."""
        group, topic = group_name(request.group), topic_name(request.topic)
        if not 0 < len(request.entries) <= ENTRY_COUNT_MAX:
            raise CallRefused(Code.BAD_REQUEST, f"{len(request.entries)} entries; 1 to {ENTRY_COUNT_MAX} are accepted")
        response = CLASSES["AckMessageResponse"]()
        for entry in request.entries:
            code, message = Code.OK, "OK"
            try:
                receipt = await self._current(session, entry.receipt_handle)
                await self.acknowledge(session, group, topic, receipt)
                self._in_flight.remove(session, entry.receipt_handle)
            except CallRefused as refused:
                code, message = refused.code, refused.message
            except BrokerUnreachable as error:
                code, message = Code.INTERNAL_SERVER_ERROR, str(error)
            _add_entry(response, entry, code, message)
        set_status_by_entries(response)
        return response

    async def change(self, session: Session, request: Any) -> Any:
        """ChangeInvisibleDuration: sets the invisible time, counted from now; the response has the new handle. Raises
        CallRefused, BrokerUnreachable."""
        group, topic = group_name(request.group), topic_name(request.topic)
        receipt = await self._current(session, request.receipt_handle)
        invisible_ms = milliseconds(request.invisible_duration)
        if not 0 <= invisible_ms <= self._options.invisible_ms_max:
            reason = f"the invisibleTime {invisible_ms} ms is not in 0 to {self._options.invisible_ms_max}"
            raise CallRefused(Code.ILLEGAL_INVISIBLE_TIME, reason)
        changed = await self.delay(session, group, topic, receipt, invisible_ms, suspends=request.suspend)
        self._in_flight.remove(session, request.receipt_handle)
        return make(
            "ChangeInvisibleDurationResponse",
            status=ok_status(),
            receipt_handle=changed.encode(),
        )

    async def forward(self, session: Session, request: Any) -> Any:
        """ForwardMessageToDeadLetterQueue: moves a message to the dead-letter topic of its group. Raises CallRefused,
        BrokerUnreachable."""
        group, topic = group_name(request.group), topic_name(request.topic)
        receipt = await self._current(session, request.receipt_handle)
        await self.bury(session, group, topic, receipt)
        self._in_flight.remove(session, request.receipt_handle)
        return ok("ForwardMessageToDeadLetterQueueResponse")

    async def _current(self, session: Session, text: str) -> ReceiptHandle:
        """Waits while the message is being renewed or released, then returns its latest handle. Raises CallRefused like
        `_valid`."""
        await self._in_flight.wait_unchanged(session, text)
        return self._valid(session, text)

    def _valid(self, session: Session, text: str) -> ReceiptHandle:
        """Returns the latest handle of the message for which a request has the handle `text`. Raises CallRefused if
        `text` is malformed, or has expired without having been renewed here."""
        current = self._in_flight.find(session, text)
        if current is not None:
            return current
        try:
            receipt = parse_receipt(text)
        except RemoteProtocolError as error:
            raise CallRefused(Code.INTERNAL_SERVER_ERROR, str(error)) from None
        if receipt.expires_ms <= self._wall_clock_ms() + self._clocks_ahead_ms.get(receipt.handle.broker_name, 0):
            raise CallRefused(Code.INVALID_RECEIPT_HANDLE, "receipt handle is expired")
        return receipt

    # ---- requests to brokers

    async def acknowledge(self, session: Session | None, group: str, topic: str, receipt: ReceiptHandle) -> None:
        """Acknowledges one message: ACK_MESSAGE (200051). Raises CallRefused, BrokerUnreachable."""
        await self._invoke(session, receipt.handle, _ack_command(group, topic, receipt))

    async def delay(
        self,
        session: Session | None,
        group: str,
        topic: str,
        receipt: ReceiptHandle,
        invisible_ms: int,
        *,
        suspends: bool,
    ) -> ReceiptHandle:
        """Makes a message visible again `invisible_ms` from now: CHANGE_MESSAGE_INVISIBLETIME (200053). Returns its
        new handle. `suspends`: the next delivery does not count as a retry. Raises CallRefused, BrokerUnreachable."""
        fields = receipt.change_request(group, topic, invisible_ms, suspends=suspends).to_ext_fields()
        command = RemotingCommand(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext_fields=fields)
        response = await self._invoke(session, receipt.handle, command)
        with reading_answer():
            return receipt.changed(response)

    async def bury(self, session: Session | None, group: str, topic: str, receipt: ReceiptHandle) -> None:
        """Copies a message to the dead-letter topic of its group, CONSUMER_SEND_MSG_BACK (36), and then acknowledges
        it. Raises CallRefused, BrokerUnreachable. If the acknowledgement fails or the call is cancelled, the message
        may become a dead letter and also be delivered again."""
        if receipt.physical_offset < 0:
            raise CallRefused(Code.INVALID_RECEIPT_HANDLE, "receipt handle without the offset in the log")
        header = SendBackRequest(
            offset=receipt.physical_offset,
            group=group,
            delay_level=TO_DEAD_LETTERS,
            origin_topic=receipt.real_topic(group, topic),
            max_reconsume_times=0,
        )
        command = RemotingCommand(RequestCode.CONSUMER_SEND_MSG_BACK, ext_fields=header.to_ext_fields())
        await self._invoke(session, receipt.handle, command)
        await self.acknowledge(session, group, topic, receipt)

    async def _invoke(self, session: Session | None, handle: Handle, command: RemotingCommand) -> RemotingCommand:
        return check(await self._brokers.invoke(session, handle.broker_name, command))


def _ack_command(group: str, topic: str, receipt: ReceiptHandle) -> RemotingCommand:
    """Returns the request that acknowledges one message, ACK_MESSAGE (200051)."""
    return RemotingCommand(RequestCode.ACK_MESSAGE, ext_fields=receipt.ack_request(group, topic).to_ext_fields())


def _add_entry(response: Any, entry: Any, code: Code, message: str) -> None:
    """Adds the result of an entry of the request."""
    result = response.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle)
    result.status.code, result.status.message = code, message

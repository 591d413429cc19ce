"""The messages of an application as types, and as JSON that is checked when read."""

import msgspec

from ha.client import Message, ReceivedMessage

TOPIC = "order-events"


class Order(msgspec.Struct, frozen=True, tag="order"):
    """A customer has ordered something."""

    order_id: int
    customer: str
    amount_cents: int


class Cancellation(msgspec.Struct, frozen=True, tag="cancellation"):
    """A customer has cancelled an order."""

    order_id: int


Event = Order | Cancellation

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def to_message(event: Event, topic: str = TOPIC) -> Message:
    """Returns a message with a tag to filter by, and a key to find it by."""
    return Message(
        topic,
        _encoder.encode(event),
        tags=type(event).__name__,
        keys=f"order-{event.order_id}",
    )


def from_message(message: ReceivedMessage) -> Event:
    """Returns the event in a message. msgspec.DecodeError if it isn't one."""
    event: Event = _decoder.decode(message.body)
    return event


def describe(event: Event) -> str:
    """Returns a line for people."""
    match event:
        case Order(order_id, customer, amount_cents):
            return f"{customer} ordered {order_id} for {amount_cents / 100:.2f} EUR"
        case Cancellation(order_id):
            return f"{order_id} is cancelled"

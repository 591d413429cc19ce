"""An HTTP/2 client of another make (h2), against an `Http2Protocol` in memory."""

from __future__ import annotations

from struct import pack
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

from ha.grpc.http2 import Http2Limits, Http2Protocol
from ha.grpc.stream import Ended, Received

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/s/Unary"),
    (":authority", "IPAuthority"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def framed(message: bytes) -> bytes:
    """A gRPC message."""
    return pack(">BL", 0, len(message)) + message


class Pair:
    """A client and the protocol under test. Everything the protocol receives is in `received`."""

    def __init__(self, limits: Http2Limits | None = None, *, piece_size: int = 1 << 20) -> None:
        self.protocol = Http2Protocol(limits or Http2Limits(), lambda path: path.endswith(b"Streaming"))
        self.client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.client.initiate_connection()
        self.received: list[Any] = []
        self.events: list[Event] = []
        self._piece_size = piece_size
        self.move()

    def move(self) -> None:
        """Passes bytes both ways until there are none."""
        while True:
            sent = self.client.data_to_send()
            for start in range(0, len(sent), self._piece_size):
                self.received += self.protocol.receive(sent[start : start + self._piece_size])
            answered = self.protocol.data_to_send()
            if answered:
                events = self.client.receive_data(answered)
                self.events += events
                for event in events:
                    if isinstance(event, DataReceived) and event.flow_controlled_length:
                        self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if not sent and not answered:
                return

    def call(self, message: bytes | None = b"hello", *, path: str = "/s/Unary", end: bool = True) -> int:
        """Sends a call; returns its stream id."""
        stream_id = self.client.get_next_available_stream_id()
        headers = [(name, path if name == ":path" else value) for name, value in HEADERS]
        self.client.send_headers(stream_id, headers, end_stream=message is None and end)
        if message is not None:
            self.send(stream_id, framed(message), end=end)
        self.move()
        return stream_id

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Sends data in frames, as far as the windows allow."""
        while data:
            size = min(len(data), self.client.local_flow_control_window(stream_id), 16_384)
            self.client.send_data(stream_id, data[:size], end_stream=end and size == len(data))
            data = data[size:]
            self.move()

    def messages(self) -> list[bytes]:
        """What the service would see."""
        return [event.message for event in self.received if isinstance(event, Received)]

    def ended(self) -> int:
        """Number of streaming calls whose last message was received."""
        return sum(isinstance(event, Ended) for event in self.received)

    def answer(self, stream_id: int) -> tuple[bytes, dict[str, str], bool]:
        """What the client has received of a call: data, headers and trailers together, and whether it ended."""
        data, headers, is_ended = b"", {}, False
        for event in self.events:
            if getattr(event, "stream_id", None) != stream_id:
                continue
            if isinstance(event, DataReceived):
                data += event.data
            elif isinstance(event, ResponseReceived | TrailersReceived):
                headers.update({str(name): str(value) for name, value in event.headers})
            elif isinstance(event, StreamEnded):
                is_ended = True
        return data, headers, is_ended

    def resets(self) -> dict[int, int]:
        """Error codes of streams that the protocol has reset."""
        return {event.stream_id: int(event.error_code) for event in self.events if isinstance(event, StreamReset)}

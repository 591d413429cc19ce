"""Requests in a form that survives mutation, and a connection that carries them to a server.

    code int16 | marks byte: 1 ROCKETMQ header, 2 oneway, 4 old client, 8 signed | fields, see remoting.py | 1D | body

repeated, separated by FF FE 0A. All of an input's requests go out in one chunk, or, where a pause stands for one, in
two.
"""

from typing import Any

import trio

from ha.errors import LocalProtocolError
from ha.protocol.acl import AclCredentials
from ha.protocol.codes import LanguageCode
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand, RemotingParser, encode_command
from tests.fuzz.remoting import fields_of, to_fields

BODY = b"\x1d"
NEXT = b"\xff\xfe\n"
PAUSE = b"\xff\xfd\n"
REQUEST_COUNT_MAX = 24


def to_bytes(code: int, fields: dict[str, Any], body: bytes = b"", marks: int = 0) -> bytes:
    """One request in that form."""
    return code.to_bytes(2, "big") + bytes([marks]) + to_fields(fields) + BODY + body


def decode(data: bytes, credentials: AclCredentials | None = None) -> list[list[RemotingCommand]]:
    """The chunks of requests in an input; opaques are given in order. `credentials` sign those that are marked."""
    chunks: list[list[RemotingCommand]] = []
    opaque = 0
    for part in data.split(PAUSE)[:3]:
        chunk = []
        for text in part.split(NEXT):
            if len(text) < 3 or opaque >= REQUEST_COUNT_MAX:
                continue
            opaque += 1
            fields, _, body = text[3:].partition(BODY)
            marks = text[2]
            command = RemotingCommand(
                int.from_bytes(text[:2], "big", signed=True),
                opaque,
                FLAG_ONEWAY if marks & 2 else 0,
                LanguageCode.JAVA,
                200 if marks & 4 else 479,
                ext_fields=fields_of(fields),
                body=body,
                serialize_type=marks & 1,
            )
            if credentials is not None and marks & 8:
                credentials.sign(command)
            chunk.append(command)
        chunks.append(chunk)
    return chunks


class Client:
    """The peer of a server's connection: sends chunks and gathers what comes back."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.answers: dict[int, RemotingCommand] = {}
        self.is_closed = False

    async def receive(self) -> None:
        """Receive until the end of the stream. AssertionError for a second answer to a request."""
        parser = RemotingParser()
        try:
            while chunk := await self.stream.receive_some(65536):
                for command in parser.feed(bytes(chunk)):
                    if command.is_response:
                        assert command.opaque not in self.answers, command
                        self.answers[command.opaque] = command
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.is_closed = True

    async def send(self, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        """Send a chunk; return those of its requests that are to be answered."""
        frames, asked = [], []
        for command in commands:
            try:
                frames.append(encode_command(command))
            except LocalProtocolError:
                continue  # a code or a name that no header holds
            if not command.is_oneway:
                asked.append(command)
        if frames:
            await self.stream.send_all(b"".join(frames))
        return asked

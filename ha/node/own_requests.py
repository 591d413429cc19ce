"""Sends requests to the node's own broker without a socket, for the gRPC port and the dashboard."""

from __future__ import annotations

import trio

from ha.broker.processor import Processor
from ha.protocol.remoting import RemotingCommand
from ha.remoting.local import LocalConnection


async def ask_own_broker(
    processor: Processor, connection: LocalConnection, command: RemotingCommand, timeout_s: float
) -> RemotingCommand | None:
    """Returns the broker's response to a request whose permissions the caller has checked.

    None if the connection has ended. Raises trio.TooSlowError after `timeout_s` seconds. After that, or if the call is
    cancelled, the broker may still execute the request.
    """
    done = trio.Event()
    answers: list[RemotingCommand | None] = []

    def on_response(response: RemotingCommand | None) -> None:
        answers.append(response)
        done.set()

    connection.expect(command, on_response)
    try:
        with trio.fail_after(timeout_s):
            waiting = processor.take_admitted(connection, [command])
            if waiting:
                await processor.handle(connection, waiting)
            await done.wait()
    finally:
        connection.forget(command)
    [answer] = answers
    return answer

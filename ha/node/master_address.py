"""The remoting address of a slave's master, and a request to it."""

from __future__ import annotations

import msgspec
import trio

from ha.broker.registration import MasterAddresses
from ha.config import is_loopback
from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient

ASK_TIMEOUT_S = 3.0


def split(address: str) -> tuple[str, str]:
    """Splits an address into host and port, as text."""
    host, _, port = address.rpartition(":")
    return host, port


def master_broker_address(reported: MasterAddresses | None, ha_address: str | None) -> str | None:
    """Returns the address of the master's remoting port; None until a name server has reported it.

    A master that reports a loopback address to clients (brokerIP1, for example behind a container's published port) is
    not reachable there from another machine. Its remoting and HA ports listen on the same addresses, so the HA host is
    used instead. RocketMQ's slaves use the loopback address and fail.
    """
    if reported is None:
        return None
    host, port = split(reported.master_address)
    ha_host, _ = split(ha_address or reported.ha_address)
    return f"{ha_host}:{port}" if is_loopback(host) and not is_loopback(ha_host) else reported.master_address


class _RuntimeInfo(msgspec.Struct):
    table: dict[str, str] = {}


async def ask_min_offset(client: RemotingClient, address: str | None) -> int | None:
    """Asks a RocketMQ master (request 28) for its minimum physical offset; None if that fails."""
    if address is None:
        return None
    try:
        answer = await client.invoke(address, RemotingCommand(RequestCode.GET_BROKER_RUNTIME_INFO), ASK_TIMEOUT_S)
        if answer.code != ResponseCode.SUCCESS:
            return None
        first = int(java_json.read_as(_RuntimeInfo, answer.body).table["commitLogMinOffset"])
    except (OSError, trio.BrokenResourceError, trio.TooSlowError, RemoteProtocolError, KeyError, ValueError):
        return None
    return first if first >= 0 else None

"""Determines the remoting address of a slave's master, and asks servers for what they report about themselves."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from ha.broker.registration import MasterAddresses
from ha.config import is_loopback
from ha.errors import RemoteProtocolError
from ha.protocol.bodies import KVTable
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.java_json import read_as
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient

ASK_TIMEOUT_S = 3.0


def split(address: str) -> tuple[str, str]:
    """Splits an address into host and port, as text."""
    host, _, port = address.rpartition(":")
    return host, port


def master_broker_address(reported: MasterAddresses | None, ha_address: str | None) -> str | None:
    """Returns the address of the master's remoting port; None while nothing is `reported`. `ha_address`: address of the
    master's HA port; if None, the reported one.

    A master that reports a loopback address to clients (brokerIP1, for example behind a container's published port) is
    not reachable there from another machine. Its remoting and HA ports listen on the same addresses, so the HA host is
    used instead. RocketMQ's slaves use the loopback address and fail.
    """
    if reported is None:
        return None
    host, port = split(reported.master_address)
    ha_host, _ = split(ha_address or reported.ha_address)
    return f"{ha_host}:{port}" if is_loopback(host) and not is_loopback(ha_host) else reported.master_address


async def ask(client: RemotingClient, address: str, code: RequestCode) -> bytes | None:
    """Sends a request without fields, and returns the body of a successful response; None after any failure."""
    try:
        answer = await client.invoke(address, RemotingCommand(code), ASK_TIMEOUT_S)
    except (OSError, trio.BrokenResourceError, trio.TooSlowError, RemoteProtocolError):
        return None
    return bytes(answer.body) if answer.code == ResponseCode.SUCCESS else None


async def ask_runtime_info(client: RemotingClient, address: str) -> Mapping[str, str]:
    """Asks a broker for its runtime statistics (GET_BROKER_RUNTIME_INFO, 28); empty if that fails."""
    try:
        return read_as(KVTable, await ask(client, address, RequestCode.GET_BROKER_RUNTIME_INFO) or b"").table
    except RemoteProtocolError:
        return {}


async def ask_min_offset(client: RemotingClient, address: str | None) -> int | None:
    """Asks the master at `address` for its minimum physical offset. Returns None if that fails, if the master has none,
    or if `address` is None."""
    if address is None:
        return None
    try:
        first = int((await ask_runtime_info(client, address))["commitLogMinOffset"])
    except (KeyError, ValueError):
        return None
    return first if first >= 0 else None

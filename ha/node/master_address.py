"""Where a slave's master is, beyond its HA port, and what it can be asked there."""

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
    """Take host and port apart, as text."""
    host, _, port = address.rpartition(":")
    return host, port


def master_broker_address(told: MasterAddresses | None, ha_address: str | None) -> str | None:
    """Return where the master answers requests; None while no name server has told.

    A master that tells its clients a loopback address (brokerIP1, say behind the published port of a container) can't
    be reached there from another machine. It listens for requests and for slaves on the same addresses, so then its HA
    host is taken. RocketMQ's slaves ask the loopback address in vain.
    """
    if told is None:
        return None
    host, port = split(told.master_address)
    ha_host, _ = split(ha_address or told.ha_address)
    return f"{ha_host}:{port}" if is_loopback(host) and not is_loopback(ha_host) else told.master_address


class _RuntimeInfo(msgspec.Struct):
    table: dict[str, str] = {}


async def ask_min_offset(client: RemotingClient, address: str | None) -> int | None:
    """Ask a RocketMQ master (request 28) for the first physical offset that it holds; None if it can't be learnt."""
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

"""Collects the facts that `ha doctor` checks: reachable ports, and the state and configuration of brokers.

Read-only. Each request has a timeout; an unresponsive broker costs one of them.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial

import anyio
import msgspec

from ha.cli.admin_pages import NodeStatus, Page, difference, fetch_pages
from ha.cli.unreachable import reason_of_os
from ha.client import Client, ClientOptions
from ha.client.options import split_address
from ha.errors import BrokerError, ClientError, HalogError, RemoteProtocolError
from ha.protocol.bodies import ClusterInfo, HARuntimeInfo
from ha.protocol.codes import DUPLICATE_BROKERS, RequestCode, ResponseCode
from ha.protocol.java_json import read_as
from ha.protocol.remoting import RemotingCommand

_RUNTIME = re.compile(r"\[ (\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds \]")


class Outcome(Enum):
    """Result of a connection attempt."""

    OPEN = "open"
    REFUSED = "refused"
    """Refused at once: the machine is up, but nothing listens on the port"""
    SILENT = "silent"
    """Timeout: a firewall drops packets, or no machine has the address"""
    UNREACHABLE = "unreachable"
    """No route, or unknown host name"""


class Reach(msgspec.Struct, frozen=True):
    """A connection attempt from this machine."""

    address: str
    outcome: Outcome
    detail: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the port accepts connections."""
        return self.outcome is Outcome.OPEN


class BrokerFacts(msgspec.Struct, kw_only=True):
    """A broker as registered and as it describes itself; None for unknown."""

    cluster: str
    name: str
    broker_id: int
    address: str
    """Address that name servers announce to clients"""
    reach: Reach
    error: str = ""
    """Why it did not respond although its port is open"""
    figures: Mapping[str, str] | None = None
    config: Mapping[str, str] | None = None
    replication: HARuntimeInfo | None = None
    clock_ahead_s: float | None = None
    ha_address: str = ""
    """A master's announced HA address"""
    ha_reach: Reach | None = None
    status: NodeStatus | None = None
    """Status from halog's admin port, if known"""

    @property
    def label(self) -> str:
        """Name, ID and address, for output."""
        return f"{self.name}:{self.broker_id} ({self.address})"

    @property
    def is_master(self) -> bool:
        """Whether it is registered as master."""
        return self.broker_id == 0

    def setting(self, key: str) -> str | None:
        """Returns a configuration value, None if unknown."""
        return None if self.config is None else self.config.get(key)

    def number(self, key: str) -> int | None:
        """Returns a configuration value as a number, None if unknown."""
        text = self.setting(key)
        return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None


class Facts(msgspec.Struct, kw_only=True):
    """All facts of a cluster."""

    name_servers: list[Reach] = []
    name_server_errors: dict[str, str] = {}
    brokers: list[BrokerFacts] = []
    duplicates: dict[tuple[str, int], set[str]] = {}
    """Broker name and ID -> addresses that registered under it alternately"""
    admins: dict[str, Page | str] = {}
    named_admins: bool = False
    """Whether the admin ports were given by the user rather than the defaults"""


async def reach(address: str, timeout_s: float) -> Reach:
    """Connects and disconnects."""
    try:
        host, port = split_address(address)
    except ValueError as error:
        return Reach(address, Outcome.UNREACHABLE, str(error))
    try:
        with anyio.fail_after(timeout_s):
            stream = await anyio.connect_tcp(host, port)
            await stream.aclose()
    except TimeoutError:
        return Reach(address, Outcome.SILENT, f"no response within {timeout_s:g} s")
    except OSError as error:
        causes = [error, *_causes(error)]
        if any(isinstance(each, ConnectionRefusedError) for each in causes):
            return Reach(address, Outcome.REFUSED, "connection refused")
        if any(isinstance(each, TimeoutError) for each in causes):
            return Reach(address, Outcome.SILENT, "no answer")
        last = causes[-1]
        return Reach(address, Outcome.UNREACHABLE, reason_of_os(last) if isinstance(last, OSError) else str(last))
    return Reach(address, Outcome.OPEN)


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    while (cause := error.__cause__) is not None:
        if isinstance(cause, BaseExceptionGroup):
            found += cause.exceptions
        else:
            found.append(cause)
        error = cause
    return found


async def gather(
    servers: Sequence[str],
    admins: Sequence[str],
    *,
    options: ClientOptions,
    token: str,
    context: ssl.SSLContext | None,
    timeout_s: float,
    named_admins: bool,
) -> Facts:
    """Collects the facts, with concurrent requests where possible."""
    facts = Facts(named_admins=named_admins)

    async def ask_admins() -> None:
        ask = partial(fetch_pages, admins, token, context, timeout_s)
        facts.admins = await anyio.to_thread.run_sync(ask)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_admins)
        tasks.start_soon(_ask_cluster, facts, servers, options, timeout_s)
    _match_pages(facts)
    async with anyio.create_task_group() as tasks:
        for broker in facts.brokers:
            tasks.start_soon(_check_ha_port, broker, timeout_s)
    return facts


async def _ask_cluster(facts: Facts, servers: Sequence[str], options: ClientOptions, timeout_s: float) -> None:
    facts.name_servers = [await reach(server, timeout_s) for server in servers]
    known: dict[tuple[str, int, str], str] = {}
    async with Client(list(servers), options=options) as client:
        for server in facts.name_servers:
            if not server.is_open:
                continue
            try:
                answer = await _ask(client, server.address, RequestCode.GET_BROKER_CLUSTER_INFO, timeout_s)
                for each in read_as(ClusterInfo, answer.body).broker_addr_table.values():
                    for broker_id, address in each.broker_addrs.items():
                        known[each.broker_name, broker_id, address] = each.cluster
            except (HalogError, OSError) as error:
                facts.name_server_errors[server.address] = str(error)
                continue
            await _ask_duplicates(facts, client, server.address, timeout_s)
        async with anyio.create_task_group() as tasks:
            for (name, broker_id, address), cluster in sorted(known.items()):
                tasks.start_soon(_ask_broker, facts, client, (cluster, name, broker_id, address), timeout_s)
    facts.brokers.sort(key=lambda broker: (broker.cluster, broker.name, broker.broker_id, broker.address))


async def _ask_duplicates(facts: Facts, client: Client, server: str, timeout_s: float) -> None:
    fields = {"namespace": DUPLICATE_BROKERS}
    try:
        answer = await _ask(client, server, RequestCode.GET_KVLIST_BY_NAMESPACE, timeout_s, fields)
        table = read_as(_Table, answer.body).table
    except (HalogError, OSError):
        return  # not supported by RocketMQ's name servers, and absent from halog's without duplicates
    for key, addresses in table.items():
        name, _, broker_id = key.rpartition(":")
        if broker_id.isdecimal():
            facts.duplicates.setdefault((name, int(broker_id)), set()).update(addresses.split(";"))


async def _ask(
    client: Client, address: str, code: RequestCode, timeout_s: float, fields: Mapping[str, str] = {}
) -> RemotingCommand:
    answer = await client.connections.invoke(address, RemotingCommand(code, ext_fields=dict(fields)), timeout_s)
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(address, answer.code, answer.remark or "")
    return answer


class _Table(msgspec.Struct):
    table: dict[str, str] = {}


async def _ask_broker(facts: Facts, client: Client, place: tuple[str, str, int, str], timeout_s: float) -> None:
    cluster, name, broker_id, address = place
    broker = BrokerFacts(
        cluster=cluster, name=name, broker_id=broker_id, address=address, reach=await reach(address, timeout_s)
    )
    facts.brokers.append(broker)
    if not broker.reach.is_open:
        return
    try:
        asked_s = time.time()
        answer = await _ask(client, address, RequestCode.GET_BROKER_RUNTIME_INFO, timeout_s)
        broker.figures = read_as(_Table, answer.body).table
        broker.clock_ahead_s = clock_ahead_s(broker.figures, asked_s, time.time())
    except BrokerError as error:
        broker.error = str(error)
    except (ClientError, RemoteProtocolError, OSError) as error:
        broker.error = str(error)
        return  # each further request would run into its timeout
    try:
        answer = await _ask(client, address, RequestCode.GET_BROKER_CONFIG, timeout_s)
        broker.config = properties(bytes(answer.body))
    except HalogError:
        pass  # access control requires admin credentials; checks.py reports it
    if broker.is_master:
        try:
            answer = await _ask(client, address, RequestCode.EXCHANGE_BROKER_HA_INFO, timeout_s)
            broker.ha_address = answer.ext_fields.get("masterHaAddress", "")
        except HalogError:
            pass  # not supported by 4.9: use its configuration
    try:
        answer = await _ask(client, address, RequestCode.GET_BROKER_HA_STATUS, timeout_s)
        broker.replication = read_as(HARuntimeInfo, answer.body)
    except HalogError:
        pass  # not supported by 4.9


def clock_ahead_s(figures: Mapping[str, str], asked_s: float, answered_s: float) -> float | None:
    """Returns how far a broker's clock is ahead of ours, from its start time and uptime; 0: not measurable."""
    match = _RUNTIME.search(figures.get("runtime", ""))
    began = figures.get("bootTimestamp", "")
    if match is None or not began.isdecimal():
        return None
    days, hours, minutes, seconds = (int(group) for group in match.groups())
    told_s = int(began) / 1000 + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return difference(told_s, told_s + 1, asked_s, answered_s)


def properties(raw: bytes) -> dict[str, str]:
    """Parses a broker's configuration (response to request 26)."""
    found = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found[key.strip()] = value.strip().replace("\\:", ":")
    return found


def _match_pages(facts: Facts) -> None:
    """Sets each broker's status from the admin pages."""
    for page in facts.admins.values():
        if isinstance(page, str):
            continue
        node = page.node
        address = node.addresses.get("remoting") or ""
        for broker in facts.brokers:
            if broker.address == address and broker.name == node.broker_name:
                broker.status = node
                if broker.clock_ahead_s is None:
                    broker.clock_ahead_s = page.clock_ahead_s


async def _check_ha_port(broker: BrokerFacts, timeout_s: float) -> None:
    if not broker.is_master:
        return
    told = None if broker.status is None else broker.status.addresses.get("ha")
    host, port = broker.setting("brokerIP2"), broker.setting("haListenPort")
    if told:
        broker.ha_address = told
    elif not broker.ha_address and host and port:
        broker.ha_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not broker.ha_address:
        return
    broker.ha_reach = await reach(broker.ha_address, timeout_s)

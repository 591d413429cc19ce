"""What `ha doctor` knows of a cluster before it judges: who answers where, what brokers say, how they are configured.

Nothing here is changed anywhere. Each question has a deadline; a broker that does not answer costs one of them.
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
from ha.client import Client, ClientOptions
from ha.client.options import split_address
from ha.errors import BrokerError, ClientError, HalogError, RemoteProtocolError
from ha.protocol.bodies import ClusterInfo, HARuntimeInfo
from ha.protocol.codes import DUPLICATE_BROKERS, RequestCode, ResponseCode
from ha.protocol.java_json import read_as
from ha.protocol.remoting import RemotingCommand

_RUNTIME = re.compile(r"\[ (\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds \]")


class Outcome(Enum):
    """How an attempt to connect ended."""

    OPEN = "open"
    REFUSED = "refused"
    """At once: the machine is there, and nothing listens"""
    SILENT = "silent"
    """Nobody said anything: a firewall that drops, or no such machine"""
    UNREACHABLE = "unreachable"
    """No route, or no such name"""


class Reach(msgspec.Struct, frozen=True):
    """One attempt to connect from here."""

    address: str
    outcome: Outcome
    detail: str = ""

    @property
    def is_open(self) -> bool:
        """Whether somebody listens there."""
        return self.outcome is Outcome.OPEN


class BrokerFacts(msgspec.Struct, kw_only=True):
    """One broker, as name servers know it and as it describes itself; None for what it did not tell."""

    cluster: str
    name: str
    broker_id: int
    address: str
    """What name servers tell clients"""
    reach: Reach
    error: str = ""
    """Why it did not answer, though its port is open"""
    figures: Mapping[str, str] | None = None
    config: Mapping[str, str] | None = None
    replication: HARuntimeInfo | None = None
    clock_ahead_s: float | None = None
    ha_address: str = ""
    """A master's HA port as it advertises it"""
    ha_reach: Reach | None = None
    status: NodeStatus | None = None
    """Of halog's admin port, if that was asked"""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name}:{self.broker_id} ({self.address})"

    @property
    def is_master(self) -> bool:
        """Whether it is registered as one."""
        return self.broker_id == 0

    def setting(self, key: str) -> str | None:
        """A value of its configuration, None if it is not known."""
        return None if self.config is None else self.config.get(key)

    def number(self, key: str) -> int | None:
        """The same as a number."""
        text = self.setting(key)
        return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None


class Facts(msgspec.Struct, kw_only=True):
    """All of it."""

    name_servers: list[Reach] = []
    name_server_errors: dict[str, str] = {}
    brokers: list[BrokerFacts] = []
    duplicates: dict[tuple[str, int], set[str]] = {}
    """Broker name and id -> addresses that registered under it in turn, as name servers tell"""
    admins: dict[str, Page | str] = {}
    named_admins: bool = False
    """Whether somebody asked for these admin ports, or they are only the usual ones"""


async def reach(address: str, timeout_s: float) -> Reach:
    """Try to connect, and hang up at once."""
    try:
        host, port = split_address(address)
    except ValueError as error:
        return Reach(address, Outcome.UNREACHABLE, str(error))
    try:
        with anyio.fail_after(timeout_s):
            stream = await anyio.connect_tcp(host, port)
            await stream.aclose()
    except TimeoutError:
        return Reach(address, Outcome.SILENT, f"no answer within {timeout_s:g} s")
    except OSError as error:
        causes = [error, *_causes(error)]
        if any(isinstance(each, ConnectionRefusedError) for each in causes):
            return Reach(address, Outcome.REFUSED, "connection refused")
        if any(isinstance(each, TimeoutError) for each in causes):
            return Reach(address, Outcome.SILENT, "no answer")
        last = causes[-1]
        return Reach(address, Outcome.UNREACHABLE, getattr(last, "strerror", None) or str(last))
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
    """Ask everybody, at the same time where that is possible."""
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
            tasks.start_soon(_look_at_ha_port, broker, timeout_s)
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
        return  # RocketMQ's name servers do not know it, nor halog's if there is nothing to tell
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
        return  # the others would cost a deadline each
    try:
        answer = await _ask(client, address, RequestCode.GET_BROKER_CONFIG, timeout_s)
        broker.config = properties(bytes(answer.body))
    except HalogError:
        pass  # access control: an admin's credentials are needed, which checks.py tells
    if broker.is_master:
        try:
            answer = await _ask(client, address, RequestCode.EXCHANGE_BROKER_HA_INFO, timeout_s)
            broker.ha_address = answer.ext_fields.get("masterHaAddress", "")
        except HalogError:
            pass  # 4.9 does not know it: its configuration tells
    try:
        answer = await _ask(client, address, RequestCode.GET_BROKER_HA_STATUS, timeout_s)
        broker.replication = read_as(HARuntimeInfo, answer.body)
    except HalogError:
        pass  # 4.9 does not know it


def clock_ahead_s(figures: Mapping[str, str], asked_s: float, answered_s: float) -> float | None:
    """How far a broker's clock is ahead of ours, by when it began and how long ago it says that was; 0: no telling."""
    match = _RUNTIME.search(figures.get("runtime", ""))
    began = figures.get("bootTimestamp", "")
    if match is None or not began.isdecimal():
        return None
    days, hours, minutes, seconds = (int(group) for group in match.groups())
    told_s = int(began) / 1000 + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return difference(told_s, told_s + 1, asked_s, answered_s)


def properties(raw: bytes) -> dict[str, str]:
    """A properties file as brokers send theirs (26)."""
    found = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found[key.strip()] = value.strip().replace("\\:", ":")
    return found


def _match_pages(facts: Facts) -> None:
    """Give each broker its admin page; who has one and is in no name server is a broker, too."""
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


async def _look_at_ha_port(broker: BrokerFacts, timeout_s: float) -> None:
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

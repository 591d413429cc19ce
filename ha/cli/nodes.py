"""Finds the nodes of a cluster through its name servers, and collects what they report.

A broker's own state comes from its remoting port, which RocketMQ's brokers have, too. halog's brokers also report the
address of their admin port there; its status page has more details. Read-only. Each request has a timeout; a broker
that does not respond to its first request gets no others.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from ipaddress import ip_address

import anyio
import msgspec

from ha.cli.admin_pages import AdminFlags, NodeStatus, Page, difference, fetch_pages
from ha.cli.flags import ClusterFlags, TlsFlags
from ha.cli.unreachable import reason_of_os
from ha.client import Client, ClientOptions
from ha.errors import BrokerError, ClientError, HalogError, RemoteProtocolError
from ha.protocol.addresses import split_address
from ha.protocol.bodies import ClusterInfo, HARuntimeInfo, KVTable
from ha.protocol.codes import DUPLICATE_BROKERS, RequestCode, ResponseCode
from ha.protocol.java_json import read_as
from ha.protocol.remoting import RemotingCommand

_RUNTIME = re.compile(r"\[ (\d{1,9}) days, (\d{1,9}) hours, (\d{1,9}) minutes, (\d{1,9}) seconds \]")


class Outcome(Enum):
    """Result of a connection attempt."""

    OPEN = "open"
    REFUSED = "refused"
    """Refused at once: the machine is up, but nothing listens on the port"""
    SILENT = "silent"
    """Timeout: a firewall drops packets, or no machine has the address"""
    UNREACHABLE = "unreachable"
    """No route, unknown host name, or invalid address"""


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
    """A broker as registered and as it describes itself; None means unknown."""

    cluster: str
    name: str
    broker_id: int
    address: str
    """Address that name servers announce to clients"""
    reach: Reach
    error: str = ""
    """Why it did not report its runtime information although its port is open"""
    figures: Mapping[str, str] | None = None
    config: Mapping[str, str] | None = None
    replication: HARuntimeInfo | None = None
    clock_ahead_s: float | None = None
    ha_address: str = ""
    """HA address that a master announces to slaves, "" if unknown. `check_ha_ports` prefers the one on the status page,
    and uses the one in the configuration if there is no other."""
    ha_reach: Reach | None = None
    status: NodeStatus | None = None
    """Status from halog's admin port, if known"""
    status_address: str = ""
    """The admin port that `status` comes from"""
    topics: frozenset[str] | None = None
    """A master's topics, without the brokers' own; only `ha doctor` asks for them, and only in a cluster with several
    broker groups"""
    is_drained: bool = False
    """Whether the name servers tell producers to send to other broker groups; known only together with `topics`"""

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
        """Returns a configuration value as a number, None if it is unknown or not a whole number."""
        return whole_number(self.setting(key))

    def figure(self, key: str) -> int | None:
        """Returns a runtime figure as a number, None if it is unknown or not a whole number."""
        return None if self.figures is None else whole_number(self.figures.get(key))

    @property
    def admin_address(self) -> str | None:
        """Address of the admin port, as the broker reports it; None if it reports none, like RocketMQ's brokers, or an
        invalid one."""
        _, separator, address = (self.figures or {}).get("adminUrl", "").partition("://")
        try:
            split_address(address)
        except ValueError:
            return None
        return address if separator else None


def whole_number(text: str | None) -> int | None:
    """Parses a number that a broker reported; None if `text` is None, no whole number, or longer than 18 digits."""
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None


class Facts(msgspec.Struct, kw_only=True):
    """The facts that `gather` collected about a cluster."""

    name_servers: list[Reach] = []
    name_server_errors: dict[str, str] = {}
    brokers: list[BrokerFacts] = []
    duplicates: dict[tuple[str, int], set[str]] = {}
    """Broker name and ID -> addresses that registered under it alternately"""
    admins: dict[str, Page | str] = {}
    named_admins: bool = False
    """Whether the user named the admin ports to ask"""


async def reach(address: str, timeout_s: float) -> Reach:
    """Connects to `address` (host:port) and disconnects. Failures are outcomes, not exceptions."""
    try:
        host, port = split_address(address)
        with anyio.fail_after(timeout_s):
            stream = await anyio.connect_tcp(host, port)
            await stream.aclose()
    except ValueError as error:  # also if the host can't be encoded for DNS
        return Reach(address, Outcome.UNREACHABLE, str(error))
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


def gather(cluster: ClusterFlags, admins: AdminFlags, tls: TlsFlags) -> Facts:
    """Collects the facts, with concurrent requests where possible.

    Asks the admin ports that `admins` names; if it names none, those of the brokers found and of this machine. Raises
    UsageError if a flag is invalid or a file can't be used.
    """
    servers, files, asked = cluster.addresses(), tls.client_tls(), admins.checked()
    options = client_options(cluster, tls, admins.timeout)
    context, token = None if files is None else files.context(), admins.token()
    facts = Facts(named_admins=bool(admins.admin))

    async def ask_admins(addresses: Sequence[str], token: str) -> None:
        ask = partial(fetch_pages, addresses, token, context, admins.timeout)
        facts.admins |= await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)

    async def ask_all() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_admins, asked, token)
            tasks.start_soon(_ask_cluster, facts, servers, options, admins.timeout)
        if facts.named_admins:
            return
        found: dict[str, list[str]] = {}
        for address in dict.fromkeys(broker.admin_address for broker in facts.brokers):
            if address is not None and address not in facts.admins:
                found.setdefault(token_for(address, token, context), []).append(address)
        async with anyio.create_task_group() as tasks:
            for its_token, addresses in found.items():
                tasks.start_soon(ask_admins, addresses, its_token)

    anyio.run(ask_all, backend="trio")
    _drop_repeated(facts)
    _match_pages(facts)
    return facts


def client_options(cluster: ClusterFlags, tls: TlsFlags, timeout_s: float) -> ClientOptions:
    """Returns the options of a client whose connection attempts and requests each have the timeout `timeout_s`, which
    has been checked.

    Raises UsageError if a flag is invalid or a file can't be used.
    """
    return ClientOptions(
        credentials=cluster.credentials(),
        tls=tls.client_tls(),
        connect_timeout_s=timeout_s,
        request_timeout_s=timeout_s,
    )


def token_for(address: str, token: str, tls: ssl.SSLContext | None) -> str:
    """Returns `token` if the admin port at `address`, which a broker reported, may receive it, otherwise "".

    The broker may be an attacker's. The token is therefore sent only to ports on this machine, and to servers whose
    certificate is verified for the address.
    """
    host, _ = split_address(address)
    is_verified = tls is not None and tls.check_hostname
    return token if is_verified or is_local(host) else ""


def is_local(host: str) -> bool:
    """Returns whether `host` is localhost or a loopback address. A name such as 127.example.com is not."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _drop_repeated(facts: Facts) -> None:
    """Keeps only the first page of a node that responded at several addresses, unless the user named the admin
    ports."""
    seen: set[tuple[str, int, str | None]] = set()
    for address, page in list(facts.admins.items()):
        if isinstance(page, Page) and not facts.named_admins:
            node = page.node.name, page.node.pid, page.node.addresses.get("remoting")
            if node in seen:
                del facts.admins[address]
            seen.add(node)


async def _ask_cluster(facts: Facts, servers: Sequence[str], options: ClientOptions, timeout_s: float) -> None:
    known: dict[tuple[str, int, str], str] = {}
    async with Client(list(servers), options=options) as client:
        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(_ask_name_server, facts, known, client, server, timeout_s)
        facts.name_servers.sort(key=lambda each: servers.index(each.address))
        async with anyio.create_task_group() as tasks:
            for (name, broker_id, address), cluster in sorted(known.items()):
                tasks.start_soon(_ask_broker, facts, client, (cluster, name, broker_id, address), timeout_s)
    facts.brokers.sort(key=lambda broker: (broker.cluster, broker.name, broker.broker_id, broker.address))


async def _ask_name_server(
    facts: Facts, known: dict[tuple[str, int, str], str], client: Client, server: str, timeout_s: float
) -> None:
    """Adds a name server, and the brokers it knows: to `known`, their clusters by name, ID and address."""
    found = await reach(server, timeout_s)
    facts.name_servers.append(found)
    if not found.is_open:
        return
    try:
        answer = await _ask(client, server, RequestCode.GET_BROKER_CLUSTER_INFO, timeout_s)
        for each in read_as(ClusterInfo, answer.body).broker_addr_table.values():
            for broker_id, address in each.broker_addrs.items():
                known[each.broker_name, broker_id, address] = each.cluster
    except (HalogError, OSError) as error:
        facts.name_server_errors[server] = str(error)
        return
    await _ask_duplicates(facts, client, server, timeout_s)


async def _ask_duplicates(facts: Facts, client: Client, server: str, timeout_s: float) -> None:
    fields = {"namespace": DUPLICATE_BROKERS}
    try:
        answer = await _ask(client, server, RequestCode.GET_KVLIST_BY_NAMESPACE, timeout_s, fields)
        table = read_as(KVTable, answer.body).table
    except (HalogError, OSError):
        return  # not supported by RocketMQ's name servers, and absent from halog's without duplicates
    for key, addresses in table.items():
        name, _, broker_id = key.rpartition(":")
        if (number := whole_number(broker_id)) is not None:
            facts.duplicates.setdefault((name, number), set()).update(addresses.split(";"))


async def _ask(
    client: Client, address: str, code: RequestCode, timeout_s: float, fields: Mapping[str, str] = {}
) -> RemotingCommand:
    answer = await client.connections.invoke(address, RemotingCommand(code, ext_fields=dict(fields)), timeout_s)
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(address, answer.code, answer.remark or "")
    return answer


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
        broker.figures = read_as(KVTable, answer.body).table
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


def uptime_s(figures: Mapping[str, str]) -> int | None:
    """Returns a broker's uptime in seconds; None if its runtime figures have none."""
    match = _RUNTIME.search(figures.get("runtime", ""))
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def clock_ahead_s(figures: Mapping[str, str], asked_s: float, answered_s: float) -> float | None:
    """Returns by how many seconds a broker's clock is ahead of ours, from its start time and uptime; None if unknown.

    Negative if it is behind; 0 if the difference can be due to the resolution of one second and the duration of the
    request.
    """
    up_s, began_ms = uptime_s(figures), whole_number(figures.get("bootTimestamp"))
    if up_s is None or began_ms is None:
        return None
    told_s = began_ms / 1000 + up_s
    return difference(told_s, told_s + 1, asked_s, answered_s)


def properties(raw: bytes) -> dict[str, str]:
    """Parses a broker's configuration, the response to GET_BROKER_CONFIG (26)."""
    found = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found[key.strip()] = value.strip().replace("\\:", ":")
    return found


def _match_pages(facts: Facts) -> None:
    """Sets each broker's status from the admin pages."""
    for admin, page in facts.admins.items():
        if isinstance(page, str):
            continue
        node = page.node
        address = node.addresses.get("remoting") or ""
        for broker in facts.brokers:
            if broker.address == address and broker.name == node.broker_name:
                broker.status, broker.status_address = node, admin
                if broker.clock_ahead_s is None:
                    broker.clock_ahead_s = page.clock_ahead_s


def check_ha_ports(facts: Facts, timeout_s: float) -> None:
    """Connects to the HA ports of the masters, and sets their `ha_address` and `ha_reach`."""

    async def check() -> None:
        async with anyio.create_task_group() as tasks:
            for broker in facts.brokers:
                tasks.start_soon(_check_ha_port, broker, timeout_s)

    anyio.run(check, backend="trio")


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

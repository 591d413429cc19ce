"""The nodes of a cluster on this machine, kept in one directory as their configuration files.

    namesrv.conf                     the name server
    etcd.yml                         etcd, only with failover groups
    broker-a-0.conf, broker-a-1.conf master and slave of the first group; with failover, IDs start at 1
    NAME.log, NAME/                  log and store of a node
    cluster.lock                     held by the process that runs the cluster
    cluster.log                      its output in the background
    cluster.new                      a configuration that is being written

A configuration is written once, with ports that are free at that time; only the user changes it later. So a cluster has
the same addresses and settings whenever it runs.
"""

from __future__ import annotations

import fcntl
import os
import re
import string
from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from itertools import count, islice
from pathlib import Path

import msgspec

from ha.cli.cluster.processes import reserved_exactly, reserved_ports
from ha.cli.exits import UsageError
from ha.config.properties_file import parse_properties

GROUPS_MAX = len(string.ascii_lowercase)
REPLICAS_MAX = 9
PORT_MAX = 65535
LOCK_FILE = "cluster.lock"
OUTPUT_FILE = "cluster.log"
_NEW_FILE = "cluster.new"
NAME_SERVER = "namesrv"
ETCD = "etcd"
_SEGMENT_SIZE = 128 << 20
"""Size of a commitlog file in bytes. It is less than RocketMQ's 1 GiB because each node allocates whole files."""
_HOST = "127.0.0.1"


class LocalNode(msgspec.Struct, frozen=True):
    """A node, and the keys of its configuration."""

    name: str
    keys: dict[str, str]

    @property
    def module(self) -> str:
        """Python module that runs the node; "" for etcd."""
        if self.name == ETCD:
            return ""
        if self.name == NAME_SERVER:
            return "ha.namesrv"
        if self.keys.get("etcdEndpoints"):
            return "ha.member"
        return "ha.slave" if self.keys.get("brokerRole") == "SLAVE" else "ha.master"

    @property
    def is_broker(self) -> bool:
        """Whether the node is a broker: neither the name server nor etcd."""
        return self.name not in (ETCD, NAME_SERVER)

    @property
    def stage(self) -> int:
        """Stage of start and stop: 0 for etcd, 1 for the name server, 2 for slaves, 3 for masters and members.

        Nodes start in this order, except that stages 2 and 3 start together. They stop in reverse order, so that a
        master has its slaves until its last send is acknowledged.
        """
        if not self.is_broker:
            return 0 if self.name == ETCD else 1
        return 2 if self.module == "ha.slave" else 3

    def address(self, key: str = "listenPort") -> str:
        """Returns host:port of the port that the configuration key `key` sets."""
        return f"{_HOST}:{self.keys.get(key, '')}"


def read_nodes(directory: Path) -> list[LocalNode]:
    """Returns the nodes in the order in which they start. Raises UsageError if a file can't be read or parsed."""
    nodes = [LocalNode(ETCD, {})] if (directory / f"{ETCD}.yml").exists() else []
    for file in sorted(directory.glob("*.conf")):
        try:
            nodes.append(LocalNode(file.stem, dict(parse_properties(file.read_text()))))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file}: {error}") from None
    return sorted(nodes, key=lambda node: (min(node.stage, 2), node.name))


def name_server_of(nodes: Sequence[LocalNode]) -> str:
    """Returns the address of the name server. Raises UsageError if there is none."""
    for node in nodes:
        if node.name == NAME_SERVER:
            return node.address()
    raise UsageError(f"{NAME_SERVER}.conf is missing; ha cluster up creates a cluster in an empty directory")


def add_nodes(
    directory: Path, groups: int | None, replicas: int | None, *, failover: bool, first_port: int | None = None
) -> list[LocalNode]:
    """Writes the configurations that are missing for this many groups and replicas, and returns all nodes.

    `groups`, `replicas`: None keeps the present number; in a new directory it means 1 group, and 2 replicas (3 with
    failover). `failover` has no effect on an existing cluster. New nodes get ports from `first_port` on; None: random
    ones that are free. Nodes are never removed. Raises UsageError if there are more groups or replicas already, if a
    new directory has other files, if a port would be above PORT_MAX, and while another process adds nodes; NodeError
    if a port is in use, or if too few ports are free.
    """
    with _adding(directory):
        return _add_nodes(directory, groups, replicas, failover=failover, first_port=first_port)


@contextmanager
def _adding(directory: Path) -> Iterator[None]:
    """Excludes other processes that add nodes, as two would choose different ports for one node.

    Raises UsageError if another process is adding nodes.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"another ha cluster up adds nodes to {directory}; try again when it has ended") from None
    finally:
        os.close(descriptor)


def _add_nodes(
    directory: Path, groups: int | None, replicas: int | None, *, failover: bool, first_port: int | None
) -> list[LocalNode]:
    known = read_nodes(directory)
    if known:
        name_server_of(known)
        failover = any(node.name == ETCD for node in known)
    elif any(file.name not in (LOCK_FILE, _NEW_FILE) for file in directory.iterdir()):
        raise UsageError(f"{directory} contains other files; use an empty directory")
    ids_of: dict[str, set[str]] = {}
    for node in known:
        if node.is_broker:
            ids_of.setdefault(node.keys.get("brokerName", ""), set()).add(node.keys.get("brokerId", ""))
    held = max(map(len, ids_of.values()), default=3 if failover else 2)
    replicas = held if replicas is None else replicas
    groups = max(1, len(ids_of)) if groups is None else groups
    if ids_of and (groups < len(ids_of) or replicas < held):
        raise UsageError(
            f"{directory} has {len(ids_of)} groups of {held} replicas; to remove a group, stop it with ha cluster down "
            "--group NAME and delete its files"
        )
    free = (f"broker-{letter}" for letter in string.ascii_lowercase if f"broker-{letter}" not in ids_of)
    names = [*ids_of, *islice(free, groups - len(ids_of))]
    ids = [str(number) for number in (range(1, replicas + 1) if failover else range(replicas))]
    missing = [(name, id_) for name in names for id_ in ids if id_ not in ids_of.get(name, ())]
    service_count = 0 if known else 3 if failover else 1
    with _ports_for(service_count, len(missing), _ports_of(known, directory), first_port) as reserved:
        ports = iter(reserved)
        if not known:
            known = _add_services(directory, ports, failover=failover)
        for name, broker_id in missing:
            role = "SLAVE" if broker_id != "0" and not failover else "SYNC_MASTER" if replicas > 1 else "ASYNC_MASTER"
            keys = {
                "brokerName": name,
                "brokerId": broker_id,
                "brokerRole": role,
                "namesrvAddr": name_server_of(known),
                **({"etcdEndpoints": etcd_url(directory)} if failover else {}),
                "listenPort": str(next(ports)),
                "haListenPort": str(next(ports)),
                "adminListenPort": str(next(ports)),
                "storePathRootDir": f"{name}-{broker_id}",
                "mappedFileSizeCommitLog": str(_SEGMENT_SIZE),
            }
            _write(directory / f"{name}-{broker_id}.conf", _properties(keys))
    return read_nodes(directory)


def _ports_for(
    service_count: int, broker_count: int, others: Set[int], first: int | None
) -> AbstractContextManager[list[int]]:
    """Reserves one port for each service and three for each broker, none of them in `others`.

    With `first`, the services get the ports from `first` on, and the brokers three each, from `first` + 11 on, from
    `first` + 21 on and so on: for 10900, 10911 to 10913, then 10921 to 10923. Raises UsageError if a port would be
    above PORT_MAX; NodeError if one is in use, or if too few ports are free.
    """
    if first is None:
        return reserved_ports(service_count + 3 * broker_count, others)
    blocks = (range(begin, begin + 3) for begin in count(first + 11, 10))
    free = islice((block for block in blocks if others.isdisjoint(block)), broker_count)
    ports = [*range(first, first + service_count), *(port for block in free for port in block)]
    if ports and ports[-1] > PORT_MAX:
        raise UsageError(f"--port {first}: the last node would have port {ports[-1]}")
    return reserved_exactly(ports)


def _add_services(directory: Path, ports: Iterator[int], *, failover: bool) -> list[LocalNode]:
    """Writes the configurations of the name server, and of etcd with failover."""
    keys = {"bindAddress": _HOST, "listenPort": str(next(ports))}
    if failover:
        client, peer = next(ports), next(ports)
        urls = {"client": f"http://{_HOST}:{client}", "peer": f"http://{_HOST}:{peer}"}
        lines = [f"name: {ETCD}", f"data-dir: {ETCD}", f"initial-cluster: {ETCD}={urls['peer']}"]
        lines.append("enable-grpc-gateway: true")  # members use its JSON API; 3.4 disables it with a configuration file
        lines += [f"listen-{kind}-urls: {url}" for kind, url in urls.items()]
        lines += [f"advertise-client-urls: {urls['client']}", f"initial-advertise-peer-urls: {urls['peer']}"]
        _write(directory / f"{ETCD}.yml", lines)
    _write(directory / f"{NAME_SERVER}.conf", _properties(keys))
    return read_nodes(directory)


def _ports_of(nodes: Sequence[LocalNode], directory: Path) -> set[int]:
    """Returns the configured ports of nodes. They may look free, because the nodes need not be running."""
    texts = [value for node in nodes for key, value in node.keys.items() if key.endswith("istenPort")]
    if any(node.name == ETCD for node in nodes):
        texts += re.findall(r":(\d+)$", (directory / f"{ETCD}.yml").read_text(), re.MULTILINE)
    return {int(text) for text in texts if text.isdecimal()}


def etcd_url(directory: Path) -> str:
    """Returns the URL for etcd's clients. Raises UsageError if its configuration has none."""
    for line in (directory / f"{ETCD}.yml").read_text().splitlines():
        key, _, url = line.partition(": ")
        if key == "listen-client-urls":
            return url
    raise UsageError(f"{directory / f'{ETCD}.yml'} has no listen-client-urls")


def _properties(keys: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in keys.items()]


def _write(file: Path, lines: list[str]) -> None:
    """Writes a file completely or not at all, because the next start uses every existing configuration as it is."""
    new = file.with_name(_NEW_FILE)
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(file)

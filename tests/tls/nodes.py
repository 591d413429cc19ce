"""Nodes with certificates, in the test's own process, over real sockets."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from ha.config import Config, load_config
from ha.node import Node, open_node
from tests.tls.pki import Pki

SMALL = ("mappedFileSizeCommitLog=4194304", "maxHashSlotNum=1000", "maxIndexNum=4000", "listenPort=0")


def settings(folder: Path, role: str, *more: str) -> Config:
    """A small broker named after its `role`."""
    given = [f"brokerRole={role}", "brokerName=broker-a", f"storePathRootDir={folder / role}", *SMALL, *more]
    return load_config(Config, settings=given).config


def server(pki: Pki) -> tuple[str, ...]:
    """Keys of a server with a certificate."""
    certificate, key = pki.issue("server")
    return f"tls.server.certPath={certificate}", f"tls.server.keyPath={key}", f"tls.server.trustCertPath={pki.trust}"


def client(pki: Pki, name: str | None) -> tuple[str, ...]:
    """Keys of a node that trusts this CA, with a certificate for `name` if there is one."""
    trust = f"tls.client.trustCertPath={pki.trust}"
    if name is None:
        return (trust,)
    certificate, key = pki.issue(name, common_name=name)
    return f"tls.client.certPath={certificate}", f"tls.client.keyPath={key}", trust


@asynccontextmanager
async def open_pair(
    folder: Path, master_keys: tuple[str, ...], slave_keys: tuple[str, ...], *, role: str = "SYNC_MASTER"
) -> AsyncIterator[tuple[Node, Node]]:
    """A master with its own name server, and a slave that has it from there."""
    async with open_node(settings(folder, role, *master_keys)) as master:
        addresses = (f"namesrvAddr={master.name_server_address}", f"haMasterAddress={master.ha_address}")
        async with open_node(settings(folder, "SLAVE", *addresses, *slave_keys)) as slave:
            yield master, slave


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what has no event: a line in the log, a state that others count."""
    with trio.fail_after(20):
        while True:
            if condition():
                return
            await trio.sleep(0.02)

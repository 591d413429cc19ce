"""A node's part in replication: its HA port, and a slave's link to its master."""

from __future__ import annotations

import msgspec
import trio

from ha.remoting import RemotingClient
from ha.replication.group_transfer import ALL_IN_SYNC, AckRequest
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.handshake import HandshakeOptions

from .master_address import ask_min_offset, master_broker_address
from .node import Node
from .options import ha_options
from .platform import Port

FROM_NAME_SERVER = "from the name server, where the master registers its brokerIP2 and haListenPort"

GRACE_S_MAX = 1.0
GRACE_SHARE = 0.1
"""Share (0 to 1) of shutdownTimeout for which a stopping master waits for its slaves, at most GRACE_S_MAX seconds."""


async def start_replication(
    node: Node, client: RemotingClient, port: Port, nursery: trio.Nursery, handshake: HandshakeOptions | None
) -> None:
    """Starts the HA port and, on a slave or member, the link to the master. A slave also serves the HA port, because it
    can have slaves of its own, as in RocketMQ. Raises AddressInUse if the port is in use."""
    options = msgspec.structs.replace(ha_options(node.config, node.platform.open_files_max), handshake=handshake)
    config = node.config
    member = node.store if config.is_member else None
    node.ha_service = HAService(
        node.store.log,
        options,
        advertised_address=node.ha_address,
        secure=node.tls.secure_slave,
        member=member,
        poller=node.poller,
    )
    node.store.set_retain_from(node.ha_service.lowest_needed_offset)
    await nursery.start(node.serve_slaves, port.listen())
    if not (config.is_slave or config.is_member):
        return

    async def master_min_offset() -> int | None:
        return await ask_min_offset(client, master_address(node))

    node.ha_client = HAClient(
        node.store.log,
        options,
        node.tls.connect_to_master,
        truncate=node.store.truncate_record,
        master_min_offset=master_min_offset,
        own_port=port.port,
        member=member,
        broker_id=config.broker_id,
        run_id=node.run_id,
        is_learner=config.async_learner,
        jitter=node.platform.jitter,
        poller=node.poller,
    )
    node.ha_client.set_master(config.ha_master_address or None, origin="haMasterAddress")
    await nursery.start(node.ha_client.run)


def master_address(node: Node) -> str | None:
    """Returns the address of the master's remoting port; None if unknown."""
    return master_broker_address(node.master_addresses, node.config.ha_master_address or None)


async def follow_master(node: Node, ha_client: HAClient) -> None:
    """Follows the master that name servers report, until cancelled. Whenever its addresses change, requests a sync of
    the tables and, unless haMasterAddress is set, makes `ha_client` connect to the new HA address."""
    while True:
        found = await node.registration.master.wait_value(lambda now: now != node.master_addresses)
        node.master_addresses = found
        if found is not None and not node.config.ha_master_address:
            ha_client.set_master(found.ha_address, origin=FROM_NAME_SERVER)
        if node.broker.slave_sync is not None:
            node.broker.slave_sync.sync_soon()


async def sync_tables(node: Node, ha_client: HAClient) -> None:
    """Requests a sync of the tables whenever the slave begins to follow the master, until cancelled.

    The sync also sends the master the consumer offsets that were committed on this slave while the master was down.
    """
    while True:
        await ha_client.wait_following()
        if node.broker.slave_sync is not None:
            node.broker.slave_sync.sync_soon()


async def finish_waiting_puts(node: Node) -> None:
    """Waits until the slaves in sync have acknowledged the whole log, for at most the time that GRACE_SHARE describes,
    then answers the puts that still wait for a slave.

    The broker must still be able to send responses, but no longer read requests: a message that arrived now would be
    stored without a slave or without a response.
    """
    caught_up = trio.Event()
    grace_s = min(GRACE_S_MAX, node.config.shutdown_timeout_ms / 1000 * GRACE_SHARE)
    with trio.move_on_after(grace_s) as grace:
        await trio.lowlevel.checkpoint()  # requests that were read, but not handled yet, are handled now
        await node.broker.sender.wait_all_answered()  # sends that are not in the log yet get there meanwhile
        end = AckRequest(
            next_offset=node.store.log.max_offset.value,
            ack_count=ALL_IN_SYNC,
            deadline=grace.deadline,
            on_done=lambda _: caught_up.set(),
        )
        await node.ha_service.group_transfer.submit_channel.send([end])
        await caught_up.wait()
    await node.stop_serving_slaves()

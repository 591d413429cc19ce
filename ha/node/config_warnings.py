"""Warns about settings that are accepted but weaker than they may look, and logs the space that a store takes."""

from __future__ import annotations

import logging

from ha.config import Config, is_loopback

from .options import replica_policy

logger = logging.getLogger(__name__)


def warn_about(config: Config) -> None:
    """Logs the warnings for `config`."""
    _warn_about_plaintext(config)
    _warn_about_replicas(config)
    _log_disk_space(config)


def _log_disk_space(config: Config) -> None:
    hint = ""
    if not config.preallocate:
        hint = (
            ' hint="files take space as messages arrive, and a full disk stops the node;'
            ' preallocateCommitLog=true or --config reserves it"'
        )
    logger.info(
        "store.disk_space_planned path=%r preallocated_bytes=%d kept_h=%d disk_percent_max=%d%s",
        config.store_path_root_dir,
        config.segment_size if config.preallocate else 0,
        config.reserved_h,
        config.disk_max_used_space_percent,
        hint,
    )


def _warn_about_plaintext(config: Config) -> None:
    for port, key, host, mode in (
        ("remoting", "tls.server.mode", config.bind_address, config.tls_server_mode),
        ("ha", "haTls", config.bind_address, config.ha_tls),
        ("admin", "adminTls", config.admin_bind_address, config.admin_tls),
    ):
        if mode != "enforcing" and not is_loopback(host):
            hint = f"set {key}=enforcing outside a trusted network"
            logger.warning('node.plaintext_port port=%s address=%s mode=%s hint="%s"', port, host, mode, hint)
    if (config.tls_enable or config.ha_tls == "enforcing") and not config.tls_client_auth_server:
        logger.warning('tls.server_certificates_unchecked hint="set tls.client.authServer=true"')


def _warn_about_replicas(config: Config) -> None:
    """Warns in two cases if RocketMQ 5's keys for replicas are set: they ask for slaves, but the node is an
    ASYNC_MASTER, which ignores them; or the node is a SYNC_MASTER, and they let it answer SEND_OK although no slave has
    the message, as the default values do."""
    policy = replica_policy(config)
    if policy is None:
        return
    asks_for_slaves = max(policy.in_sync_replicas, policy.min_in_sync_replicas) > 1 or policy.all_in_sync
    if config.broker_role == "ASYNC_MASTER" and asks_for_slaves:
        hint = "an ASYNC_MASTER answers SEND_OK for this node alone; set brokerRole=SYNC_MASTER, or unset these keys"
        logger.warning('node.replica_keys_unused role=ASYNC_MASTER hint="%s"', hint)
    if config.broker_role != "SYNC_MASTER":
        return
    if policy.min_in_sync_replicas > 1 or (policy.in_sync_replicas > 1 and not policy.all_in_sync):
        return
    wanted = "inSyncReplicas=2 and minInSyncReplicas=2" if policy.all_in_sync else "inSyncReplicas=2"
    logger.warning(
        "node.sync_master_without_slaves in_sync_replicas=%d min_in_sync_replicas=%d all_ack_in_sync_state_set=%s"
        ' hint="SEND_OK can mean this node alone; set %s, or unset these keys to wait for one slave"',
        policy.in_sync_replicas,
        policy.min_in_sync_replicas,
        str(policy.all_in_sync).lower(),
        wanted,
    )

"""/metrics of whole nodes under load: every metric of the list is there, is what the list says, and is true."""

import random
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from prometheus_client.metrics_core import Metric as Family

from ha.admin.metrics import LABELS, METRICS
from ha.client import SendStatus
from ha.failover.agreement import Agreement
from ha.node import open_node
from ha.node.member import wait_role
from ha.node.platform import Platform
from ha.replication.statistics import Condition
from tests.failover.group import Way
from tests.metrics.nodes import OPEN_METRICS, ask, pull_all, samples, scrape, send, settings, value
from tests.security.brokers import ACCOUNTS
from tests.sim.agreement import SimAgreementService
from tests.sim.world import Timers
from tests.tls.nodes import server, until
from tests.tls.pki import Pki


def expected(*where: str) -> set[str]:
    return {metric.name for metric in METRICS if metric.where in where}


def shown(families: Iterable[Family]) -> set[str]:
    """Names as the list has them of the metrics that have a sample; and they are what the list says they are."""
    by_name = {metric.name: metric for metric in METRICS}
    names = set()
    for family in families:
        assert family.samples
        name = f"{family.name}_total" if family.type == "counter" else family.name
        metric = by_name[name]
        assert family.type == metric.kind
        assert family.documentation == metric.help or metric.where == "process", "the process's are prometheus-client's"
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels), sample
            for label in sample.labels.keys() & {"outcome", "result"}:
                assert sample.labels[label] in re.findall(r"\w+", LABELS[label]), sample
        names.add(name)
    return names


async def test_a_master_and_a_slave_under_load(tmp_path: Path) -> None:
    async with open_node(settings(tmp_path, "SYNC_MASTER", "haSendHeartbeatInterval=200")) as master:
        [alone] = await send(master, 1)
        assert alone.status is SendStatus.SLAVE_NOT_AVAILABLE
        addresses = (f"namesrvAddr={master.name_server_address}", f"haMasterAddress={master.ha_address}")
        async with open_node(settings(tmp_path, "SLAVE", *addresses)) as slave:
            await until(lambda: master.ha_service.is_slave_ok(master.store.log.max_offset.value))
            assert {result.status for result in await send(master, 40)} == {SendStatus.SEND_OK}
            log = master.store.log
            await until(lambda: log.dispatched_offset.value == log.max_offset.value)
            assert await pull_all(master) == 41

            families = await scrape(master)
            assert shown(families) == expected("every", "master", "process")
            found = samples(families)
            assert shown(await scrape(master, OPEN_METRICS)) == shown(families)
            link = slave.ha_client
            assert link is not None
            link.set_master("127.0.0.1:1")
            await until(lambda: bool(link.statistics().ended_counts))
            of_slave = await scrape(slave)
            assert shown(of_slave) >= expected("every", "slave", "process") - {
                "halog_put_not_ok_total",
                "halog_log_lines_total",
                "halog_connections_closed_total",
            }
            assert not shown(of_slave) & {"halog_in_sync_replicas", "halog_epoch", "halog_acl_accounts"}

    assert value(found, "halog_stored_messages_total") == 41
    assert value(found, "halog_send_ack_seconds_count") == 41
    assert found["halog_put_not_ok_total"] == [({"status": "SLAVE_NOT_AVAILABLE", "cause": "no_slave_connected"}, 1)]
    assert value(found, "halog_pulled_messages_total") == 41
    assert value(found, "halog_pulls_total", result="found") == value(found, "halog_consume_queues")
    assert value(found, "halog_role", role="SYNC_MASTER") == 1
    assert sum(number for _, number in found["halog_role"]) == 1
    assert value(found, "halog_in_sync_replicas") == 2
    assert value(found, "halog_slaves", state="transfer") == 1
    [(labels, in_sync)] = found["halog_slave_in_sync"]
    assert in_sync == 1
    assert labels["slave"].startswith("127.0.0.1:")
    end = master.store.log.max_offset.value
    assert value(found, "halog_slave_lag_bytes") == value(found, "halog_slave_lag_seconds") == 0
    assert value(found, "halog_commitlog_max_offset_bytes") == value(found, "halog_acknowledged_offset_bytes") == end
    assert value(found, "halog_connections", kind="ha") == value(found, "halog_connections", kind="admin") == 1
    assert value(found, "halog_connections_closed_total", kind="remoting", reason="end_of_stream") >= 2
    received = samples(of_slave)
    assert value(received, "halog_commitlog_max_offset_bytes") == end
    assert value(received, "halog_ha_client_received_bytes_total") >= end
    assert value(received, "halog_ha_client_ended_total", condition="master_changed") == 1
    assert sum(number for _, number in received["halog_ha_client_condition"]) == 1
    assert len(received["halog_ha_client_condition"]) == len(Condition)
    for name, least in (("append", 41), ("replicate", 40), ("flush", 0), ("event_loop_delay", 0)):
        buckets = [number for _, number in found[f"halog_{name}_seconds_bucket"]]
        assert buckets == sorted(buckets)
        assert buckets[-1] == value(found, f"halog_{name}_seconds_count") >= least
        assert (value(found, f"halog_{name}_seconds_sum") > 0) == (buckets[-1] > 0)


async def test_a_node_with_tls_and_an_acl_whose_pages_need_a_token(tmp_path: Path) -> None:
    acl = tmp_path / "acl.yml"
    acl.write_text(ACCOUNTS)
    keys = (*server(Pki(tmp_path)), "aclEnable=true", f"aclFile={acl}", "adminToken=sixteen letters!!")
    token = "Authorization: Bearer sixteen letters!!"
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *keys)) as master:
        assert (await ask(master.admin_address, "/metrics"))[0] == 401
        status, _, text = await ask(master.admin_address, "/metrics", token)
    assert status == 200
    lines = text.splitlines()
    for name in expected("tls", "acl"):
        assert any(re.match(rf"{name}[ {{]", line) for line in lines), name
    assert "halog_acl_accounts 2.0" in lines
    [end] = [line for line in lines if line.startswith('halog_tls_certificate_expiry_timestamp_seconds{role="server"}')]
    now = master.platform.wall_clock_ms() / 1000
    assert 364 < (float(end.split()[1]) - now) / 86_400 < 366


async def test_a_member_of_a_failover_group(tmp_path: Path) -> None:
    timers = Timers()
    service = SimAgreementService(timers, random.Random(1))

    @asynccontextmanager
    async def open_way(*_: Any) -> AsyncIterator[Agreement]:
        yield Way(service, 1)

    keys = ("brokerId=1", "namesrvAddr=127.0.0.1:1", "etcdEndpoints=http://127.0.0.1:1")
    config = settings(tmp_path, "SYNC_MASTER", *keys)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timers.run)
        async with open_node(config, Platform(open_agreement=open_way)) as node:
            assert node.member is not None
            with trio.fail_after(30):
                await wait_role(node.member)
            found = await scrape(node)
        nursery.cancel_scope.cancel()
    assert shown(found) >= expected("member")
    of_member = samples(found)
    assert value(of_member, "halog_member_state", state="master") == 1
    assert value(of_member, "halog_epoch") >= 1
    assert value(of_member, "halog_agreement_ok") == value(of_member, "halog_sync_state_set_members") == 1
    assert 0 < value(of_member, "halog_lease_remaining_seconds") < 60


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert {metric.unit for metric in METRICS} == {"", "bytes", "seconds", "ratio"}
    for metric in METRICS:
        name = metric.name.removesuffix("_total")
        assert re.fullmatch(r"(halog|process)(_[a-z0-9]+)+", name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not metric.unit or name.endswith(f"_{metric.unit}")
        assert metric.help.endswith(".")
        assert set(metric.labels) <= LABELS.keys()
    assert {label for metric in METRICS for label in metric.labels} == LABELS.keys()

"""Nodes in the test's own process over real sockets, and what /metrics of them says."""

from collections.abc import Iterable
from pathlib import Path

import trio
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families

from ha.client import Message, Producer, PullConsumer, SendResult
from ha.config import Config, load_config
from ha.node import Node

SMALL = ("mappedFileSizeCommitLog=4194304", "maxHashSlotNum=1000", "maxIndexNum=4000", "listenPort=0")
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
TOPIC = "Metrics"

Found = dict[str, list[tuple[dict[str, str], float]]]
"""Samples by name, as the text has them: labels and value."""


def settings(folder: Path, role: str, *more: str) -> Config:
    """A small broker named after its `role`."""
    given = [f"brokerRole={role}", "brokerName=broker-a", f"storePathRootDir={folder / role}", *SMALL, *more]
    return load_config(Config, settings=given).config


async def ask(address: str, path: str, *headers: str, method: str = "GET") -> tuple[int, str, str]:
    """Status, head and body of what an admin port answers."""
    host, _, port = address.rpartition(":")
    lines = (f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Length: 0", *headers, "", "")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        with trio.fail_after(20):
            await stream.send_all("\r\n".join(lines).encode())
            answer = b"".join([chunk async for chunk in stream])
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head, body


async def scrape(node: Node, accept: str = "text/plain") -> list[Family]:
    """The families of /metrics, by prometheus-client's own parsers."""
    status, head, body = await ask(node.admin_address, "/metrics", f"Accept: {accept}")
    assert status == 200
    if accept == OPEN_METRICS:
        assert "application/openmetrics-text" in head
        return list(parse_open_metrics(body))  # type: ignore[no-untyped-call]
    assert "content-type: text/plain; version=" in head.lower()
    return list(text_string_to_metric_families(body))


def samples(families: Iterable[Family]) -> Found:
    """All samples of a scrape."""
    found: Found = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found: Found, name: str, **labels: str) -> float:
    """The one sample with these labels."""
    [one] = [value for its, value in found[name] if labels.items() <= its.items()]
    return one


async def send(node: Node, count: int) -> list[SendResult]:
    """Send so many messages, one after the other."""
    async with Producer(node.name_server_address) as producer:
        return [await producer.send(Message(TOPIC, b"x" * 100)) for _ in range(count)]


async def pull_all(node: Node) -> int:
    """Pull what queue by queue is there; how many messages that is."""
    count = 0
    async with PullConsumer(node.name_server_address, group="g") as consumer:
        for queue in await consumer.queues(TOPIC):
            count += len((await consumer.pull(queue, 0)).messages)
    return count

"""The SDK: producers and consumers for halog and RocketMQ brokers, on anyio (asyncio and trio). Never imports the
server."""

from ha.client.client import Client
from ha.client.compression import Compression
from ha.client.consumer import PullConsumer
from ha.client.messages import (
    Message,
    MessageQueue,
    PullResult,
    PullStatus,
    RawPull,
    ReadFrom,
    ReceivedMessage,
    SendResult,
    SendStatus,
)
from ha.client.options import ClientOptions
from ha.client.producer import Producer
from ha.client.tls import ClientTls
from ha.protocol.acl import AclCredentials

__all__ = [
    "AclCredentials",
    "Client",
    "ClientOptions",
    "ClientTls",
    "Compression",
    "Message",
    "MessageQueue",
    "Producer",
    "PullConsumer",
    "PullResult",
    "PullStatus",
    "RawPull",
    "ReadFrom",
    "ReceivedMessage",
    "SendResult",
    "SendStatus",
]

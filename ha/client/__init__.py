"""The SDK: producers and consumers for halog and RocketMQ brokers, on anyio (asyncio and trio). Never imports the
server."""

from ha.client.admin import Admin, Broker, ConsumerProgress, QueueProgress
from ha.client.client import Client
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
    Stretch,
)
from ha.client.options import ClientOptions
from ha.client.producer import Producer
from ha.client.push_consumer import PushConsumer, PushStatistics
from ha.client.push_options import ConsumeMode, MessageModel, PushOptions, StartFrom
from ha.client.reading import Reading
from ha.client.subscription import Sql92
from ha.client.tls import ClientTls
from ha.client.transactions import TransactionResult, TransactionState
from ha.errors import BodyUnreadable, RetryLater
from ha.protocol.acl import AclCredentials
from ha.protocol.compression import Compression

__all__ = [
    "AclCredentials",
    "Admin",
    "BodyUnreadable",
    "Broker",
    "Client",
    "ClientOptions",
    "ClientTls",
    "Compression",
    "ConsumeMode",
    "ConsumerProgress",
    "Message",
    "MessageModel",
    "MessageQueue",
    "Producer",
    "PullConsumer",
    "PullResult",
    "PullStatus",
    "PushConsumer",
    "PushOptions",
    "PushStatistics",
    "QueueProgress",
    "RawPull",
    "ReadFrom",
    "Reading",
    "ReceivedMessage",
    "RetryLater",
    "SendResult",
    "SendStatus",
    "Sql92",
    "StartFrom",
    "Stretch",
    "TransactionResult",
    "TransactionState",
]

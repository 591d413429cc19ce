"""The client SDK: producers, consumers and administration for halog and RocketMQ brokers. Works under asyncio and trio
(through anyio), and imports no server code."""

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
from ha.client.popped_message import PoppedMessage
from ha.client.producer import Producer
from ha.client.push_consumer import PushConsumer, PushStatistics
from ha.client.push_options import ConsumeMode, MessageModel, PushOptions, StartFrom
from ha.client.reading import Reading
from ha.client.simple_consumer import Messages, SimpleConsumer
from ha.client.subscription import Sql92
from ha.client.tls import ClientTls
from ha.client.transactions import TransactionResult, TransactionState
from ha.errors import (
    BodyUnreadable,
    BrokerError,
    ClientError,
    ConnectionFailed,
    HalogError,
    LocalProtocolError,
    NameServersUnreachable,
    NoMaster,
    ReceiptExpired,
    RemoteProtocolError,
    RequestTimedOut,
    RetryLater,
    RouteNotFound,
)
from ha.protocol.acl import AclCredentials
from ha.protocol.compression import Compression

__all__ = [
    "AclCredentials",
    "Admin",
    "BodyUnreadable",
    "Broker",
    "BrokerError",
    "Client",
    "ClientError",
    "ClientOptions",
    "ClientTls",
    "Compression",
    "ConnectionFailed",
    "ConsumeMode",
    "ConsumerProgress",
    "HalogError",
    "LocalProtocolError",
    "Message",
    "MessageModel",
    "MessageQueue",
    "Messages",
    "NameServersUnreachable",
    "NoMaster",
    "PoppedMessage",
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
    "ReceiptExpired",
    "ReceivedMessage",
    "RemoteProtocolError",
    "RequestTimedOut",
    "RetryLater",
    "RouteNotFound",
    "SendResult",
    "SendStatus",
    "SimpleConsumer",
    "Sql92",
    "StartFrom",
    "Stretch",
    "TransactionResult",
    "TransactionState",
]

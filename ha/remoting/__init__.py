"""The remoting transport on Trio: connections that send and receive frames in batches, with limits and timeouts.

Request codes are interpreted by the handlers. `RemotingServer` and `RemotingClient` run `RemotingConnection`s.
"""

from ha.protocol.remoting_protocol import CloseCause

from .client import RemotingClient, connect_tcp, open_remoting_client
from .connection import Handler, RemotingConnection
from .handlers import RequestHandler, each_request, serve_each
from .options import ConnectionOptions, RemotingClientOptions, RemotingServerOptions
from .ports import BoundPort
from .server import RemotingServer
from .shared import RemotingStatistics
from .tls import PortTls, Secure

__all__ = [
    "BoundPort",
    "CloseCause",
    "ConnectionOptions",
    "Handler",
    "PortTls",
    "RemotingClient",
    "RemotingClientOptions",
    "RemotingConnection",
    "RemotingServer",
    "RemotingServerOptions",
    "RemotingStatistics",
    "RequestHandler",
    "Secure",
    "connect_tcp",
    "each_request",
    "open_remoting_client",
    "serve_each",
]

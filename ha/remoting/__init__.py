"""The remoting transport on Trio: frames in batches, both ways, over connections that are bounded in bytes and in time.

Knows no request code. Server: `serve_remoting`; client: `open_remoting_client`; both run `RemotingConnection`s.
"""

from .client import RemotingClient, connect_tcp, open_remoting_client, parse_address
from .connection import RemotingConnection
from .handlers import Handler, RequestHandler, each_request
from .options import ConnectionOptions, RemotingClientOptions, RemotingServerOptions
from .server import RemotingServer, RemotingStatistics, open_listeners, serve_remoting
from .tls import PortTls, Secure

__all__ = [
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
    "open_listeners",
    "open_remoting_client",
    "parse_address",
    "serve_remoting",
]

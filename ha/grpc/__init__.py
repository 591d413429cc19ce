"""The gRPC transport on Trio: HTTP/2, connections and calls. Knows no methods or messages."""

from .connection import Call, EndCause, GrpcConnection, GrpcOptions, GrpcStatistics, Service
from .frames import Status
from .server import GrpcServer

__all__ = ["Call", "EndCause", "GrpcConnection", "GrpcOptions", "GrpcServer", "GrpcStatistics", "Service", "Status"]

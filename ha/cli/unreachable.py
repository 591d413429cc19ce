"""Explains in one line which servers could not be reached, and what to do."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ha.errors import ClientError, ConnectionFailed, NameServersUnreachable

NOT_REACHABLE = "not reachable: "
HOST_NOT_FOUND = "host not found"
_RESOLVER_ERRORS = (socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_AGAIN, socket.EAI_FAIL)


def explain_unreachable(error: ClientError) -> str:
    """Returns a message with the addresses that can't be reached, the reasons, and the solution if it is obvious."""
    if not isinstance(error, NameServersUnreachable):
        text = _plain(str(error))
        is_port = isinstance(error, ConnectionFailed) and "can't connect" in error.reason
        return f"{text}; ha doctor checks the cluster's ports" if is_port else text
    text = f"no name server can be reached ({_plain(error.reason)})"
    if "refused" in error.reason:
        return f"{text}; start a node (ha master), or use --servers HOST:PORT"
    return f"{text}; check --servers and NAMESRV_ADDR"


def explain_no_node(errors: Mapping[str, str]) -> str:
    """Returns a message that says that no node can be reached and why, and, if all refused the connection, what to do.
    `errors`: address -> why there is no response."""
    tried = "; ".join(f"{address}: {reason.removeprefix(NOT_REACHABLE)}" for address, reason in errors.items())
    text = f"no node can be reached ({tried})"
    if all("refused" in reason for reason in errors.values()):
        return f"{text}; start a node (ha master), or use --servers or --admin HOST:PORT"
    return text


def reason_of_os(error: OSError) -> str:
    """Returns why a connection failed."""
    if isinstance(error, socket.gaierror) and error.errno in _RESOLVER_ERRORS:
        return HOST_NOT_FOUND
    return error.strerror or str(error)


def _plain(reason: str) -> str:
    return reason.replace("can't connect: ", "")

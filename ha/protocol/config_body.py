"""Bodies that show or change a server's configuration: GET_BROKER_CONFIG (26) and UPDATE_BROKER_CONFIG (25) of a
broker, GET_NAMESRV_CONFIG (319) and UPDATE_NAMESRV_CONFIG (318) of a name server.

Lines `key=value` in UTF-8. Source: MixAll.properties2String, string2Properties.
"""

from __future__ import annotations

from collections.abc import Mapping

from ha.errors import RemoteProtocolError

SIZE_MAX = 65_536
"""Maximum size of a body in bytes"""
REMARK_SIZE_MAX = 1000


def encode_config(config: Mapping[str, str]) -> bytes:
    """Returns the body that shows `config`, sorted by key."""
    return "".join(f"{key}={value}\n" for key, value in sorted(config.items())).encode()


def change_fault(server: str, present: Mapping[str, str], body: bytes | memoryview) -> str:
    """Returns the remark for refusing the change in `body`, since nothing can be changed while the server runs; "" if
    all values equal those in `present`, the current configuration.

    `server`: what the remark calls the server, such as "broker". Raises RemoteProtocolError if `body` is longer than
    SIZE_MAX bytes.
    """
    if len(body) > SIZE_MAX:
        raise RemoteProtocolError(f"configuration of {len(body)} bytes; at most {SIZE_MAX}")
    found = []
    for line in bytes(body).decode("utf-8", "replace").splitlines():
        key, _, value = (part.strip() for part in line.partition("="))
        if not key or key.startswith(("#", "!")):
            continue
        if key not in present:
            found.append(f"{key} is no key here")
        elif present[key] != value:
            found.append(f"{key} is {present[key]}")
    if not found:
        return ""
    return f"nothing can be changed while the {server} runs, set it in its file: {'; '.join(found)}"[:REMARK_SIZE_MAX]

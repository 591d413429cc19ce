"""Reads posted forms, and detects those that another site has sent."""

from __future__ import annotations

from contextlib import aclosing
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request

LOGIN_SIZE_MAX = 4096
ACTION_SIZE_MAX = 256 * 1024
"""Maximum bytes of an action's form; its encoding can triple the size of a message body."""
FIELD_COUNT_MAX = 16


async def form_fields(request: Request, size_max: int) -> dict[str, str]:
    """Returns the fields of a posted form; empty if it is too large, incomplete, or has too many fields."""
    body = bytearray()
    try:
        async with aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > size_max:
                    return {}
    except ClientDisconnect:
        return {}
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=FIELD_COUNT_MAX)
    except ValueError:
        return {}
    return {name: values[0] for name, values in fields.items()}


def is_from_here(request: Request) -> bool:
    """Returns whether a browser sent the form from a page of this node, as far as the request's headers tell.

    Pages ask browsers to send no referrer; Origin is then "null", which is accepted. This check only complements the
    form token.
    """
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    origin = request.headers.get("origin", "null")
    return origin == "null" or origin.partition("://")[2] == request.headers.get("host", "")

"""Serves style sheets, scripts and images from the package, and defines the headers of the dashboard's responses.

The address of an asset contains a hash of all assets, so that browsers can cache it permanently. Scripts import each
other by relative names.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..credentials import STATIC_PATH

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers that forbid content from other sites, inline content, frames, and referrers (which would contain names of
topics)."""
UNCACHED = {**HEADERS, "Cache-Control": "no-store"}
_KEPT = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@cache
def _assets() -> tuple[str, dict[str, tuple[bytes, str]]]:
    """Returns a hash of all assets, and their contents and types by name."""
    found = {}
    for entry in sorted(files(__package__).joinpath("static").iterdir(), key=lambda each: each.name):
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            found[entry.name] = entry.read_bytes(), media_type
    content = b"".join(name.encode() + raw for name, (raw, _) in found.items())
    return sha256(content).hexdigest()[:12], found


def asset_url(name: str) -> str:
    """Returns the address of an asset. Raises KeyError for an unknown name."""
    version, found = _assets()
    found[name]
    return f"{STATIC_PATH}/{version}/{name}"


async def serve_asset(request: Request) -> Response:
    """Handles the request for an asset."""
    version, found = _assets()
    asset = found.get(request.path_params["name"])
    if asset is None or request.path_params["version"] != version:
        return PlainTextResponse("no such file\n", 404, HEADERS)
    content, media_type = asset
    return Response(content, headers=_KEPT, media_type=media_type)

"""Style, scripts and pictures out of the package, and the headers that every answer of the dashboard has.

An asset's address holds a hash of all of them, so that a browser keeps them for good and another version of halog is
another address. Scripts import one another by their relative names.
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
"""Nothing from elsewhere, nothing written into a page, nobody's frame; addresses, which name topics, told to nobody."""
UNCACHED = {**HEADERS, "Cache-Control": "no-store"}
_KEPT = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@cache
def _assets() -> tuple[str, dict[str, tuple[bytes, str]]]:
    """A hash of all assets, and by name each one's content and type."""
    found = {}
    for entry in sorted(files(__package__).joinpath("static").iterdir(), key=lambda each: each.name):
        media_type = _TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            found[entry.name] = entry.read_bytes(), media_type
    content = b"".join(name.encode() + raw for name, (raw, _) in found.items())
    return sha256(content).hexdigest()[:12], found


def asset_url(name: str) -> str:
    """The address of an asset; KeyError if there is none."""
    version, found = _assets()
    found[name]
    return f"{STATIC_PATH}/{version}/{name}"


async def serve_asset(request: Request) -> Response:
    """Answer with an asset."""
    version, found = _assets()
    asset = found.get(request.path_params["name"])
    if asset is None or request.path_params["version"] != version:
        return PlainTextResponse("no such file\n", 404, HEADERS)
    content, media_type = asset
    return Response(content, headers=_KEPT, media_type=media_type)

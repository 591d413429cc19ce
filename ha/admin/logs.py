"""/log-level: how much each logger says, and how to change that while the node runs.

    GET                                        the levels in force, by logger, as JSON
    POST ?logger=ha.replication&level=DEBUG    set one, until the process ends; level=UNSET: what the one above it has

"" is the root, above all. Only loggers that exist can be set: strangers' names make none.
"""

from __future__ import annotations

import logging

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

logger = logging.getLogger(__name__)

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
UNSET = "UNSET"


class LoggerLevel(msgspec.Struct, frozen=True):
    """A logger: what it was set to (UNSET: nothing), and what follows from that."""

    level: str
    effective: str


def levels() -> dict[str, LoggerLevel]:
    """The root, everything of this package, and whatever else was set."""
    found = {"": logging.getLogger()}
    for name in sorted(_names()):
        each = logging.getLogger(name)
        if name == "ha" or name.startswith("ha.") or each.level:
            found[name] = each
    return {
        name: LoggerLevel(
            logging.getLevelName(each.level) if each.level else UNSET, logging.getLevelName(each.getEffectiveLevel())
        )
        for name, each in found.items()
    }


def set_level(name: str, level: str) -> str:
    """Set one; return why that can't be, or ""."""
    if level not in (*LEVELS, UNSET):
        return f"level is one of {', '.join((*LEVELS, UNSET))}"
    if name and name not in _names():
        return "there is no such logger; GET /log-level lists those there are"
    if not name and level == UNSET:
        return "the root has nobody above it"
    logging.getLogger(name).setLevel(logging.NOTSET if level == UNSET else level)
    return ""


def _names() -> set[str]:
    """Loggers that exist, and those above them."""
    return set(logging.root.manager.loggerDict)


async def _log_level(request: Request) -> Response:
    if request.method == "POST":
        name, level = request.query_params.get("logger", "ha"), request.query_params.get("level", "").upper()
        refusal = set_level(name, level)
        if refusal:
            return PlainTextResponse(f"{refusal}\n", 400)
        logger.warning("admin.log_level_changed logger=%s level=%s", name or "root", level)
    body = msgspec.json.format(msgspec.json.encode(levels()), indent=2)
    return Response(body + b"\n", media_type="application/json")


LOG_LEVEL = Route("/log-level", _log_level, methods=["GET", "POST"])

"""/log-level: shows and changes the levels of loggers at run time.

    GET                                        the levels of all loggers, as JSON
    POST ?logger=ha.replication&level=DEBUG    set a level until the process ends; level=UNSET inherits the parent's

"" is the root logger. Only existing loggers can be set, so that requests create none.
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
    """The level set for a logger (or UNSET), and its effective level."""

    level: str
    effective: str


def levels() -> dict[str, LoggerLevel]:
    """Returns the levels of the root logger, of the loggers of ha, and of others with a level of their own."""
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
    """Sets a level; returns why it can't be set, or ""."""
    if level not in (*LEVELS, UNSET):
        return f"level must be one of {', '.join((*LEVELS, UNSET))}"
    if name and name not in _names():
        return "unknown logger; GET /log-level lists the existing ones"
    if not name and level == UNSET:
        return "the root logger has no parent"
    logging.getLogger(name).setLevel(logging.NOTSET if level == UNSET else level)
    return ""


def _names() -> set[str]:
    """Returns the names of existing loggers and their ancestors."""
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

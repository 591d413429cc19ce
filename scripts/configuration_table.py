"""Generates the tables of docs/configuration.md from ha/config/model.py, for `scripts/reference`.

Text outside the three marked tables is unchanged. A test fails if the file is out of date. rocketmq_defaults.json holds
RocketMQ's defaults; tests/interop/test_defaults.py compares them with its brokers.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from itertools import pairwise
from pathlib import Path

from ha.config import Config, NameServerConfig, ProxyConfig
from ha.config.check import accepted, fields

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"
ROCKETMQ_DEFAULTS = Path(__file__).parent / "rocketmq_defaults.json"
"""Release -> halog's key -> the broker's default."""

_OF_THE_MACHINE = {"brokerName", "brokerIP1", "brokerIP2", "listenPort", "storePathRootDir"}
_OTHER_NAMES = {("4.9.7", "haMaxGapNotInSync"): "haSlaveFallbehindMax"}


def notes(struct: type[Config] | type[NameServerConfig] | type[ProxyConfig]) -> dict[str, str]:
    """Returns field name -> its docstring on one line, including inherited fields."""
    found: dict[str, str] = {}
    for each in struct.__mro__:
        if each.__module__.startswith("ha."):
            module = ast.parse(Path(str(sys.modules[each.__module__].__file__)).read_text())
            body = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == each.__name__).body
            found |= _notes_of(body)
    return found


def _notes_of(body: list[ast.stmt]) -> dict[str, str]:
    found = {}
    for node, following in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant)
            found[node.target.id] = " ".join(str(following.value.value).split())
    return found


def shared_keys() -> list[str]:
    """Returns the keys whose defaults can be compared with RocketMQ's; excludes machine-specific keys."""
    return [key for key in fields(Config) if key not in _OF_THE_MACHINE]


def rocketmq_name(key: str, version: str) -> str:
    """Returns the name of `key` in a RocketMQ release."""
    return _OTHER_NAMES.get((version, key), key)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default in ("", None, -1) else str(default)


def _rocketmq(key: str, ours: str) -> str:
    """Describes the defaults of 5.5.0 and 4.9.7: empty without such a key, one value if they agree."""
    releases: dict[str, dict[str, str]] = json.loads(ROCKETMQ_DEFAULTS.read_text())
    old, new = releases["4.9.7"].get(key), releases["5.5.0"].get(key)
    if new is None:
        return "" if old is None else ("the same in 4.9" if old == ours else f"4.9: {old}")
    same = "the same" if new == ours else new or "empty"
    return same if old in (None, new) else f"{same}; 4.9: {old}"


def table(struct: type[Config] | type[NameServerConfig] | type[ProxyConfig]) -> str:
    """Returns all keys of `struct` as a Markdown table, in source order."""
    texts = notes(struct)
    lines = ["| key | accepted | default | RocketMQ's | |", "|---|---|---|---|---|"]
    for key, field in fields(struct).items():
        default = _shown(field.default)
        rocketmq = _rocketmq(key, default) if struct is Config else ""
        lines.append(f"| `{key}` | {accepted(field.type)} | {default} | {rocketmq} | {texts.get(field.name, '')} |")
    return "\n".join(lines)


def render(document: str) -> str:
    """Returns `document` with the tables between its markers replaced."""
    for struct in (Config, NameServerConfig, ProxyConfig):
        begin, end = f"<!-- table {struct.__name__} -->", "<!-- end -->"
        document = re.sub(f"(?s){begin}.*?{end}", lambda _: f"{begin}\n{table(struct)}\n{end}", document, count=1)  # noqa: B023
    return document

"""The values in docs/limits.md are those of keys and constants."""

import importlib
import re
from pathlib import Path
from typing import Any

import msgspec

from ha.broker.options import BrokerOptions
from ha.config import Config, fields
from ha.config.limit_keys import ServerLimitKeys
from ha.remoting import RemotingServerOptions

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| (?P<limit>[^|]+) \| (?P<value>[\d,.]+) \| `(?P<source>[^`]+)` \| [^|]+ \| `(?P<test>[^`]+::[^`]+)` \|$"
)
LINES = (ROOT / "docs" / "limits.md").read_text().splitlines()
ROWS = [match for line in LINES if (match := ROW.match(line))]


def value_of(source: str) -> Any:
    """The default of a key, of a field of an options struct, or a constant."""
    if "." not in source:
        default = fields(Config)[source].default
        return getattr(Config(), fields(Config)[source].name) if default == -1 else default
    module, _, name = source.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        module, _, struct = module.rpartition(".")
        kind = getattr(importlib.import_module(module), struct)
        [default] = [field.default for field in msgspec.structs.fields(kind) if field.name == name]
        return default


def test_every_line_of_a_table_is_read() -> None:
    lines = [line for line in LINES if line.startswith("| ") and not line.startswith("| limit ")]
    assert len(ROWS) == len(lines) > 40


def test_values_are_those_in_force() -> None:
    documented = [(row["source"], float(row["value"].replace(",", ""))) for row in ROWS]
    assert documented == [(source, value_of(source)) for source, _ in documented]


def test_servers_made_without_a_configuration_have_the_same_limits() -> None:
    """So do those of other tests, which then say something about servers as they are run."""
    for name in ServerLimitKeys.__annotations__:
        assert getattr(RemotingServerOptions(), name) == getattr(Config(), name)
    for name in ("topic_count_max", "group_count_max", "sends_in_flight_max", "hold_count_max"):
        assert getattr(BrokerOptions(), name) == getattr(Config(), name)

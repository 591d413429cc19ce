"""Invalid configuration values: apache/rocketmq#2611, where a value that is too large became the default."""

import msgspec
import pytest
from msgspec import inspect

from ha.config import Config, load_config, render
from ha.config.check import fields
from ha.errors import ConfigError


def integer_keys() -> list[tuple[str, int, int]]:
    """All numeric keys, with their minimum and maximum."""
    found = []
    for key, field in fields(Config).items():
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for kind in kinds:
            if isinstance(kind, inspect.IntType):
                assert kind.le is not None, key
                found.append((key, max(kind.ge or 0, 0), kind.le))
    return found


def test_2611_out_of_range_numbers_are_never_clamped() -> None:
    """For every key: its limits are accepted (or rejected because of another key), values beyond them are not."""
    keys = integer_keys()
    assert len(keys) > 40
    taken = 0
    for key, low, high in keys:
        for value in (low, high):
            try:
                loaded = load_config(Config, settings=[f"{key}={value}"])
            except ConfigError:
                continue
            taken += 1
            assert f"{key}={value}\n" in render(loaded.config)
        for value in (low - 1, high + 1, high * 10, -(10**30), 10**30):
            with pytest.raises(ConfigError, match=key):
                load_config(Config, settings=[f"{key}={value}"])
    assert taken > len(keys)


def test_2611_effective_values_are_shown() -> None:
    """`--print-config` prints every key with its effective value."""
    printed = render(load_config(Config, settings=["haSlaveFallbehindMax=2147483647"]).config)
    assert "haMaxGapNotInSync=2147483647\n" in printed
    shown = {line.partition("=")[0] for line in printed.splitlines()}
    unset = {
        field.encode_name for field in msgspec.structs.fields(Config) if getattr(Config(), field.name) in (None, "")
    }
    assert shown | unset >= set(fields(Config))

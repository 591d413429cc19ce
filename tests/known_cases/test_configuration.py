"""Invalid configuration values."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from ha.config import Config, load_config, render
from ha.config.check import fields
from ha.errors import ConfigError

TOO_LARGE = "26843545600"


@pytest.mark.parametrize("key", ["haSlaveFallbehindMax", "haMaxGapNotInSync"])
@pytest.mark.parametrize("source", ["file", "environment", "setting"])
def test_2611_overflowing_value_is_rejected(key: str, source: str, tmp_path: Path) -> None:
    """apache/rocketmq#2611: with haSlaveFallbehindMax=26843545600 in broker.conf the broker started with 268435456: the
    field is an int, and the setter that throws is skipped silently.

    Halog refuses to start and names the key as it was given, the value and the accepted range.
    """
    file = tmp_path / "broker.conf"
    file.write_text(f"{key}={TOO_LARGE}\n" if source == "file" else "")
    with pytest.raises(ConfigError) as caught:
        load_config(
            Config,
            file=file,
            environment={f"HA_{key.upper()}": TOO_LARGE} if source == "environment" else {},
            settings=[f"{key}={TOO_LARGE}"] if source == "setting" else [],
        )
    text = str(caught.value)
    assert key in text
    assert f"{TOO_LARGE} overflows a Java int" in text
    assert "2147483647" in text


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

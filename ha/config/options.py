"""Creates the options of other packages from a configuration.

A key is defined once, in a struct of this package. A package that uses it has an option of the same name in its own
options struct, and `options_of` copies the value; no list repeats the names.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


def options_of(struct: type[S], config: msgspec.Struct, *, prefix: str = "", **values: Any) -> S:
    """Creates `struct` from `values` and from attributes of `config`.

    An option `x` that is not in `values` is copied from `{prefix}x` or, if `config` lacks that, from `x`. An option
    `x_s` can also come from `{prefix}x_ms`, converted to seconds. Other options keep their defaults.
    """
    for name in struct.__struct_fields__:
        if name in values:
            continue
        if (own := next((each for each in (prefix + name, name) if hasattr(config, each)), None)) is not None:
            values[name] = getattr(config, own)
        elif name.endswith("_s") and hasattr(config, ms := f"{prefix}{name[:-2]}_ms"):
            values[name] = getattr(config, ms) / 1000
    return struct(**values)

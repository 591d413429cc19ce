"""The recorded bytes under tests/fixtures, opened for tests."""

import functools
import json
import tarfile
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures"
STORES = ("4.9.7", "5.5.0")


@functools.cache
def store_files(version: str) -> dict[str, bytes]:
    """Return relative path -> content of each file of the recorded store."""
    with tarfile.open(FIXTURES / f"store-{version}.tar.gz") as archive:
        return {
            member.name.removeprefix("./"): archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if member.isfile()
        }


@functools.cache
def manifest(version: str) -> dict[str, Any]:
    """Return what the recorded store holds."""
    return json.loads((FIXTURES / f"store-{version}.manifest.json").read_text())  # type: ignore[no-any-return]


@functools.cache
def commitlog(version: str) -> dict[str, bytes]:
    """Return file name -> content of the recorded commitlog's segments, in order."""
    files = store_files(version)
    return {name.split("/")[1]: files[name] for name in sorted(files) if name.startswith("commitlog/")}


@functools.cache
def ha_connections(capture: str) -> list[dict[str, Any]]:
    """Return the connections of a recorded HA dialogue, with the streams' bytes under "m2s" and "s2m"."""
    described = json.loads((FIXTURES / f"ha-{capture}.frames.json").read_text())
    return [
        {**connection, **{way: (FIXTURES / name).read_bytes() for way, name in connection["files"].items()}}
        for connection in described["connections"]
    ]

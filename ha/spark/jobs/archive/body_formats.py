"""Selects the module for a format of bodies from which an archive decodes columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import pyarrow as pa


class BodyFormat(Protocol):
    """The interface of the module of a format."""

    @property
    def ACCEPTED(self) -> str:  # noqa: N802 - a constant of the module
        """Describes a valid schema of this format, for error messages."""

    def stored_schema(self, given: str | tuple[bytes, str], /) -> dict[str, Any]:
        """Return the user's schema in the form that the archive's manifest stores. Raises ValueError if it is invalid;
        OptionError if a required package is not installed."""

    def columns(self, stored: dict[str, Any], /) -> pa.StructType:
        """Return the columns of a stored schema. Raises ValueError for a type that no column can have."""

    def decoder(self, stored: dict[str, Any], /) -> Callable[[bytes], Any]:
        """Return a function that returns the values of a body by column, or None if the body can't be decoded.

        Raises OptionError if a required package is not installed.
        """


def body_format(name: Literal["json", "avro", "protobuf"]) -> BodyFormat:
    """Return the module of a format. Imports only this one, because each worker process of Spark pays for imports."""
    if name == "avro":
        from ha.spark.jobs.archive import avro_bodies

        return avro_bodies
    if name == "protobuf":
        from ha.spark.jobs.archive import protobuf_bodies

        return protobuf_bodies
    from ha.spark.jobs.archive import json_bodies

    return json_bodies
